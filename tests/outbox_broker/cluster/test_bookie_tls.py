"""Settings of TLS to bookies that cannot work, and servers that are no bookies: each is named with its cure."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from outbox_broker.cluster.bookie_list import BookieList
from outbox_broker.cluster.bookie_tls import BookieTls, tls_problems
from outbox_broker.cluster.cluster_settings import ClusterSettings
from outbox_core.common.errors import ConfigurationError
from tests.fixtures.certificate_authority import Authority

STORE = "bookkeeper://zk1/outbox"


def test_without_the_setting_nothing_is_encrypted_and_files_for_it_are_refused(tmp_path: Path) -> None:
    assert ClusterSettings(store=STORE).bookie_tls is None
    with pytest.raises(ConfigurationError, match="set ledgers_tls too"):
        _ = ClusterSettings(store=STORE, ledgers_ca_file=tmp_path / "ca.pem").bookie_tls


def test_the_ca_of_the_bookies_has_to_be_named_and_readable(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs ledgers_ca_file"):
        _ = ClusterSettings(store=STORE, ledgers_tls=True).bookie_tls
    with pytest.raises(ConfigurationError, match=r"CA file of the bookies .*missing\.pem cannot be used"):
        _ = ClusterSettings(store=STORE, ledgers_tls=True, ledgers_ca_file=tmp_path / "missing.pem").bookie_tls


def test_a_certificate_needs_its_own_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    mine, other = authority.certificate("127.0.0.1"), authority.certificate("127.0.0.2")

    with pytest.raises(ConfigurationError, match="needs both its file and that of its key"):
        BookieTls(ca_file=authority.file, certificate=mine.certificate)
    with pytest.raises(ConfigurationError, match="cannot be shown to bookies"):
        BookieTls(ca_file=authority.file, certificate=mine.certificate, key=other.key)
    assert BookieTls(ca_file=authority.file, certificate=mine.certificate, key=mine.key).context()


@pytest.mark.slow
def test_a_bookie_whose_answer_trickles_is_given_up_though_every_byte_comes_in_time(tmp_path: Path) -> None:
    tls = BookieTls(ca_file=Authority(tmp_path / "ca").file)
    is_over = threading.Event()

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall((1_000).to_bytes(4, "big"))
            while not is_over.wait(0.2):
                connection.sendall(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        bookie = f"127.0.0.1:{listener.getsockname()[1]}"
        trickling = threading.Thread(target=trickle, args=(listener,))
        trickling.start()
        try:
            problems = tls_problems([bookie], tls, timeout_ms=1_000)
        finally:
            is_over.set()
            trickling.join()

    assert "timed out" in problems[bookie]


def test_what_is_no_bookie_or_not_there_does_not_answer(tmp_path: Path) -> None:
    tls = BookieTls(ca_file=Authority(tmp_path / "ca").file)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as unused:
        listening, absent = (f"127.0.0.1:{one.getsockname()[1]}" for one in (listener, unused))
        unused.close()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(64)

        thread = threading.Thread(target=answer)
        thread.start()
        problems = tls_problems([listening, absent, "named-otherwise"], tls, timeout_ms=60_000)
        thread.join()

    assert problems[listening] == "does not answer: it is no bookie"
    assert problems[absent].startswith("does not answer: ")
    assert len(problems) == 2


def test_a_bookie_that_tls_does_not_reach_is_no_spare_one() -> None:
    bookies = BookieList(
        writable=("b1:1", "b2:1", "b3:1", "b4:1"), read_only=(), ensemble=3, tls_problems={"b4:1": "has no TLS"}
    )

    assert bookies.usable == ("b1:1", "b2:1", "b3:1")
    assert "no bookie can be spared" in str(bookies.warning)
    assert "bookie b4:1: has no TLS" in bookies.as_text()
    assert bookies.as_data()["tls_problems"] == {"b4:1": "has no TLS"}
