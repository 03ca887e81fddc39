"""The bare install is the SDK: it works where no package of an extra can be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from outbox_core.runtime.command import COMMANDS_GROUP, SUMMARIES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {
    "google-crc32c": "google_crc32c",
    "opentelemetry-api": "opentelemetry",
    "pyyaml": "yaml",
}

# Parts of extras that packages of the bare install bring as well.
BROUGHT_BY_OTHERS = {"markupsafe", "pydantic"}

# A finder in front of all others: what only an extra brings is not there.
WITHOUT_EXTRAS = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])

sys.meta_path.insert(0, Absent())
"""


def absent_packages() -> set[str]:
    """Import names of what an extra brings and the bare install does not."""
    bare = {Requirement(text).name.lower() for text in PROJECT["dependencies"]} | BROUGHT_BY_OTHERS
    extras = {Requirement(text).name.lower() for texts in PROJECT["optional-dependencies"].values() for text in texts}
    names = extras - bare - {"outbox-mq"}
    return {IMPORTED_AS.get(name, name).replace("-", "_") for name in names}


def run_bare(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which no extra's package can be imported."""
    source = WITHOUT_EXTRAS.format(absent=absent_packages()) + program
    return subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.processes
def test_the_sdk_publishes_and_keeps_the_row_without_any_extra(tmp_path: Path) -> None:
    program = """
from outbox import Outbox
from outbox.migrate.schema_upgrade import upgrade
url = "sqlite:///" + sys.argv[1]
upgrade(url)
box = Outbox(url, broker="http://127.0.0.1:9")
@box.transactional
def pay(session):
    box.publish("payment.completed", {"order_id": 1})
pay()
box.close()
from outbox_core.runtime.command import main
main(["messages", "list", "--json", "--url", url])
"""

    ended = run_bare(program, str(tmp_path / "shop.db"))

    assert ended.returncode == 0, ended.stderr
    assert '"topic": "payment.completed"' in ended.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        "broker serve --data x",
        "compensator run --url sqlite:///x.db --broker http://x",
        "reconcile run --config {toml}",
    ],
)
def test_a_room_whose_extra_is_missing_says_which(command: str, tmp_path: Path) -> None:
    toml = tmp_path / "reconcile.toml"
    toml.write_text('[database]\nurl = "sqlite:///x.db"\n[broker]\ndata = "x"\n')

    ended = run_bare(
        "from outbox_core.runtime.command import main\nmain(sys.argv[1:])", *command.format(toml=toml).split()
    )

    assert ended.returncode == 2
    assert "pip install 'outbox-mq[" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.processes
def test_every_command_prints_its_help_without_the_extra_that_it_needs_to_run() -> None:
    program = """
import contextlib, io, re
from outbox_core.runtime.command import SUMMARIES, main
def walk(path):
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            main([*path, "--help"])
    except SystemExit as ended:
        print(ended.code, *path)
    _, _, listed = shown.getvalue().partition("\\nCommands:\\n")
    for name in re.findall(r"^  ([a-z-]+)", listed, re.MULTILINE):
        walk([*path, name])
for name in SUMMARIES:
    walk([name])
"""

    ended = run_bare(program)

    shown = ended.stdout.splitlines()
    assert [line for line in shown if not line.startswith("0 ")] == [], ended.stderr
    assert {"0 compensator run", "0 reconcile repair apply", "0 broker serve", "0 delay sweep", "0 demo"} <= set(shown)


@pytest.mark.processes
def test_the_help_page_names_the_extra_of_a_command_that_is_missing() -> None:
    program = "from outbox_core.runtime.command import main; main(['--help'])"

    done = run_bare(program)

    assert done.returncode == 0, done.stderr
    assert re.search(r"^ *reconcile +Needs the extra 'spark'\.$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=lambda arguments: arguments[0])
@pytest.mark.processes
def test_the_help_page_imports_no_package_of_ours_but_the_core(arguments: list[str]) -> None:
    program = """
import sys
from outbox_core.runtime.command import main
try:
    main(sys.argv[1:])
finally:
    roots = {name.partition(".")[0] for name in sys.modules}
    print("imported:", *sorted(roots & {"outbox", "sqlalchemy", "compensator"}))
"""

    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("outbox rec", ["reconcile"]), ("outbox broker to", ["token", "topic"]), ("outbox broker topic s", ["show"])],
)
@pytest.mark.processes
def test_the_shell_completes_commands_of_every_package(typed: str, completed: list[str]) -> None:
    program = "from outbox_core.runtime.command import main; main([])"
    variables = {"_OUTBOX_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env={**os.environ, **variables}
    )

    assert sorted(done.stdout.split()) == completed, done.stderr


def test_the_help_page_says_of_each_command_what_its_own_help_says() -> None:
    said = {}
    for entry in entry_points(group=COMMANDS_GROUP):
        app = entry.load()
        alone = app.registered_callback
        texts = [app.info.help, alone and alone.help, alone and alone.callback.__doc__]
        text = next(text for text in texts if isinstance(text, str))
        said[entry.name] = text.strip().partition("\n")[0]

    assert said == SUMMARIES


@pytest.mark.processes
def test_a_broker_whose_client_is_missing_names_the_extra_whatever_its_scheme() -> None:
    program = """
from outbox_core import connect
from outbox_core.common.errors import ConfigurationError
for scheme in sys.argv[1:]:
    try:
        connect(f"{scheme}://127.0.0.1")
    except ConfigurationError as error:
        print("pip install 'outbox-mq[redis]'" in str(error))
"""
    schemes = ["redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"]

    ended = run_bare(program, *schemes)

    assert ended.stdout.split() == ["True"] * len(schemes), ended.stderr


@pytest.mark.parametrize("group", ["outbox.brokers", "outbox.timing_stores"])
def test_every_adapter_names_an_extra_that_there_is(group: str) -> None:
    extras = PROJECT["optional-dependencies"].keys()
    named = {name: re.findall(r"\[(\w+)\]$", target) for name, target in PROJECT["entry-points"][group].items()}

    assert {name: found for name, found in named.items() if len(found) != 1 or found[0] not in extras} == {}
