"""The command `outbox`: finds its subcommands by entry point, and reports our errors by one line and an exit status.

A package is imported when one of its commands is called, or asked for help: SQLAlchemy alone takes longer than all that
the help page and the shell's completion need.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from typing import Annotated, Final

import typer
from rich.console import Console

from outbox_core.common.errors import OutboxError, UsageError, install_hint
from outbox_core.runtime.entry_point import EXIT_INTERRUPTED
from outbox_core.runtime.terminal_text import escaped

COMMANDS_GROUP: Final = "outbox.commands"
SUMMARIES: Final = {
    "db": "Make and upgrade the outbox tables.",
    "messages": "Show unsent messages, and decide about parked ones.",
    "status": "Show the state of an outbox.",
    "doctor": "Check database, rights, compensator and broker.",
    "config": "Show the settings of services, and what is wrong with them.",
    "compensator": "Find what was committed and not sent, and send it.",
    "broker": "Run the broker, and administer one.",
    "delay": "Run a delay service, or the timers of a timing store.",
    "reconcile": "Prove that nothing was lost, invented or early.",
    "operator": "Keep brokers as Kubernetes resources.",
    "demo": "Kill the worker and the broker, and prove nothing was lost.",
}
"""What the help page says of each command; a test compares it with the commands' own help."""
_EXTRA_MODULES: Final = {
    "compensator": "apscheduler",
    "broker": "google_crc32c",
    "reconcile": "pyspark",
    "operator": "kopf",
}
"""A module that comes with the extra of a command."""
_COMPLETED_WORDS: Final = ("_TYPER_COMPLETE_ARGS", "COMP_WORDS")
"""Variables in which shells say what is to be completed."""
EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0 ok, 1 a failure, 2 a usage error, also one that a server tells, 130 an interrupt. No
    stack trace for expected errors.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _application(arguments)(args=arguments, prog_name="outbox")
    except ModuleNotFoundError as error:  # a package imports its heavy dependencies only when one of its commands runs
        called = [entry for entry in entry_points(group=COMMANDS_GROUP) if entry.extras and entry.name in arguments[:1]]
        if not called:
            raise
        sys.exit(_print_error(_missing(called[0], error)))
    except OutboxError as error:
        sys.exit(_print_error(error))
    except KeyboardInterrupt:  # during an import; once a command runs, typer handles it
        _say_interrupted()
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as ended:
        if ended.code == EXIT_INTERRUPTED:
            _say_interrupted()
        raise


def _print_error(error: OutboxError) -> int:
    """Print the error, which may have words of a server's; returns the exit status."""
    text = escaped(f"error: {error}", but="\n")
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR


def _say_interrupted() -> None:
    Console(stderr=True).print("interrupted: what was done before stands", highlight=False)


def _missing(room: EntryPoint, error: ModuleNotFoundError) -> UsageError:
    extra = _extra(room)
    return UsageError(
        f"`outbox {room.name}` needs the package {error.name!r}, which comes with the extra {extra!r}: "
        f"{install_hint(extra)}"
    )


def _extra(room: EntryPoint) -> str:
    return next(iter(room.extras), "all")


def _application(arguments: list[str]) -> typer.Typer:
    """Returns the command with its subcommands, of which only the called one is imported."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_outbox)
    entries = {entry.name: entry for entry in entry_points(group=COMMANDS_GROUP)}
    called = next((word for word in (*arguments[:1], *_words_to_complete()[1:2]) if word in entries), None)
    if called is not None:
        try:
            _add(app, entries[called].load(), name=called)
        except ModuleNotFoundError as error:
            raise _missing(entries[called], error) from error
        return app
    for name in (*SUMMARIES, *sorted(entries.keys() - SUMMARIES.keys())):
        if name in SUMMARIES and name in entries:
            is_there = _is_there(_EXTRA_MODULES.get(name))
            summary = SUMMARIES[name] if is_there else f"Needs the extra {_extra(entries[name])!r}."
            app.add_typer(typer.Typer(help=summary), name=name)
        elif name in entries:
            _add(app, entries[name].load(), name=name)
    return app


def _words_to_complete() -> list[str]:
    return next((text.split() for name in _COMPLETED_WORDS if (text := os.environ.get(name))), [])


def _is_there(module: str | None) -> bool:
    try:
        return module is None or find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _add(app: typer.Typer, part: typer.Typer, *, name: str) -> None:
    """Add the commands of one package; a Typer that is all callback is a command, and no group that has none."""
    alone = part.registered_callback
    if alone is not None and alone.callback is not None and not (part.registered_commands or part.registered_groups):
        text = alone.help if isinstance(alone.help, str) else None  # None: the callback's docstring
        app.command(name, help=text)(alone.callback)
    else:
        app.add_typer(part, name=name)


def _outbox(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Transactional outbox, compensation, broker and reconciliation.

    Examples:

      outbox demo

      outbox db upgrade --url mysql+pymysql://app@db/shop

      outbox broker serve --data ./broker-data --port 7788

      outbox compensator run --url mysql+pymysql://app@db/shop --broker http://127.0.0.1:7788
    """


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        typer.echo(version("outbox-mq"))
        raise typer.Exit
