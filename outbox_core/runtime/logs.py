"""Log output of our processes: an event and its fields on each line, as JSON or as text.

Keys are `ts`, `level`, `event`, `logger`, then `message_id`, `topic`, `trace_id`, `span_id` if present, then
the event's own fields. Secrets are masked everywhere: in fields with secret names, in URLs, in texts of errors.

structlog would replace the two formatters, some 40 lines: the SDK, SQLAlchemy, alembic and APScheduler log by the
standard library anyway, and masking, bounds and the order of fields would stay ours.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TextIO, assert_never

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.terminal_text import escaped

FIELD_CHARS_MAX: Final = 8 * 1024
EXCEPTION_CHARS_MAX: Final = 32 * 1024
FIELD_DEPTH_MAX: Final = 4
FIELD_ITEMS_MAX: Final = 200
MASK: Final = "***"
LEVELS: Final = ("debug", "info", "warning", "error")
_QUIET_LEVELS: Final = (*LEVELS, "critical")
QUIET_CLIENTS: Final[Mapping[str, str]] = {"pika": "critical"}
"""Clients of brokers that log at length what their adapters report in one line, with the cure; for `configure`."""

Context = Callable[[], Mapping[str, object]]
"""Returns fields of the current context, for instance `trace_id`, for each line. Must neither raise nor log."""

_LEADING: Final = ("message_id", "topic", "trace_id", "span_id")
_OWN: Final = frozenset({"ts", "level", "event", "logger", "exception"})
_RECORD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_SECRET_NAME: Final = re.compile(r"passw|secret|token|authorization|api_?key|credential|cookie", re.IGNORECASE)
# A password may contain @ or a slash, so rather too much is masked than too little. Repetitions are bounded, so that
# the time is proportional to the text's length.
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
    """Returns the default format for a stream: text on a terminal, JSON elsewhere."""
    return LogFormat.TEXT if stream.isatty() else LogFormat.JSON


def configure(
    *,
    format: LogFormat | str = LogFormat.JSON,  # noqa: A002 - the option's name
    level: str = "info",
    stream: TextIO | None = None,
    context: Context | None = None,
    quiet: Mapping[str, str] | None = None,
) -> None:
    """Make this process log to `stream` (standard error) and nowhere else; only entry points call it. Idempotent.

    `quiet` sets the levels of single loggers, e.g. {"apscheduler": "error"}. Raises ConfigurationError for an unknown
    level or format.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter(format, context=context))
    root_level = _level(level)
    levels = {name: _level(word, of=_QUIET_LEVELS) for name, word in (quiet or {}).items()}
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(root_level)
    for name, logger_level in levels.items():
        logging.getLogger(name).setLevel(max(logger_level, root_level))


def formatter(format: LogFormat | str, *, context: Context | None = None) -> logging.Formatter:  # noqa: A002
    """Returns the formatter of that name."""
    try:
        log_format = LogFormat(format)
    except ValueError as error:
        raise ConfigurationError(f"there is no log format {format!r}; formats are {', '.join(LogFormat)}") from error
    match log_format:
        case LogFormat.JSON:
            return JsonLines(context)
        case LogFormat.TEXT:
            return TextLines(context)
        case _:
            assert_never(log_format)


class EventFields:
    """An event's fields as text, ` name=value` for each: safe to write, and made only where a handler formats it."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        """The text; it begins with a space."""
        return "".join(f" {name}={_one_line(_safe(name, value, depth=0))}" for name, value in self._fields.items())


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
    """Returns a record's fields in order, safe to write: of limited size, without secrets and bytes."""
    line: dict[str, Any] = {
        "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": "error" if record.levelno >= logging.ERROR else record.levelname.lower(),
        "event": _text(event_name(record)),
        "logger": record.name,
    }
    extra = dict(_extra(record))
    all_fields = dict(context()) | extra if context else extra
    for name in [*(key for key in _LEADING if key in all_fields), *(key for key in all_fields if key not in _LEADING)]:
        # An event's field must not replace one of the line's own.
        line[f"field_{name}" if name in _OWN else name] = _safe(name, all_fields[name], depth=0)
    return line


def event_name(record: logging.LogRecord) -> str:
    """Returns the name of a record's event, without its fields; of a record of another library, its message."""
    match record.args:
        case (EventFields(),):
            return str(record.msg).removesuffix("%s")
        case _:
            return _message(record)


def mask_secrets(text: str) -> str:
    """Returns the text without passwords of URLs, secrets of query strings, and bearer or basic credentials."""
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\1:{MASK}@", text)
    if "=" in text:
        text = _QUERY_SECRET.sub(rf"\1{MASK}", text)
    return _CREDENTIALS.sub(rf"\1 {MASK}", text)


def _level(word: str, *, of: Sequence[str] = LEVELS) -> int:
    if word not in of:
        raise ConfigurationError(f"there is no log level {word!r}; levels are {', '.join(of)}")
    return logging.getLevelNamesMapping()[word.upper()]


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # wrong arguments of a format string: a line of another library must not be lost
        return f"{record.msg} {record.args}"


def _extra(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in vars(record).items() if name not in _RECORD_FIELDS)


def _safe(name: str, value: object, *, depth: int) -> Any:
    """Returns a value that JSON can represent."""
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
            return f"<{len(value)} bytes>"  # may be a message's body
        case Mapping() | list() | tuple() | set() | frozenset() if depth >= FIELD_DEPTH_MAX:
            return f"<{type(value).__name__} of {len(value)}>"
        case Mapping():
            pairs = itertools.islice(value.items(), FIELD_ITEMS_MAX)
            return {str(key): _safe(str(key), item, depth=depth + 1) for key, item in pairs}
        case list() | tuple() | set() | frozenset():
            return [_safe(name, item, depth=depth + 1) for item in itertools.islice(value, FIELD_ITEMS_MAX)]
        case _:
            return _text(_shown(value))


def _shown(value: object) -> str:
    try:
        return str(value)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return f"<{type(value).__name__}>"


def _text(text: str, *, chars_max: int = FIELD_CHARS_MAX) -> str:
    # Masked before it is cut: a secret that is cut in two is not recognised.
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
    """Returns a value on one line, without control characters, quoted if it contains a space."""
    text = value if isinstance(value, str) else json.dumps(value)
    shown = escaped(text)
    return f'"{shown}"' if " " in shown or not shown else shown
