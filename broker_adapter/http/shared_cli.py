"""What the commands of `outbox broker` share: the options by which a broker is reached, and how they ask and print."""

from __future__ import annotations

import inspect
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeVar, cast, get_type_hints

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker_adapter.http.admin_client import AdminClient
from outbox_core.common.errors import BrokerUnavailable, NotSupported, UsageError
from outbox_core.messages.broker_port import BrokerAdmin, TopicAdmin
from outbox_core.messages.connect import connect

_URL: Final = "http://127.0.0.1:7788"
_TIMEOUT_MS: Final = 30_000
_POLL_S: Final = 0.5
_REST: Final = 10
"""How many times as long as an answer took nothing is asked: a status visits every topic."""
_REST_MAX_S: Final = 10.0
_PIPED_WIDTH: Final = 1_000
"""Output to a file or another program uses one line per entry of a history."""

Answer = TypeVar("Answer")
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Topic = Annotated[str, typer.Argument(help="The topic.")]
Group = Annotated[str, typer.Argument(help="The consumer group.")]
Limit = Annotated[int, typer.Option(min=1, max=1_000, help="So many at most.")]
Url = Annotated[str, typer.Option("--url", "--broker", envvar="OUTBOX_BROKER__URL", help="The broker's URL.")]
Timeout = Annotated[int, typer.Option(min=1, help="Time to wait for an answer, milliseconds.")]
CaFile = Annotated[Path | None, typer.Option(help="Certificates to trust, PEM.")]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="OUTBOX_BROKER__TOKEN_FILE", help="File that holds the bearer token.")
]


def headers_of(given: Sequence[str]) -> dict[str, str]:
    """Returns headers that are given as NAME=VALUE. Raises UsageError."""
    headers: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"a header is given as NAME=VALUE, not {text!r}")
        headers[name] = value
    return headers


def read_file(path: Path) -> bytes:
    """Returns the bytes of a file that was named. Raises UsageError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


# -- the connection, which each command has options for ----------------------------------------------------------------


class _Admin(BrokerAdmin, TopicAdmin, Protocol):
    """What is administered of our broker, and of Redis timers."""


class Connection:
    """The options by which a broker is reached."""

    def __init__(self, *, url: str, timeout_ms: int, ca_file: Path | None, token_file: Path | None) -> None:
        self._url, self._timeout_ms, self._ca_file, self._token_file = url, timeout_ms, ca_file, token_file

    def client(self) -> AdminClient:
        """Returns the client of our broker. Raises NotSupported for another."""
        if self._url.startswith("redis"):
            raise NotSupported("Redis timers cannot tell this: topic, group and dead have the commands that they know")
        return AdminClient(self._url, timeout_ms=self._timeout_ms, ca_file=self._ca_file, token_file=self._token_file)

    @contextmanager
    def admin(self) -> Iterator[_Admin]:
        """Yields what our broker and Redis timers have in common."""
        if not self._url.startswith("redis"):
            yield self.client()
            return
        ca_file = None if self._ca_file is None else str(self._ca_file)
        with closing(connect(self._url, timeout_ms=self._timeout_ms, ca_file=ca_file)) as broker:
            yield cast("_Admin", broker.admin)  # raises NotSupported for streams, which are not ours


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, which takes a Connection first, the options of one behind its own."""

    @wraps(command)
    def with_options(
        *arguments: Any, url: str, timeout_ms: int, ca_file: Path | None, token_file: Path | None, **options: Any
    ) -> None:
        connection = Connection(url=url, timeout_ms=timeout_ms, ca_file=ca_file, token_file=token_file)
        command(connection, *arguments, **options)

    hints = get_type_hints(command, include_extras=True)
    _, *parameters = inspect.signature(command).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    connection_options = [
        inspect.Parameter("url", keyword, default=_URL, annotation=Url),
        inspect.Parameter("timeout_ms", keyword, default=_TIMEOUT_MS, annotation=Timeout),
        inspect.Parameter("ca_file", keyword, default=None, annotation=CaFile),
        inspect.Parameter("token_file", keyword, default=None, annotation=TokenFile),
    ]
    own = [parameter.replace(annotation=hints[parameter.name], kind=keyword) for parameter in parameters]
    with_options.__signature__ = inspect.Signature([*own, *connection_options])  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *connection_options)}
    del with_options.__wrapped__  # typer would read the signature of what it wraps
    return with_options


# -- what takes long -------------------------------------------------------------------------------------------------


def poll(
    ask: Callable[[], Answer], *, is_done: Callable[[Answer], bool], shows: Callable[[Answer], None],
    timeout_ms: int | None = None,
) -> Answer:  # fmt: skip
    """Ask until it is done or the time is up; returns the last answer, and shows each. A broker that restarts is asked
    again.
    """
    pause, begun_s = threading.Event(), time.monotonic()
    while True:
        asked_s, rest_s = time.monotonic(), _POLL_S
        left_s = math.inf if timeout_ms is None else timeout_ms / 1000 - (asked_s - begun_s)
        is_last = left_s <= 0
        try:
            answer = ask()
        except BrokerUnavailable:
            if is_last:
                raise
        else:
            shows(answer)
            if is_last or is_done(answer):
                return answer
            rest_s = min(max(_POLL_S, _REST * (time.monotonic() - asked_s)), _REST_MAX_S)
        pause.wait(min(rest_s, left_s))


# -- output ------------------------------------------------------------------------------------------------------------


def confirm(question: str) -> None:
    """Ask on the terminal. Raises UsageError where there is none, and for a no."""
    if not sys.stdin.isatty():
        raise UsageError("nothing was done: say --yes to do it without being asked")
    if not typer.confirm(question, err=True):
        raise UsageError("nothing was done")


def print_json(value: object) -> None:
    # In ASCII: a body may have what a terminal takes for its own.
    print(json.dumps(msgspec.to_builtins(value), indent=2).replace("\x7f", r"\u007f"))


def print_done(outcome: Mapping[str, object], text: str, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(outcome).decode())
    else:
        print(text)


def print_lines(lines: Iterable[str], *, none: str = "") -> None:
    """Print lines; `none` if there are none, not on stdout, which programs read line by line."""
    count = 0
    for line in lines:
        print(line)
        count += 1
    if not count and none:
        print(none, file=sys.stderr)


def print_table(names: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, overflow="fold", no_wrap=index == 0)  # what comes first is copied
    for row in rows:
        table.add_row(*row)
    console.print(table)
