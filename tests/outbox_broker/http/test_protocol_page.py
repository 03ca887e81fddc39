"""docs/protocol.md says what the server does: every route, every problem and its status, every bound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.responses import TITLES
from outbox_broker.http.routes import ROUTES
from outbox_core.protocol.problem import ProblemKind

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


def test_every_route_is_on_the_page_with_its_role() -> None:
    for route in ROUTES:
        found = re.search(rf"`{route.method} {re.escape(route.path)}(\?[a-z_&]*)?`", PAGE)
        assert found, (route.method, route.path)
        role = re.search(r"role `(\w+)`", PAGE[found.end() :])
        assert role is not None
        assert role.group(1) == route.role.value, (route.method, route.path)


def test_every_problem_is_on_the_page_with_its_status() -> None:
    listed = {kind: int(status) for kind, status in re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \|", PAGE, re.MULTILINE)}

    assert listed == {kind.value: TITLES[kind][0] for kind in ProblemKind}


@pytest.mark.parametrize(
    ("bound", "shown"),
    [
        ("request_bytes_max", "64 MiB"),
        ("body_bytes_max", "16 MiB"),
        ("batch_messages_max", "1,000"),
        ("request_head_bytes_max", "32 KiB"),
        ("request_read_ms_max", "30 s"),
        ("pull_bytes_max", "32 MiB"),
        ("request_head_ms_max", "10 s"),
        ("response_write_ms_max", "30 s"),
        ("keep_alive_ms", "75 s"),
        ("work_bytes_max", "256 MiB"),
        ("connections_reserved", "32"),
        ("publishes_max", "256"),
        ("requests_max", "512"),
        ("waiting_pulls_max", "10,000"),
    ],
)
def test_every_bound_is_on_the_page_with_its_default(bound: str, shown: str) -> None:
    row = re.search(rf"^\| `{bound}`[^|]*\| ([^|]*) \|", PAGE, re.MULTILINE)

    assert row is not None
    assert row.group(1) == shown
    assert _number(shown.partition(";")[0]) == getattr(HttpSettings(), bound)


def _number(shown: str) -> int:
    figure, _, unit = shown.replace(",", "").partition(" ")
    return int(figure) * {"": 1, "KiB": 1024, "MiB": 1024**2, "s": 1000}[unit]
