"""How a process of ours writes its log: an event and its fields a line, as JSON or as text. Not what is logged.

Keys are `ts`, `level`, `event`, `logger`, then `message_id`, `topic`, `trace_id`, `span_id` where there are any, then
the event's own fields. Secrets do not get through, wherever they stand: in a field by name, a URL, an error's text.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TextIO, assert_never

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.terminal_text import plain

FIELD_CHARS_MAX: Final = 8 * 1024
EXCEPTION_CHARS_MAX: Final = 32 * 1024
FIELD_DEPTH_MAX: Final = 4
FIELD_ITEMS_MAX: Final = 200
MASK: Final = "***"
LEVELS: Final = ("debug", "info", "warning", "error")

Context = Callable[[], Mapping[str, object]]
"""Fields of the moment, `trace_id` and `span_id` for instance, asked for with each line. Must not raise nor log."""

_LEADING: Final = ("message_id", "topic", "trace_id", "span_id")
_OWN: Final = frozenset({"ts", "level", "event", "logger", "exception"})
_RECORD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_SECRET_NAME: Final = re.compile(r"passw|secret|token|authorization|api_?key|credential|cookie", re.IGNORECASE)
# A password may hold an @ or a slash of its own: better too much is masked than too little. Repetitions are bounded, so
# that a long text costs time in proportion.
_URL_PASSWORD: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s:/@]{0,200}):[^\s]{0,500}@")
_QUERY_SECRET: Final = re.compile(
    r"([?&;][\w-]{0,50}(?:passw|secret|token|api_?key|credential)[\w-]{0,50}=)[^&;\s\"']+", re.IGNORECASE
)
_CREDENTIALS: Final = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)


class LogFormat(StrEnum):
    """JSON for machines, text for people."""

    JSON = "json"
    TEXT = "text"


def fitting_format(stream: TextIO) -> LogFormat:
    """What fits a stream where nobody chose: text on a terminal, where people read; JSON elsewhere."""
    return LogFormat.TEXT if stream.isatty() else LogFormat.JSON


def configure(
    *,
    format: LogFormat | str = LogFormat.JSON,  # noqa: A002 - the option's name
    level: str = "info",
    stream: TextIO | None = None,
    context: Context | None = None,
    quiet: Mapping[str, str] | None = None,
) -> None:
    """Let this process log to `stream` (standard error) and nowhere else; only entry points call it. Idempotent.

    `quiet` gives loggers a level of their own, e.g. {"apscheduler": "error"}. Raises ConfigurationError for words that
    are none of ours.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter(format, context=context))
    root_level = _level(level)
    levels = {name: _level(word) for name, word in (quiet or {}).items()}
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(root_level)
    for name, number in levels.items():
        logging.getLogger(name).setLevel(max(number, root_level))


def formatter(format: LogFormat | str, *, context: Context | None = None) -> logging.Formatter:  # noqa: A002
    """The formatter of that name."""
    try:
        chosen = LogFormat(format)
    except ValueError as error:
        raise ConfigurationError(f"there is no log format {format!r}; formats are {', '.join(LogFormat)}") from error
    match chosen:
        case LogFormat.JSON:
            return JsonLines(context)
        case LogFormat.TEXT:
            return TextLines(context)
        case _:
            assert_never(chosen)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = fields(record, context=self._context)
        stack = _stack(self, record)
        return json.dumps(line | {"exception": stack} if stack else line)


class TextLines(logging.Formatter):
    """One line a record, for people; a stack trace follows on lines of its own."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = fields(record, context=self._context)
        head = [line.pop(name) for name in ("ts", "level", "logger", "event")]
        text = " ".join([*(_one_line(part) for part in head), *(f"{name}={_one_line(line[name])}" for name in line)])
        stack = _stack(self, record)
        return f"{text}\n{stack}" if stack else text


def fields(record: logging.LogRecord, *, context: Context | None = None) -> dict[str, Any]:
    """A record's fields in their order, safe to be written: bounded, without secrets, without bytes."""
    line: dict[str, Any] = {
        "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": "error" if record.levelno >= logging.ERROR else record.levelname.lower(),
        "event": _text(_message(record)),
        "logger": record.name,
    }
    extra = dict(_extra(record))
    found = dict(context()) | extra if context else extra
    for name in [*(one for one in _LEADING if one in found), *(one for one in found if one not in _LEADING)]:
        # An event's field cannot pass itself off as the line's own.
        line[f"field_{name}" if name in _OWN else name] = _safe(name, found[name], depth=0)
    return line


def mask_secrets(text: str) -> str:
    """The text without passwords of URLs, secrets of query strings, and bearer or basic credentials."""
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\1:{MASK}@", text)
    if "=" in text:
        text = _QUERY_SECRET.sub(rf"\1{MASK}", text)
    return _CREDENTIALS.sub(rf"\1 {MASK}", text)


def _level(word: str) -> int:
    if word not in LEVELS:
        raise ConfigurationError(f"there is no log level {word!r}; levels are {', '.join(LEVELS)}")
    return logging.getLevelNamesMapping()[word.upper()]


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # arguments that don't fit: a line of another library's must not be lost for it
        return f"{record.msg} {record.args}"


def _extra(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in vars(record).items() if name not in _RECORD_FIELDS)


def _safe(name: str, value: object, *, depth: int) -> Any:
    """A value as JSON can hold it."""
    if _SECRET_NAME.search(name) and value not in (None, "", True, False):
        return MASK
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if value - value == 0 else str(value)  # JSON has no infinity and no NaN
        case str():
            return _text(value)
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"  # it may be a body
        case Mapping() | list() | tuple() | set() | frozenset() if depth >= FIELD_DEPTH_MAX:
            return f"<{type(value).__name__} of {len(value)}>"
        case Mapping():
            pairs = itertools.islice(value.items(), FIELD_ITEMS_MAX)
            return {str(key): _safe(str(key), one, depth=depth + 1) for key, one in pairs}
        case list() | tuple() | set() | frozenset():
            return [_safe(name, one, depth=depth + 1) for one in itertools.islice(value, FIELD_ITEMS_MAX)]
        case _:
            return _text(_shown(value))


def _shown(value: object) -> str:
    try:
        return str(value)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return f"<{type(value).__name__}>"


def _text(text: str, *, chars_max: int = FIELD_CHARS_MAX) -> str:
    # Masked before it is cut: what is cut through is not recognised any more.
    masked = mask_secrets(text)
    return masked if len(masked) <= chars_max else f"{masked[:chars_max]}... ({len(masked):,} characters)"


def _stack(form: logging.Formatter, record: logging.LogRecord) -> str | None:
    parts = [
        form.formatException(record.exc_info) if record.exc_info else record.exc_text,
        form.formatStack(record.stack_info) if record.stack_info else None,
    ]
    text = "\n".join(part for part in parts if part)
    return _text(text, chars_max=EXCEPTION_CHARS_MAX) if text else None


def _one_line(value: object) -> str:
    """A value on one line that cannot steer a terminal, quoted where it has a space in it."""
    text = value if isinstance(value, str) else json.dumps(value)
    shown = plain(text)
    return f'"{shown}"' if " " in shown or not shown else shown
