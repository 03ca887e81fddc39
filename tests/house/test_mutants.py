"""What scripts/mutants mutates, how it reports where control goes, and how it finds a mutant again in a later tree."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.mutation.__main__ import EXIT_INTERRUPTED, main
from scripts.mutation.draw import all_sites, choose, draw, find_again, shares
from scripts.mutation.run import FIRST_CHUNK_SECONDS, Test, chunks, select_tests
from scripts.mutation.sites import PROBE_NAME, Site, add_probes, find_sites, keyword_defaults, mutate

ROOT = Path(__file__).parents[2]
SOURCE = b'''"""A module."""
from __future__ import annotations

LIMIT = 3 + 4


class Queue:
    size_max: int = 5

    def push(self, rows: list[int] = [1], *, retries: int = 2) -> int | None:
        """Nothing of this text is mutated: 1 + 1."""
        if not rows or len(rows) > self.size_max:
            raise ValueError(f"too many: {len(rows) + 1}")
        elif rows[0] < 0 and (
            retries == 1  # a comment
        ):
            return None
        for row in rows:
            if row is None: continue
            self.log.info("pushed", count=row + 1)
            self.store(row, retries=retries)
            self.last = row
        return len([row for row in rows if row])
'''
PRICES = b'''"""Prices."""


def total(amount):
    return amount + 1


def name(amount):
    return amount * 2


def forgotten(amount):
    return amount + 5
'''
PROJECT = b"""
[project]
name = "the-shop"
version = "2"
scripts = { shop = "shop.prices:name" }
entry-points.shops = { first = "shop.prices:total" }
"""
PRICES_TESTS = b'''"""The tests of prices."""
import importlib.metadata
import subprocess
import sys

import pytest

from shop.prices import name


def test_entry_points():
    assert [point.name for point in importlib.metadata.entry_points(group="shops")] == ["first"]


def test_child(tmp_path):
    program = "from shop.prices import total; print(total(2))"
    done = subprocess.run([sys.executable, "-c", program], env={}, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "3\\n"


@pytest.mark.parametrize("amount", [1, 2])
def test_name(amount):
    name(amount)
'''
WAITING_TESTS = b'''"""A test that says that it began, and ends when it is let."""
import os
import time
from pathlib import Path

from shop.prices import forgotten

FOLDER = Path(os.environ["THE_FOLDER"])


def test_waiting():
    (FOLDER / "began").write_text(str(os.getpid()))
    deadline = time.monotonic() + 300
    while not (FOLDER / "go").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert forgotten(1) == 6
'''
FILE = "tests/test_prices.py"
FULL = "not rows or len(rows) > self.size_max"


def test_each_operator_is_found_where_it_applies() -> None:
    changes = {(site.line, site.operator, site.before, site.after) for site in find_sites("broker/queue.py", SOURCE)}

    assert changes == {
        (12, "and/or swapped", FULL, "not rows and len(rows) > self.size_max"),
        (12, "condition negated", FULL, f"not ({FULL})"),
        (12, "not removed", "not rows", "rows"),
        (12, "comparison swapped", "len(rows) > self.size_max", "len(rows) >= self.size_max"),
        (13, "raise deleted", "raise ValueError(f'too many: {len(rows) + 1}')", "pass"),
        (14, "and/or swapped", "rows[0] < 0 and retries == 1", "rows[0] < 0 or retries == 1"),
        (14, "condition negated", "rows[0] < 0 and retries == 1", "not (rows[0] < 0 and retries == 1)"),
        (14, "comparison swapped", "rows[0] < 0", "rows[0] <= 0"),
        (14, "number plus one", "0", "1"),
        (15, "comparison swapped", "retries == 1", "retries != 1"),
        (15, "number plus one", "1", "2"),
        (19, "comparison swapped", "row is None", "row is not None"),
        (19, "break swapped", "continue", "break"),
        (21, "call deleted", "self.store(row, retries=retries)", "pass"),
        (21, "keyword argument dropped", "self.store(row, retries=retries)", "self.store(row)"),
        (22, "assignment deleted", "self.last = row", "pass"),
        (23, "None returned", "len([row for row in rows if row])", "None"),
        (23, "condition negated", "row", "not row"),
    }  # fmt: skip


def test_every_mutant_of_the_code_compiles_and_differs() -> None:
    for site in find_sites("broker/queue.py", SOURCE):
        mutant = mutate(SOURCE, site)

        compile(mutant, site.path, "exec")
        assert mutant != SOURCE


def test_a_keyword_that_the_call_needs_is_not_dropped() -> None:
    defaults = keyword_defaults([b"def store(row, *, retries): ...", b"class Entry:\n    a: int\n    b: int = 1"])
    source = b"def f():\n    store(1, retries=2)\n    return Entry(a=x, b=y)\n"

    dropped = [site.after for site in find_sites("m/m.py", source, defaults) if site.operator.startswith("keyword")]

    assert dropped == ["Entry(a=x)"]


def test_probes_at_every_site_change_neither_results_nor_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = find_sites("broker/queue.py", SOURCE)
    probed = add_probes(SOURCE, enumerate(sites))
    reached: list[int] = []
    monkeypatch.setattr(builtins, PROBE_NAME, reached.append, raising=False)

    namespace: dict[str, Any] = {}
    exec(compile(probed, "queue.py", "exec"), namespace)
    queue = namespace["Queue"]()
    queue.log, queue.store = SimpleNamespace(info=_nothing), _nothing

    assert queue.push([0, 7, 9]) == 2
    lines = {sites[number].line for number in reached}
    assert lines == {12, 14, 19, 21, 22, 23}
    assert len(probed.splitlines()) == len(SOURCE.splitlines())


def test_a_module_runs_with_its_probes_where_nothing_records_them() -> None:
    source = b"def f():\n    return 1 + 2\n"
    namespace: dict[str, Any] = {}

    exec(add_probes(source, enumerate(find_sites("m/m.py", source))), namespace)

    assert namespace["f"]() == 3


def test_one_seed_draws_the_same_mutants_and_another_others(tmp_path: Path) -> None:
    _write(tmp_path, {"broker/queue.py": SOURCE, "outbox/queue.py": SOURCE})
    sites = all_sites(tmp_path, ["broker", "outbox"])

    first, again, other = (draw(sites, seed=seed, count=8) for seed in (1, 1, 2))

    assert first == again != other
    assert [lot.share for lot in first] == [4, 4]
    places = [(site.path, site.line) for lot in first for site in lot.candidates]
    assert len(places) == len(set(places))


def test_every_package_gets_its_share_and_the_least_gets_three() -> None:
    assert shares({"small": 10, "middle": 200, "large": 790}, 60) == {"small": 3, "middle": 11, "large": 46}
    assert sum(shares({"a": 1, "b": 1, "c": 998}, 60).values()) == 60


def test_mutants_that_no_test_reaches_are_replaced_by_the_next_drawn(tmp_path: Path) -> None:
    _write(tmp_path, {"broker/queue.py": SOURCE})
    lots = draw(all_sites(tmp_path, ["broker"]), seed=3, count=4)
    not_covered = lots[0].candidates[1]

    chosen = choose(lots, lambda site: site != not_covered)

    assert set(chosen) == {site for site in lots[0].candidates[:5] if site != not_covered}


@pytest.mark.parametrize(
    ("moved", "by"),
    [
        ({"broker/queue.py": b"# longer\n" + SOURCE}, "file, name and statement"),
        ({"broker/store/lane.py": SOURCE}, "package, name and statement"),
        ({"broker/queue.py": SOURCE.replace(b"class Queue", b"class Lane")}, "package, function and statement"),
        ({"outbox_broker/queue.py": SOURCE.replace(b"def push", b"def _push")}, "function and statement"),
        ({"outbox_broker/queue.py": SOURCE.replace(b"def push", b"def append")}, "statement"),
    ],
)
def test_a_mutant_is_found_again_after_its_code_moved(tmp_path: Path, moved: dict[str, bytes], by: str) -> None:
    _write(tmp_path, moved)
    sites = all_sites(tmp_path, ["broker", "outbox_broker"])

    for drawn in find_sites("broker/queue.py", SOURCE):
        match = find_again(drawn.as_json(), sites)

        assert match is not None
        assert (match.by, match.site.before, match.site.ordinal) == (by, drawn.before, drawn.ordinal)


def test_a_mutant_whose_statement_is_gone_or_not_clear_is_not_found(tmp_path: Path) -> None:
    _write(tmp_path, {"a/a.py": b"def f(x):\n    return x + 1\n", "b/b.py": b"def g(x):\n    return x + 1\n"})
    sites = all_sites(tmp_path, ["a", "b"])
    drawn = {**_site("def h(x):\n    return x + 1\n", "arithmetic swapped").as_json(), "path": "c/c.py"}

    assert find_again({**drawn, "statement": "return x + 2", "before": "x + 2", "after": "x - 2"}, sites) is None
    assert find_again(drawn, sites) is None


def test_the_fastest_tests_come_first_and_a_files_tests_stay_together() -> None:
    tests = [Test("a.py::slow", 9), Test("a.py::fast", 1), Test("b.py::middle", 5), Test("b.py::slowest", 100)]

    first, rest = chunks(tests)

    assert [test.node_id for test in first] == ["a.py::fast", "a.py::slow", "b.py::middle"]
    assert sum(test.seconds for test in first) <= FIRST_CHUNK_SECONDS
    assert [test.node_id for test in rest] == ["b.py::slowest"]


def test_a_bound_takes_the_fastest_and_a_seeded_sample_of_the_others() -> None:
    tests = [Test(f"a.py::test_{number}", seconds=number) for number in range(1, 21)]

    chosen = select_tests(tests, seconds_max=60, seed=1)

    assert select_tests(tests, seconds_max=60, seed=1) == chosen
    assert {test.node_id for test in tests[:7]} <= {test.node_id for test in chosen}
    assert sum(test.seconds for test in chosen) <= 60
    assert select_tests(tests, seconds_max=0, seed=1) == tests


def _nothing(*args: object, **fields: object) -> None:
    pass


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree with its tests, one of which reaches the code in a process that is given no environment."""
    _write(
        tmp_path / "tree", {"shop/prices.py": PRICES, "tests/test_prices.py": PRICES_TESTS, "pyproject.toml": PROJECT}
    )
    (tmp_path / "tree" / ".venv").symlink_to(sys.prefix)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path / "tree"


@pytest.mark.processes
def test_mutants_are_drawn_with_their_tests_and_run_again_in_a_later_tree(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, results = tmp_path / "drawn.json", tmp_path / "results.json"
    given = ["--tree", str(shop), "--packages", "shop"]

    main(["cover", str(drawn), "--seed", "5", "--count", "2", "--sample", *given, "--", "-q"])
    covered = json.loads(drawn.read_text())
    (shop / "shop" / "prices.py").rename(shop / "shop" / "sums.py")
    (shop / "tests" / "test_prices.py").write_bytes(PRICES_TESTS.replace(b"shop.prices", b"shop.sums"))
    main(["run", str(results), "--drawn", str(drawn), *given])
    main(["run", str(results), "--drawn", str(drawn), *given])  # nothing is left to try

    names = {
        mutant["qualname"]: [covered["tests"][place][0] for place in mutant["covered_by"]]
        for mutant in covered["mutants"]
    }
    assert covered["tests_failed"] == []
    assert names["total"] == [f"{FILE}::test_child"]
    assert names["name"] in ([f"{FILE}::test_name[1]"], [f"{FILE}::test_name[2]"])
    assert [parametrizations for _, _, parametrizations in covered["tests"]] == [1, 2]
    assert [site["qualname"] for site in covered["not_covered"]] == ["forgotten"]
    outcomes = {result["number"]: result for result in json.loads(results.read_text())["results"]}
    by_name = {mutant["qualname"]: outcomes[mutant["number"]] for mutant in covered["mutants"]}
    assert (by_name["total"]["outcome"], by_name["total"]["killed_by"]) == ("killed", f"{FILE}::test_child")
    assert (by_name["name"]["outcome"], by_name["name"]["tests_run"]) == ("survived", 3)  # the sample, then both
    assert capsys.readouterr().out.count("0 of 2 mutants to try") == 1
    assert (shop / "shop" / "sums.py").read_bytes() == PRICES


@pytest.mark.processes
def test_a_covering_test_that_the_tree_does_not_have_any_more_is_named_and_kills_nothing(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{FILE}::test_removed", f"{FILE}::test_name[2]", "tests/test_moved.py::test_name"]
    drawn = _drawn(tmp_path, {"name": names, "total": [f"{FILE}::test_child"], "forgotten": names[:1]})
    results = tmp_path / "results.json"

    main(["run", str(results), "--drawn", str(drawn), "--tree", str(shop), "--packages", "shop"])
    capsys.readouterr()
    main(["show", str(results), "--drawn", str(drawn), "--json"])

    shown = json.loads(capsys.readouterr().out)
    assert shown["packages"] == {"shop": {"survived": 1, "killed": 1, "not covered": 1}}
    survived, not_covered = shown["survivors"]
    assert (survived["qualname"], survived["tests_run"]) == ("name", 1)
    assert set(survived["gone"]) == {names[0], names[2]}
    assert (not_covered["qualname"], not_covered["gone"]) == ("forgotten", names[:1])


@pytest.mark.processes
def test_an_interrupted_run_ends_its_tests_keeps_its_results_and_goes_on(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(shop, {"tests/test_waiting.py": WAITING_TESTS})
    monkeypatch.setenv("THE_FOLDER", str(tmp_path))
    drawn = _drawn(tmp_path, {"total": [f"{FILE}::test_child"], "forgotten": ["tests/test_waiting.py::test_waiting"]})
    results = tmp_path / "results.json"
    arguments = ["run", str(results), "--drawn", str(drawn), "--tree", str(shop), "--packages", "shop"]
    command = [sys.executable, "-m", "scripts.mutation", *arguments]

    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    tests = int(_wait_for_text(tmp_path / "began", process))
    process.terminate()
    process.terminate()  # as `timeout` does
    output, _ = process.communicate(timeout=120)

    assert process.returncode == EXIT_INTERRUPTED
    assert "interrupted" in output
    with pytest.raises(ProcessLookupError):
        os.kill(tests, 0)
    assert [result["number"] for result in json.loads(results.read_text())["results"]] == [1]

    (tmp_path / "go").touch()
    assert main(arguments) == 0
    outcomes = [(result["number"], result["outcome"]) for result in json.loads(results.read_text())["results"]]
    assert outcomes == [(1, "killed"), (2, "killed")]


def _drawn(folder: Path, covered_by: dict[str, list[str]]) -> Path:
    """What `cover` would have written for one mutant of each of these functions, with these tests."""
    sites = {site.qualname: site for site in find_sites("shop/prices.py", PRICES) if site.operator.startswith("arith")}
    names = sorted({name for tests in covered_by.values() for name in tests})
    mutants = [
        {"number": number, **sites[function].as_json(), "covered_by": [names.index(name) for name in tests]}
        for number, (function, tests) in enumerate(covered_by.items(), 1)
    ]
    path = folder / "drawn.json"
    path.write_text(json.dumps({"seed": 1, "mutants": mutants, "tests": [[name, 0.1, 1] for name in names]}))
    return path


def _wait_for_text(path: Path, process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(source)


def _site(source: str, operator: str) -> Site:
    return next(site for site in find_sites("c/c.py", source.encode()) if site.operator == operator)
