"""The house rules that a machine can check. What ruff, mypy, import-linter and deptry check is not repeated here."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 50
MODULE_LINES_MAX = 1_000
POLL_SECONDS_MAX = 0.01
# Longer than they should be, and known to be; a bound here may be lowered, not raised.
GROWN = {
    "outbox/store/schema.py outbox_tables": 60,
}
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
DECISIONS = ROOT / "docs" / "decisions"
SCRIPTS = [*sorted((ROOT / "scripts").glob("*")), ROOT / ".ci" / "run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

# Where packages come from is the machine's configuration, and where a clone stands is its owner's.
REGISTRY = re.compile(
    r"\b(pypi|pythonhosted|npmjs|debian|ubuntu|maven|crates|golang)\.(org|com|io|net)\b", re.IGNORECASE
)
MACHINE_PATH = re.compile(r"(?<![\w.}\"')-])/(work|root|tmp|home/[a-z]+)/")
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
PRIVATE_BY_NAME_ALONE = {
    "_exit",  # os: ends a process at once, which is documented
    "_getframe",  # sys: the same
    "_replace",  # of named tuples, documented as well
    "_assign_work_unit",  # of pytest-xdist's scheduler, and there to be overridden
    "_gateway",  # of PySpark: whether its Java process still runs
}
LIBRARIES_FOR_ALL = {"msgspec"}
FORBIDDEN_CALLS = {"eval", "exec"}
LOOKED_AT = (ast.Attribute, ast.AsyncFunctionDef, ast.Call, ast.FunctionDef, ast.Import, ast.ImportFrom)


@lru_cache(maxsize=1)
def files() -> tuple[Path, ...]:
    """The files of the repository: what git tracks or would add; without git, all but hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        return tuple(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())
    return tuple(_walk(ROOT))


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name == ".ci" or not name.startswith((".", "__"))]
        yield from (Path(here) / name for name in names if not name.endswith(".pyc"))


def modules(*rooms: str) -> list[Path]:
    """The Python files of these folders."""
    return [path for path in files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in rooms]


@cache  # all of them: a bound below the number of files would parse each of them for every rule
def tree(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """What the rules look at of a file's syntax tree."""
    return tuple(node for node in ast.walk(tree(path)) if isinstance(node, LOOKED_AT))


@pytest.fixture(scope="module", autouse=True)
def trees_are_forgotten() -> Iterator[None]:
    """Their million objects would slow down each full garbage collection of the tests that follow in this process."""
    yield
    nodes.cache_clear()
    tree.cache_clear()


def where(path: Path, node: ast.AST) -> str:
    """A place that an editor can open."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def lines(found: list[str]) -> str:
    """What was found, one a line, in full."""
    return "\n".join(["", *found])


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file but Go's locks, whose names of modules begin with a host, and what is not text."""
    for path in files():
        if path.name in {"go.mod", "go.sum"}:
            continue
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


@pytest.mark.parametrize("pattern", [REGISTRY, MACHINE_PATH], ids=["registry", "machine_path"])
def test_no_file_names_a_package_registry_or_a_path_of_one_machine(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]

    assert not found, lines(found)


@pytest.mark.slow
def test_every_module_says_what_it_is() -> None:
    silent = [where(path, tree(path)) for path in modules(*PACKAGES, "tests", "migrations") if not _says(path)]

    assert not silent, lines(silent)


def test_modules_and_functions_stay_readable_in_one_go() -> None:
    found = [
        f"{name}: {length} lines"
        for path in modules(*PACKAGES)
        for name, length, bound in _lengths(path)
        if length > GROWN.get(name, bound)
    ]

    assert not found, lines(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_exactly_what_its_front_imports(package: str) -> None:
    front = tree(ROOT / package / "__init__.py")
    imported = _public_names(front)
    exported = _all(front)

    if imported or exported is not None:
        assert exported is not None, f"{package} imports {sorted(imported)} and has no __all__"
        assert imported <= set(exported)
        assert set(exported) <= _bound_names(front)


def test_nothing_sleeps_but_for_polls_of_a_few_milliseconds() -> None:
    # Wait on an event with a deadline. Only a wall clock, which has no event, may be polled.
    found = [
        where(path, node)
        for path in modules(*PACKAGES, "tests", "migrations")
        for node in nodes(path)
        if _is_sleep(node)
    ]

    assert not found, lines(found)


def test_nothing_that_arrives_can_be_executed() -> None:
    found = [
        where(path, node)
        for path in modules(*PACKAGES, "migrations", "examples")
        for node in nodes(path)
        if _imports(node) & FORBIDDEN_MODULES or _calls(node) in FORBIDDEN_CALLS
    ]

    assert not found, lines(found)


def test_every_third_party_library_has_a_home_or_is_for_all() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    at_home = {name for one in contracts for name in one.get("protected_modules", ())}
    imported = {
        name.partition(".")[0] for path in modules(*PACKAGES) for node in nodes(path) for name in _imports(node)
    }

    assert imported - sys.stdlib_module_names - set(PACKAGES) - at_home == LIBRARIES_FOR_ALL


def test_tests_use_no_private_names_but_those_that_have_no_public_one() -> None:
    found = [
        f"{where(path, node)} .{node.attr}"
        for path in modules("tests")
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
        and node.attr not in PRIVATE_BY_NAME_ALONE
    ]  # fmt: skip

    assert not found, lines(found)


def test_tests_patch_no_constants() -> None:
    found = [
        where(path, node)
        for path in modules("tests")
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"
        for one in node.args
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.rpartition(".")[2].isupper()
    ]  # fmt: skip

    assert not found, lines(found)


def test_tests_skip_only_where_the_fixtures_say_so() -> None:
    # A test that passes itself over in silence looks like a test that passes.
    allowed = ROOT / "tests" / "fixtures"
    found = [
        where(path, node)
        for path in modules("tests")
        if allowed not in path.parents
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in {"importorskip", "xfail"}
    ]

    assert not found, lines(found)


def test_what_a_decoder_raises_is_caught_as_a_whole() -> None:
    # Text that is not UTF-8, and nesting, raise others than its own: a flipped bit would end a service.
    home = ROOT / "outbox_core" / "common" / "errors.py"
    found = [
        where(path, node)
        for path in modules(*PACKAGES)
        if path != home
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in {"DecodeError", "MsgspecError"}
    ]

    assert not found, lines(found)


def test_no_text_of_the_product_names_a_file_of_the_documentation_which_is_not_installed() -> None:
    wrong = [
        where(path, node)
        for path in modules(*PACKAGES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\bdocs/|\w\.md\b", node.value)
    ]

    assert not wrong, lines(wrong)


def test_signal_handlers_take_no_lock_that_the_code_they_interrupt_may_hold() -> None:
    # An event or a condition has one; a SimpleQueue has none.
    wrong = []
    for path in modules(*PACKAGES):
        functions = {node.name: node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)}
        for call in ast.walk(tree(path)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "signal.signal":
                handler = call.args[1]
                name = handler.attr if isinstance(handler, ast.Attribute) else ast.unparse(handler)
                body = functions.get(name, handler)
                wrong += [where(path, node) for node in ast.walk(body) if _takes_a_lock(node)]

    assert not wrong, lines(wrong)


def _takes_a_lock(node: ast.AST) -> bool:
    names = {"set", "is_set", "clear", "acquire", "notify", "notify_all"}
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def test_events_are_logged_so_that_programs_without_a_logging_configuration_show_their_fields() -> None:
    wrong = [
        where(path, node)
        for path in modules(*PACKAGES)
        for node in tree(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "logging.getLogger(__name__)"
    ]

    assert not wrong, lines(wrong)


def test_every_decision_has_its_own_number() -> None:
    records = [path for path in files() if path.parent == DECISIONS and path.name != "README.md"]
    numbers = sorted(path.name[:4] for path in records)
    titles = {path.name: path.read_text().splitlines()[0] for path in records}

    assert numbers == sorted(set(numbers))
    assert [name for name, title in titles.items() if not title.startswith(f"# {int(name[:4])}. ")] == []


def test_the_index_of_decisions_lists_each_once() -> None:
    rows = re.findall(r"^\| \[(\d+)\]\(([^)]+)\) \| .+ \|$", (DECISIONS / "README.md").read_text(), re.MULTILINE)

    assert sorted(name for _, name in rows) == sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    assert [number for number, name in rows if int(name[:4]) != int(number)] == []


def test_every_decision_that_code_or_a_text_names_has_a_record() -> None:
    numbers = {path.name[:4] for path in DECISIONS.glob("[0-9]*.md")}
    named = [
        (path.name, number.zfill(4))
        for path in files()
        if path.suffix in {".py", ".lua", ".md", ".sh"}
        for number in re.findall(r"\b(?:[Dd]ecision |decisions/)(\d+)\b", path.read_text())
    ]

    assert [(name, number) for name, number in named if number not in numbers] == []
    assert len(named) > 30


def test_every_file_that_the_map_names_exists() -> None:
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", ARCHITECTURE))

    assert named - {path.name for path in files()} == set()
    assert len(named) > 80


@pytest.mark.parametrize("heading", ["## Publish to stored", "## Pull to acknowledged", "### A row from its source"])
def test_a_journey_names_each_file_once_in_its_order(heading: str) -> None:
    section = ARCHITECTURE.partition(heading)[2]
    steps = re.search(r"^1\. .*?(?=\n\n(?![0-9]+\. |In |Over |And |Back ))", section, re.MULTILINE | re.DOTALL)
    assert steps is not None
    named = re.findall(r"`([\w/]+\.py)`", steps[0])

    assert [name for name in named if named.count(name) > 1] == []
    assert len(named) > 10


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.is_file()], ids=lambda path: path.name)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env ")


def test_shell_scripts_are_sound() -> None:
    shell = [path for path in SCRIPTS if path.is_file() and path.read_text().startswith("#!/usr/bin/env bash")]
    sourced = sorted((ROOT / "scripts" / "setup").glob("*.sh"))
    complaints = [_complaint(["bash", "-n", str(path)]) for path in [*shell, *sourced]]
    if shutil.which("shellcheck"):
        complaints.append(_complaint(["shellcheck", "-x", *map(str, [*shell, *sourced])]))

    assert not any(complaints), lines(complaints)


def test_the_lock_holds_every_declared_package_by_its_hash() -> None:
    locked = _locked()
    declared = [Requirement(text) for text in _declared()]
    ours = canonicalize_name(PROJECT["project"]["name"])

    missing = [
        str(wanted)
        for wanted in declared
        if canonicalize_name(wanted.name) != ours
        and not any(wanted.specifier.contains(version) for version in locked.get(canonicalize_name(wanted.name), []))
    ]

    assert missing == [], "run ./scripts/lock"


def _says(path: Path) -> bool:
    return bool(ast.get_docstring(tree(path)))


def _lengths(path: Path) -> Iterator[tuple[str, int, int]]:
    name = str(path.relative_to(ROOT))
    yield name, len(path.read_text().splitlines()), MODULE_LINES_MAX
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1, FUNCTION_LINES_MAX


def _public_names(module: ast.Module) -> set[str]:
    names = {
        alias.asname or alias.name
        for statement in module.body
        # What is imported for type checkers alone is there by __getattr__.
        for node in (statement.body if isinstance(statement, ast.If) else [statement])
        if isinstance(node, ast.ImportFrom) and node.module not in {"__future__", "typing"}
        for alias in node.names
    }
    return {name for name in names if not name.startswith("_")}


def _bound_names(module: ast.Module) -> set[str]:
    defined = {
        node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    targets = [node.targets[0] for node in module.body if isinstance(node, ast.Assign)]
    return defined | _public_names(module) | {target.id for target in targets if isinstance(target, ast.Name)}


def _all(module: ast.Module) -> list[str] | None:
    for node in module.body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def _is_sleep(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(alias.name == "sleep" for alias in node.names)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep"):
        return False
    if ast.unparse(node.func) != "time.sleep":
        return False
    duration = node.args[0] if node.args else None
    return not (isinstance(duration, ast.Constant) and float(str(duration.value)) <= POLL_SECONDS_MAX)


def _imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def _calls(node: ast.AST) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _complaint(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _locked() -> dict[str, list[str]]:
    locked: dict[str, list[str]] = {}
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith(("#", " ")):
            requirement, _, hashes = line.partition("--hash=")
            assert hashes.startswith("sha256:"), f"{requirement} has no hash"
            name, _, version = requirement.partition(";")[0].partition("==")
            locked.setdefault(canonicalize_name(name.strip()), []).append(version.strip())
    return locked


def _declared() -> list[str]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    groups = PROJECT["dependency-groups"].values()
    everything = [*PROJECT["project"]["dependencies"], *(text for texts in [*extras, *groups] for text in texts)]
    return [text for text in everything if isinstance(text, str)]
