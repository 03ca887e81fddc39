"""Commands `outbox config show | check`: the settings of all services that are installed, and where each is from.

A service registers its declaration of settings as an entry point. Nothing is started, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outbox_core.common.errors import UsageError
from outbox_core.runtime.terminal_text import escaped

if TYPE_CHECKING:
    from outbox_core.runtime.declared_settings import SettingsDeclaration

SETTINGS_GROUP: Final = "outbox.settings"
EXIT_PROBLEMS: Final = 2

app: Final = typer.Typer(help="Show the settings of services, and what is wrong with them.", no_args_is_help=True)

Config = Annotated[
    Path | None, typer.Option("--config", envvar="OUTBOX_CONFIG", help="The services' TOML file, e.g. outbox.toml.")
]
Service = Annotated[str | None, typer.Option("--service", help="Only of compensator, broker, delay or reconcile.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def show(
    config: Config = None,
    service: Service = None,
    given: Annotated[bool, typer.Option("--given", help="Leave out what has its default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print each setting with its value, and where that is from.

    A service's own flags win over the environment, that over the file, and that over the default. Passwords, tokens and
    secrets of URLs are not shown.

    Examples:

      outbox config show --config outbox.toml --service compensator

      outbox config show --config outbox.toml --given --json
    """
    from outbox_core.runtime.declared_settings import Origin, resolved_settings

    settings = {
        name: [
            setting
            for setting in resolved_settings(model, file=config)
            if not given or setting.origin is not Origin.DEFAULT
        ]
        for name, model in _models(service).items()
    }
    if as_json:
        typer.echo(json.dumps({name: [asdict(setting) for setting in resolved] for name, resolved in settings.items()}))
        return
    for name, resolved in settings.items():
        typer.echo(f"# {name}")
        for setting in resolved:
            value = "-" if setting.value is None else json.dumps(setting.value, ensure_ascii=False)
            source = "" if setting.source is None else f" {setting.source}"
            typer.echo(escaped(f"{setting.name} = {value}  ({setting.origin}{source})"))


@app.command()
def check(config: Config = None, service: Service = None, as_json: AsJson = False) -> None:
    """Say what is wrong with the settings. Starts nothing.

    Looks at services that the file or the environment has a setting of: keys that none has (with the nearest name),
    values that are wrong or missing, contradict each other, and files that are missing. Exit status 2 where something
    is wrong.

    Example: outbox config check --config /etc/outbox/outbox.toml
    """
    from outbox_core.runtime.declared_settings import is_configured, unknown_names

    models = _models(service)
    configured = {name: model for name, model in models.items() if service or is_configured(model, file=config)}
    problems = {name: model.problems(file=config) for name, model in configured.items()}
    unknown = unknown_names(list(_models(None).values()), file=config)
    # Both name an unknown key of a table that is one service's alone.
    said = {problem for of_service in problems.values() for problem in of_service}
    unknown = [problem for problem in unknown if problem not in said]
    is_wrong = bool(said or unknown)
    if as_json:
        typer.echo(json.dumps({"ok": not is_wrong, "services": problems, "unknown": unknown}))
    else:
        for name, of_service in problems.items():
            typer.echo(f"{name}: {'wrong' if of_service else 'ok'}")
            for problem in of_service:
                typer.echo(escaped(f"  {problem}"))
        for problem in unknown:
            typer.echo(escaped(problem))
        if not problems and not unknown:
            typer.echo("no service has a setting in the file or the environment")
    raise typer.Exit(EXIT_PROBLEMS if is_wrong else 0)


def _models(service: str | None) -> Mapping[str, SettingsDeclaration]:
    """Returns the declarations of the services whose packages are there. Raises UsageError for an unknown service."""
    entries = {entry.name: entry for entry in sorted(entry_points(group=SETTINGS_GROUP), key=lambda entry: entry.name)}
    if service is not None:
        if service not in entries:
            raise UsageError(f"there is no service {service!r}; services are {', '.join(entries)}")
        return {service: entries[service].load()}
    models: dict[str, SettingsDeclaration] = {}
    for name, entry in entries.items():
        try:
            models[name] = entry.load()
        except ModuleNotFoundError:  # of its extra, which is not installed
            typer.echo(f"{name}: left out, since its extra {next(iter(entry.extras))!r} is not installed", err=True)
    return models
