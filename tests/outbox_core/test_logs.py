"""Lines of the log: their keys and order, one line each, no secrets, no bodies, and nothing that cannot be logged."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.logs import (
    EXCEPTION_CHARS_MAX,
    FIELD_CHARS_MAX,
    FIELD_ITEMS_MAX,
    LogFormat,
    configure,
    fitting_format,
    formatter,
    mask_secrets,
)

logger = logging.getLogger("outbox.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where this process logs to, for the length of a test."""
    root = logging.getLogger()
    before, level = root.handlers, root.level
    yield io.StringIO()
    root.handlers, root.level = before, level
    logging.getLogger("noisy").setLevel(logging.NOTSET)


def line_of(event: str, /, **extra: Any) -> dict[str, Any]:
    """The JSON line of an event with these fields."""
    record = logging.LogRecord("outbox.test", logging.INFO, "here.py", 1, event, None, None)
    vars(record).update(extra)
    text = formatter(LogFormat.JSON).format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_its_keys_in_their_order_and_the_events_own_fields_last(stream: io.StringIO) -> None:
    configure(stream=stream, context=lambda: {"trace_id": "a" * 32, "span_id": "b" * 16})

    logger.info("row_sent", extra={"rows": 3, "topic": "payments", "message_id": "m-1"})

    line = json.loads(stream.getvalue())
    assert list(line) == ["ts", "level", "event", "logger", "message_id", "topic", "trace_id", "span_id", "rows"]
    assert line["ts"].endswith("Z")
    assert len(line["ts"]) == len("2026-11-21T07:40:00.123Z")
    assert (line["level"], line["event"], line["logger"], line["rows"]) == ("info", "row_sent", "outbox.test", 3)


def test_text_is_one_line_for_people(stream: io.StringIO) -> None:
    configure(format="text", stream=stream)

    logger.warning("pass_failed", extra={"error": "no answer\nat all\x1b[31m", "rows": 3, "none": ""})

    text = stream.getvalue()
    assert text.endswith('Z warning outbox.test pass_failed error="no answer\\nat all\\x1b[31m" rows=3 none=""\n')


@pytest.mark.parametrize("format_", LogFormat)
def test_a_stack_trace_comes_along_without_its_secrets(stream: io.StringIO, format_: LogFormat) -> None:
    configure(format=format_, stream=stream)
    try:
        int("mysql+pymysql://app:hunter2@db/shop")
    except ValueError:
        logger.exception("pass_failed")

    text = stream.getvalue()
    assert "Traceback" in text
    assert "mysql+pymysql://app:***@db/shop" in text
    assert "hunter2" not in text


def test_levels_and_quiet_loggers_are_kept(stream: io.StringIO) -> None:
    configure(level="warning", stream=stream, quiet={"noisy": "error"})

    logger.info("not shown")
    logger.critical("shown_as_error")
    logging.getLogger("noisy").warning("not shown")
    configure(level="error", stream=stream, quiet={"noisy": "debug"})
    logging.getLogger("noisy.part").warning("not shown")

    [line] = stream.getvalue().splitlines()
    assert (json.loads(line)["event"], json.loads(line)["level"]) == ("shown_as_error", "error")


def test_configuring_again_does_not_double_lines(stream: io.StringIO) -> None:
    for _ in range(3):
        configure(stream=stream)

    logger.info("once")

    assert len(stream.getvalue().splitlines()) == 1


def test_words_that_are_none_of_ours_are_refused_and_change_nothing(stream: io.StringIO) -> None:
    before = list(logging.getLogger().handlers)

    for wrong in ({"format": "xml"}, {"level": "loud"}, {"level": "INFO"}, {"quiet": {"x": "loud"}}):
        with pytest.raises(ConfigurationError, match="there is no log"):
            configure(stream=stream, **wrong)  # type: ignore[arg-type]

    assert logging.getLogger().handlers == before


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mysql+pymysql://app:hunter2@db:3306/shop", "mysql+pymysql://app:***@db:3306/shop"),
        ("two: redis://:hunter2@a:1 and amqp://u:hunter2@b", "two: redis://:***@a:1 and amqp://u:***@b"),
        ("mysql://root:hun@ter/2@db/shop", "mysql://root:***@db/shop"),
        ("http://broker:7788/v1/topics", "http://broker:7788/v1/topics"),
        ("https://h/x?access_token=hunter2&a=b", "https://h/x?access_token=***&a=b"),
        ("sqlite:///shop.db?password=hunter2", "sqlite:///shop.db?password=***"),
        ("Authorization: Bearer hunter2.hunter2", "Authorization: Bearer ***"),
        ("basic aHVudGVyMg==", "basic ***"),
        ("a basic rule, a bearer of news", "a basic rule, a bearer of news"),
        ("(1045, \"Access denied for user 'app'@'10.0.0.1'\")", "(1045, \"Access denied for user 'app'@'10.0.0.1'\")"),
    ],
)
def test_secrets_in_texts_are_masked_and_the_rest_is_not(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert line_of("event", url=text)["url"] == masked
    assert line_of(text)["event"] == masked


def test_fields_that_are_secret_by_name_are_masked_at_any_depth() -> None:
    line = line_of(
        "e",
        password="hunter2",
        broker_token="hunter2",
        options={
            "api_key": "hunter2",
            "nested": {"Authorization": ["hunter2"]},
            "deep": [[[[["hunter2"]]]]],
            "url": "x://u:hunter2@h",
        },
        token=None,
        headers=[{"set-cookie": "hunter2"}],
    )

    assert "hunter2" not in json.dumps(line)
    assert line["token"] is None
    assert line["options"]["api_key"] == "***"


def test_bytes_may_be_a_body_and_are_never_written() -> None:
    line = line_of("e", body=b"the secret", more=[bytearray(b"the secret"), memoryview(b"the secret")])

    assert line["body"] == "<10 bytes>"
    assert "secret" not in json.dumps(line)


def test_a_long_field_is_cut_after_it_is_masked() -> None:
    url = "x" * (FIELD_CHARS_MAX - 20) + " mysql://app:hunter2-hunter2@db/shop"

    line = line_of("e", error=url)

    assert "hunter2" not in line["error"]
    assert len(line["error"]) < FIELD_CHARS_MAX + 100


def test_a_stack_trace_may_be_longer_than_a_field_and_is_cut_at_a_limit_of_its_own(stream: io.StringIO) -> None:
    configure(stream=stream)
    for chars in (FIELD_CHARS_MAX, EXCEPTION_CHARS_MAX):
        logger.error("pass_failed", exc_info=ValueError("x" * chars))

    whole, cut = (json.loads(line)["exception"] for line in stream.getvalue().splitlines())
    assert whole.endswith("x" * FIELD_CHARS_MAX)
    assert EXCEPTION_CHARS_MAX < len(cut) < EXCEPTION_CHARS_MAX + 100


def test_a_field_cannot_pass_itself_off_as_the_lines_own() -> None:
    line = line_of("the event", event="another", level="debug", ts="yesterday", logger="other", exception="none")

    assert (line["event"], line["level"], line["logger"]) == ("the event", "info", "outbox.test")
    assert (line["field_event"], line["field_exception"]) == ("another", "none")


class Unprintable:
    """What has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def test_whatever_is_logged_becomes_a_line(stream: io.StringIO) -> None:
    configure(stream=stream)
    deep: list[Any] = []
    for _ in range(50):
        deep = [deep]
    circle: dict[str, Any] = {}
    circle["self"] = circle

    extra = {"a": Unprintable(), "b": Decimal("1.5"), "c": {1: {2, 3}}, "d": float("nan"), "e": deep, "f": circle}
    logger.info("odd", extra={**extra, "g": "\ud800", "h": ("x",), "i": 10**30, "j": [0] * 1_000})
    wrong_arguments = ("x",)
    logger.info("wrong %d arguments %s", *wrong_arguments)

    odd, wrong = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (odd["a"], odd["b"], odd["c"], odd["d"], odd["i"]) == ("<Unprintable>", "1.5", {"1": [2, 3]}, "nan", 10**30)
    assert len(odd["j"]) == FIELD_ITEMS_MAX
    assert wrong["event"].startswith("wrong %d arguments %s")


@given(st.text(), st.dictionaries(st.text(min_size=1), st.text() | st.floats() | st.binary() | st.none()))
def test_every_line_is_json_on_one_line(event: str, more: dict[str, Any]) -> None:
    line = line_of(event.replace("%", ""), **{"x" + name: value for name, value in more.items()})

    assert {"ts", "level", "event", "logger"} <= line.keys()


@given(st.from_regex(r"[a-z]+[0-9]+[!#$%&*@/?=:]{0,4}[a-z]{4}", fullmatch=True))
def test_no_password_of_a_url_gets_through(password: str) -> None:
    assert password not in mask_secrets(f"cannot reach mysql+pymysql://app:{password}@db/shop now")


def test_by_default_it_is_standard_error(stream: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    configure()

    logger.error("here")

    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "here"
    assert sys.stderr is not None


@pytest.mark.parametrize("part", ["a", "a://", "a://b:", "?token", "&a=", "bearer "])
def test_a_long_text_costs_time_in_proportion(part: str) -> None:
    text = "x://" + part * (500_000 // len(part))  # minutes and more, were it quadratic

    assert len(mask_secrets(text)) <= len(text)


def test_where_nobody_chose_a_terminal_gets_text_and_a_file_json() -> None:
    reader, writer = pty.openpty()

    with os.fdopen(reader, "rb", buffering=0), os.fdopen(writer, "w") as terminal:
        assert fitting_format(terminal) is LogFormat.TEXT
    assert fitting_format(io.StringIO()) is LogFormat.JSON
