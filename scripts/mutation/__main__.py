"""The commands of scripts/mutants: `cover` draws mutants and finds their tests, `run` tries them, `show` prints."""

# Of our own, since mutants must be found again in a tree whose files moved, and tests reach much of the code in
# processes that they start. mutmut 3 sees no child processes, and draws by names; cosmic-ray knows no coverage, and
# names a mutant by file, line and column; mutatest draws by a seed, for Python 3.8 and one process.

from __future__ import annotations

import argparse
import json
import queue
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.mutation import cover, draw, report, run
from scripts.mutation.sites import Site
from scripts.mutation.workspace import StoppedError, Workspace, describe_tree, write_json

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "outbox_core", "outbox", "compensator", "broker_adapter", "outbox_broker", "spark_reconcile", "outbox_demo",
    "migrations",
)  # fmt: skip
EXIT_INTERRUPTED = 130
_EXAMPLES = """examples:
  scripts/mutants cover drawn.json --seed 7 --count 20 --packages outbox -- -q tests/outbox
  scripts/mutants run results.json --drawn drawn.json --seconds 60   # interrupted: the same command goes on
  scripts/mutants run results.json --drawn drawn.json --only 3 8     # of these numbers alone
  scripts/mutants show results.json --drawn drawn.json --json | jq '.survivors[].path'
"""
Json = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Run one command. What follows the first `--` is for pytest."""
    options, pytest_arguments = _parse(list(arguments))
    status: int = options.command(options, pytest_arguments)
    return status


def cover_command(options: argparse.Namespace, pytest_arguments: list[str]) -> int:
    """Draw mutants, or take drawn ones, run the suite with probes, and write the mutants with their tests."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        workspace = Workspace.create(Path(folder) / "tree", tree=options.tree, revision=options.revision)
        sites = draw.all_sites(workspace.folder, options.packages)
        find = _cover_drawn if options.drawn else _cover_new
        found = find(options, sites, workspace, _lanes(pytest_arguments))
    found["tree"] = describe_tree(options.tree, options.revision)
    write_json(options.out, found)
    covered = sum(bool(mutant["covered_by"]) for mutant in found["mutants"])
    print(f"{covered} of {len(found['mutants'])} mutants are covered; written to {options.out}")
    return 0


def _cover_new(options: argparse.Namespace, sites: list[Site], workspace: Workspace, lanes: list[list[str]]) -> Json:
    seed = secrets.randbits(32) if options.seed is None else options.seed
    lots = draw.draw(sites, seed=seed, count=options.count)
    candidates = [site for lot in lots for site in lot.candidates]
    print(f"seed {seed}: {len(candidates)} candidates of {len(sites)} sites", flush=True)
    coverage = cover.run_covered(candidates, workspace, lanes, logs=options.out, is_sampled=options.sample)
    chosen = draw.choose(lots, lambda site: bool(coverage.tests(site)))
    described = [{"number": number, **site.as_json()} for number, site in enumerate(chosen, 1)]
    about = {"seed": seed, "not_covered": [site.as_json() for site in candidates if not coverage.tests(site)]}
    return {**about, **cover.as_json(described, chosen, coverage)}


def _cover_drawn(options: argparse.Namespace, sites: list[Site], workspace: Workspace, lanes: list[list[str]]) -> Json:
    earlier = _read(options.drawn)
    matches = [draw.find_again(mutant, sites) for mutant in earlier["mutants"]]
    found = [match.site if match else None for match in matches]
    print(f"{sum(map(bool, found))} of {len(found)} mutants found again", flush=True)
    probed = [site for site in found if site]
    coverage = cover.run_covered(probed, workspace, lanes, logs=options.out, is_sampled=options.sample)
    described = [
        {**mutant, **(match.site.as_json() if match else {}), "found_by": match.by if match else None}
        for mutant, match in zip(earlier["mutants"], matches, strict=True)
    ]
    return {"seed": earlier["seed"], **cover.as_json(described, found, coverage)}


def run_command(options: argparse.Namespace, pytest_arguments: list[str]) -> int:
    """Try the mutants that have no result yet; each result is written at once, so that a run can be resumed.

    An interrupt (Ctrl-C, SIGTERM) ends the tests that run and keeps what was found until then.
    """
    drawn = _read(options.drawn)
    results = Results(options.out, drawn)
    waiting: queue.SimpleQueue[Json] = queue.SimpleQueue()
    for mutant in drawn["mutants"]:
        if results.is_open(mutant["number"], retry_capped=options.retry_capped) and _wanted(options, mutant):
            waiting.put(mutant)
    print(f"{waiting.qsize()} of {len(drawn['mutants'])} mutants to try", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        workspaces = [
            Workspace.create(Path(folder) / f"tree{job}", tree=options.tree, revision=options.revision)
            for job in range(options.jobs)
        ]
        sites = draw.all_sites(workspaces[0].folder, options.packages)
        runners = [
            run.MutantRunner(workspace, pytest_arguments=pytest_arguments, log=_log(options.out, job))
            for job, workspace in enumerate(workspaces)
        ]
        threads = [
            threading.Thread(target=_work, args=(waiting, results, runner, sites, options)) for runner in runners
        ]
        status = _run_threads(threads, runners)
    print(report.table(drawn["mutants"], results.all()))
    return status


def _run_threads(threads: Sequence[threading.Thread], runners: Sequence[run.MutantRunner]) -> int:
    """Run them to their end. An interrupt ends their tests before the workspaces go."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", flush=True)
        for runner in runners:
            runner.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        return EXIT_INTERRUPTED
    return 0


class Results:
    """The results so far, kept in a file."""

    def __init__(self, path: Path, drawn: Json) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._mutants = {mutant["number"]: mutant for mutant in drawn["mutants"]}
        self._about: Json = {name: drawn[name] for name in ("seed", "tree") if name in drawn}
        earlier = _read(path)["results"] if path.exists() else []
        self._results: dict[int, Json] = {result["number"]: result for result in earlier}

    def is_open(self, number: int, *, retry_capped: bool) -> bool:
        """Whether a mutant has still to be tried."""
        result = self._results.get(number)
        return result is None or (retry_capped and result["capped"])

    def all(self) -> list[Json]:
        """In the order of the mutants' numbers."""
        return [self._results[number] for number in sorted(self._results)]

    def add(self, result: run.Result) -> None:
        """Keep, write and print a result."""
        with self._lock:
            self._results[result.number] = found = result.as_json()
            write_json(self._path, {**self._about, "results": self.all()})
            done = f"{len(self._results)}/{len(self._mutants)}"
            print(f"[{done}] {report.progress_line(self._mutants[result.number], found)}", flush=True)


def _work(
    waiting: queue.SimpleQueue[Json], results: Results, runner: run.MutantRunner, sites: list[Site],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    tests = _read(options.drawn)["tests"]
    while True:
        try:
            mutant = waiting.get_nowait()
        except queue.Empty:
            return
        match = draw.find_again(mutant, sites)
        if match is None:
            results.add(run.Result(number=mutant["number"], outcome=run.Outcome.NOT_FOUND))
            continue
        covering = run.tests_of(mutant, tests)
        try:
            result = runner.run(mutant["number"], match.site, covering, seconds_max=options.seconds)
        except StoppedError:
            return
        results.add(result)


def show_command(options: argparse.Namespace, _: list[str]) -> int:
    """Print the table and the survivors of earlier results."""
    mutants, results = _read(options.drawn)["mutants"], _read(options.out)["results"]
    print(json.dumps(report.as_json(mutants, results), indent=1) if options.json else report.table(mutants, results))
    return 0


def _interrupt(number: int, _: object) -> None:
    """Take a SIGTERM for Ctrl-C, once: `timeout` sends it to the process and to its group, and the ending must end."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _log(out: Path, job: int) -> Path:
    return out.with_name(f"{out.name}.job{job}.log")


def _wanted(options: argparse.Namespace, mutant: Mapping[str, Any]) -> bool:
    return not options.only or mutant["number"] in options.only


def _lanes(arguments: list[str]) -> list[list[str]]:
    """The arguments of each pytest: lanes are separated by `--`."""
    lanes: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            lanes.append([])
        else:
            lanes[-1].append(argument)
    return lanes


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return _parser().parse_args(arguments[:cut]), arguments[cut + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    of_cover = _command(commands, "cover", cover_command)
    of_cover.add_argument("--seed", type=int, help="repeats a draw; a new one is printed")
    of_cover.add_argument("--count", type=int, default=60, help="how many mutants")
    of_cover.add_argument("--drawn", type=Path, help="find these mutants again instead of drawing")
    of_cover.add_argument("--sample", action="store_true", help="run one parametrization of each test function")
    of_run = _command(commands, "run", run_command)
    of_run.add_argument("--drawn", type=Path, required=True, help="what `cover` wrote")
    of_run.add_argument("--jobs", type=int, default=1, help="mutants tried side by side")
    of_run.add_argument("--seconds", type=float, default=240, help="bound on a mutant's tests; 0: none")
    of_run.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    of_run.add_argument("--retry-capped", action="store_true", help="try again what survived a bounded choice of tests")
    of_show = _command(commands, "show", show_command)
    of_show.add_argument("--drawn", type=Path, required=True, help="what `cover` wrote")
    of_show.add_argument("--json", action="store_true", help="counts and survivors for a program")
    return parser


def _command(commands: Any, name: str, function: object) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=str(function.__doc__).partition("\n")[0])
    parser.set_defaults(command=function)
    parser.add_argument("out", type=Path, help="the file to write (show: to read)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a clone whose .venv is set up")
    parser.add_argument("--revision", help="a commit of it, instead of its files as they are")
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    return parser


def _read(path: Path) -> Json:
    content: Json = json.loads(path.read_text())
    return content


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main(sys.argv[1:]))
