"""The units and manifests of deploy/ as values: what they run, what they mount, what they alert on. Not fixtures."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.core import TyperGroup

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
KUBERNETES = ROOT / "deploy" / "kubernetes"
UNITS = sorted(SYSTEMD.glob("*.service"))
MANIFESTS = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")


@dataclass(frozen=True, slots=True)
class Container:
    """One container of the manifests, with what surrounds it."""

    workload: dict[str, Any]
    pod: dict[str, Any]
    container: dict[str, Any]

    @property
    def name(self) -> str:
        """The container's name."""
        return str(self.container["name"])

    @property
    def command(self) -> list[str]:
        """What it runs."""
        return [*self.container["command"], *self.container["args"]]


def documents(*paths: Path) -> list[dict[str, Any]]:
    """The objects of these files, of all manifests by default."""
    return [one for path in paths or MANIFESTS for one in yaml.safe_load_all(path.read_text()) if one]


def of_kind(kind: str) -> list[dict[str, Any]]:
    """The objects of one kind."""
    return [one for one in documents() if one["kind"] == kind]


def containers() -> list[Container]:
    """Every container that the manifests run."""
    return list(_containers())


def _containers() -> Iterator[Container]:
    for one in documents():
        spec = one.get("spec", {})
        template = spec.get("template") or spec.get("jobTemplate", {}).get("spec", {}).get("template")
        if template:
            for container in template["spec"]["containers"]:
                yield Container(one, template, container)


def unit(path: Path) -> list[tuple[str, str, str]]:
    """A unit file's (section, key, value), continued lines joined."""
    section, found = "", []
    text = path.read_text().replace("\\\n", " ")
    for line in (line.strip() for line in text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found.append((section, key, value))
    return found


def value(path: Path, key: str) -> str:
    """The one value of a key."""
    [found] = [value for _, name, value in unit(path) if name == key]
    return found


def exec_start(path: Path) -> list[str]:
    """What a unit runs."""
    return shlex.split(value(path, "ExecStart"))


def options(command: list[str]) -> dict[str, Any]:
    """What the real command makes of a command line: its parameters by name. Raises UsageError of click."""
    program, room, *arguments = command
    assert Path(program).name == "outbox"
    [entry] = entry_points(group="outbox.commands", name=room)
    group = typer.main.get_command(entry.load())
    assert isinstance(group, TyperGroup)
    sub_command = group.commands[arguments[0]]
    with sub_command.make_context(arguments[0], arguments[1:]) as context:
        return dict(context.params)
