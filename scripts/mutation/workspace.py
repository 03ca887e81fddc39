"""A copy of a tree with an environment of its own, in which mutants and probes are tried. The tree is never touched.

The environment is a thin one: its Python finds the copy first, then the packages of the tree's `.venv`, but not what
that has installed in place. So every process that a test starts by `sys.executable` or by a console script runs the
copy, also where the test gives it an environment of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).parent
_KILL_SECONDS = 10
_PATH_FILE = "mutation.pth"


@dataclass(frozen=True, slots=True)
class TestRecord:
    """How one test ended, as `probe_plugin` recorded it. `seconds` includes its fixtures."""

    __test__ = False

    node_id: str
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PytestRun:
    """One finished pytest. `exit_code` is None if it was ended at its time limit."""

    exit_code: int | None
    seconds: float
    records: list[TestRecord] = field(default_factory=list)

    @property
    def unfinished(self) -> list[str]:
        """Tests that began and never ended."""
        started = [record.node_id for record in self.records if record.outcome == "start"]
        ended = {record.node_id for record in self.records if record.outcome != "start"}
        return [node_id for node_id in started if node_id not in ended]


class StoppedError(Exception):
    """A pytest was ended, or not started, because the workspace was stopped."""


class Workspace:
    """The copy and its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._site_packages = (
            folder / ".venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        )

    @classmethod
    def create(cls, folder: Path, *, tree: Path, revision: str | None) -> Workspace:
        """Copy a tree's files, or those of a revision of it, and make the environment."""
        folder.mkdir(parents=True)
        workspace = cls(folder)
        _copy_files(tree, folder, revision=revision)
        workspace._make_environment((tree / ".venv").resolve())
        return workspace

    @property
    def hits(self) -> Path:
        """Where the probes and the plugin write."""
        return self._site_packages / "mutation_hits"

    def start_pytest(
        self, arguments: Sequence[str], *, output: Path, is_sampled: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start the tests of the copy, or one parametrization of each, in a process group of their own."""
        command = [str(self.folder / ".venv" / "bin" / "python"), "-m", "pytest", "-p", "mutation_plugin", *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "MUTATION_SAMPLE": "yes" if is_sampled else "",
            "VIRTUAL_ENV": str(self.folder / ".venv"),
            "PATH": f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}",
        }
        with output.open("ab") as file:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def run_pytest(self, arguments: Sequence[str], *, seconds_max: float, output: Path) -> PytestRun:
        """Run tests to their end, or end them at the time limit. Raises StoppedError after `stop`."""
        shutil.rmtree(self.hits, ignore_errors=True)
        self.hits.mkdir()
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)  # examples that another mutant failed on
        began = time.monotonic()
        process = self._running = self.start_pytest(arguments, output=output)
        try:
            exit_code = None if self._is_stopped else process.wait(timeout=seconds_max)
        except subprocess.TimeoutExpired:
            exit_code = None
        end_group(process)
        if self._is_stopped:
            raise StoppedError
        return PytestRun(exit_code=exit_code, seconds=time.monotonic() - began, records=self.records())

    def stop(self) -> None:
        """End the pytest that another thread runs, and let it start no other."""
        self._is_stopped = True  # before the look at what runs: a pytest that starts meanwhile sees it
        if self._running:
            end_group(self._running)

    def records(self) -> list[TestRecord]:
        """What the plugin recorded, in each process's order."""
        found = []
        for path in sorted(self.hits.glob("tests-*")):
            for line in path.read_text().splitlines():
                outcome, _, seconds, node_id = line.split("\t", 3)
                found.append(TestRecord(node_id=node_id, outcome=outcome, seconds=float(seconds)))
        return found

    def tests_by_probe(self) -> dict[int, set[str]]:
        """For each probe that was reached, the tests that reached it; "" for imports and collection."""
        names: dict[tuple[str, str], str] = {}
        for path in self.hits.glob("tests-*"):
            for line in path.read_text().splitlines():
                _, index, _, node_id = line.split("\t", 3)
                names[path.name.partition("-")[2], index] = node_id
        found: dict[int, set[str]] = {}
        hits = self.hits / "hits"
        for line in hits.read_text().splitlines() if hits.exists() else []:
            run, index, number = line.split()
            found.setdefault(int(number), set()).add(names.get((run, index), ""))
        return found

    def write(self, path: str, source: bytes) -> None:
        """Replace a module, and drop its compiled form, whose time stamp may be of the same second."""
        target = self.folder / path
        target.write_bytes(source)
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            compiled.unlink()

    def remove(self) -> None:
        """Delete the copy."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_environment(self, shared: Path) -> None:
        own = self.folder / ".venv"
        if own.is_symlink():
            own.unlink()
        venv.EnvBuilder(symlinks=True).create(own)
        packages = shared / "lib" / self._site_packages.parent.name / "site-packages"
        lines = [str(self.folder), str(packages), *_paths_of_workspace(packages), "import mutation_probe"]
        (self._site_packages / _PATH_FILE).write_text("\n".join([*lines, ""]))
        _write_metadata(self.folder / "pyproject.toml", self._site_packages, installed=packages)
        shutil.copyfile(_HERE / "probe.py", self._site_packages / "mutation_probe.py")
        shutil.copyfile(_HERE / "probe_plugin.py", self._site_packages / "mutation_plugin.py")
        self.hits.mkdir()
        for command in (shared / "bin").iterdir():
            _copy_command(command, own / "bin", shared=shared)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a pytest and the processes it left in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_SECONDS)
        time.sleep(0.01)


def describe_tree(tree: Path, revision: str | None) -> dict[str, object]:
    """The commit that a tree is at, and whether it has changes beside it."""
    try:
        commit = _git(tree, "rev-parse", revision or "HEAD").strip()
        changes = _git(tree, "status", "--porcelain", "--untracked-files=no").strip()
    except subprocess.CalledProcessError:  # not a clone
        return {"commit": None, "changed": None}
    return {"commit": commit, "changed": bool(changes) and revision is None}


def write_json(path: Path, value: object) -> None:
    """Replace a file in one step, so that a reader or a restart never finds half of it."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    beside.replace(path)


def _copy_files(tree: Path, folder: Path, *, revision: str | None) -> None:
    if revision is not None:
        archive = subprocess.run(["git", "archive", revision], cwd=tree, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return
    try:
        names = _git(tree, "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    except subprocess.CalledProcessError:  # not a clone
        names = [str(path.relative_to(tree)) for path in tree.rglob("*.*") if ".venv" not in path.parts]
    for name in names:
        source, target = tree / name, folder / name
        if name and source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _write_metadata(project_file: Path, site_packages: Path, *, installed: Path) -> None:
    """Give the copy the entry points that it declares: `.venv` may be shared by several trees."""
    project = tomllib.loads(project_file.read_text()).get("project") if project_file.exists() else None
    if not project:
        return
    folder = site_packages / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    metadata = installed / folder.name / "METADATA"
    least = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(metadata.read_text() if metadata.exists() else least)
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = [line for group, names in groups.items() for line in _entry_points(group, names)]
    (folder / "entry_points.txt").write_text("\n".join([*lines, ""]))


def _entry_points(group: str, names: Mapping[str, str]) -> list[str]:
    return [f"[{group}]", *(f"{name} = {target}" for name, target in names.items()), ""]


def _paths_of_workspace(packages: Path) -> list[str]:
    """What a workspace has behind its own copy, for one that is made inside it (by the tests of this program)."""
    file = packages / _PATH_FILE
    return [line for line in file.read_text().splitlines()[1:] if Path(line).is_dir()] if file.exists() else []


def _copy_command(command: Path, folder: Path, *, shared: Path) -> None:
    target = folder / command.name
    if command.is_dir() or target.exists() or command.name.startswith(("python", "activate", "Activate")):
        return
    content = command.read_bytes()
    if not content.startswith(b"#!"):
        target.symlink_to(command)
        return
    target.write_bytes(content.replace(str(shared / "bin" / "python").encode(), str(folder / "python").encode(), 1))
    target.chmod(0o755)


def _git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True).stdout
