"""What others wrote to a database, or a server answered, is shown as text: no codes for a terminal, and no markup."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from outbox_core.runtime.command import main
from tests.outbox.shop import Shop

CLEAR = "\x1b[2J"
SHOWN = "\\x1b[2J"


def test_status_shows_names_of_compensators_and_sources_as_text(sqlite_shop: Shop) -> None:
    instance, lease = sqlite_shop.tables.instance, sqlite_shop.tables.lease
    with sqlite_shop.engine.begin() as connection:
        living = {"id": f"[/red]{CLEAR}", "zone": "[bold]a", "started_at_us": 0, "alive_until_us": 1 << 62}
        connection.execute(instance.insert().values(living))
        connection.execute(lease.insert().values(source=f"[/red]{CLEAR}s", instance=None, until_us=0, epoch=1))

    done = sqlite_shop.command("status")

    assert f"[/red]{SHOWN}" in done.stdout
    assert "[bold]a" in done.stdout
    assert f"1 ([/red]{SHOWN}s)" in done.stdout
    assert "\x1b" not in done.stdout


def test_an_error_shows_the_words_of_a_server_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    class Hostile(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"busy{CLEAR}".encode()
            self.send_response(503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """Does nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(SystemExit):
                main(["broker", "check", "--timeout-ms", "60000", "--url", f"http://127.0.0.1:{server.server_port}"])
        finally:
            server.shutdown()
            thread.join()

    error = capsys.readouterr().err
    assert f"busy{SHOWN}" in error
    assert "\x1b" not in error
