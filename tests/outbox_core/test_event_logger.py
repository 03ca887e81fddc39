"""What a program that knows nothing of our fields sees of an event, and what it must not see."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.logs import event_name, formatter

events = EventLogger("outbox.test_event_logger")

UNCONFIGURED = """
from outbox_core.runtime.event_logger import EventLogger
EventLogger("outbox.consumers").warning("pull_failed", extra={"url": "http://u:hunter2@db:1", "error": "no route"})
"""


def test_a_program_that_sets_up_no_logging_shows_the_reason() -> None:
    ended = subprocess.run([sys.executable, "-c", UNCONFIGURED], capture_output=True, text=True, timeout=300)

    assert ended.stderr == 'pull_failed url=http://u:***@db:1 error="no route"\n'


def test_the_template_is_the_event_so_that_error_trackers_group_by_it(caplog: pytest.LogCaptureFixture) -> None:
    for topic in ("orders", "payments"):
        events.error("pull_failed", extra={"topic": topic})

    assert {record.msg for record in caplog.records} == {"pull_failed%s"}
    assert [record.getMessage() for record in caplog.records] == [
        "pull_failed topic=orders", "pull_failed topic=payments"
    ]  # fmt: skip


def test_our_own_formats_have_the_fields_once(caplog: pytest.LogCaptureFixture) -> None:
    events.error("pull_failed", extra={"topic": "orders"})

    [record] = caplog.records
    line = json.loads(formatter("json").format(record))
    assert (line["event"], line["topic"]) == ("pull_failed", "orders")
    assert formatter("text").format(record).endswith(" pull_failed topic=orders")


def test_an_event_without_fields_is_its_name(caplog: pytest.LogCaptureFixture) -> None:
    events.warning("sender_not_started")

    [record] = caplog.records
    assert (record.getMessage(), record.args) == ("sender_not_started", ())


def test_a_field_is_of_one_line_and_has_no_body_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    events.error("send_failed", extra={"error": "two\nlines", "body": b"private", "token": "hunter2"})

    text = caplog.records[0].getMessage()
    assert "\n" not in text
    assert "private" not in text
    assert "hunter2" not in text


def test_the_record_names_the_line_that_logged_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    try:
        {}["missing"]
    except LookupError:
        events.exception("e")
    for write in (events.info, events.warning, events.error, events.critical):
        write("e", extra={"topic": "orders"})
    events.log(logging.INFO, "e")

    assert {Path(record.pathname).name for record in caplog.records} == {Path(__file__).name}
    assert caplog.records[0].exc_info is not None


def test_a_record_of_another_library_keeps_its_message(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("another").warning("%d of %s", 3, "it")

    assert event_name(caplog.records[0]) == "3 of it"
