"""Finds the tests that reach each mutant's place: runs the suite once in a copy that reports where it goes."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.mutation.sites import Site, add_probes
from scripts.mutation.workspace import Workspace, end_group


class Coverage:
    """Which passing tests reach which site, with the seconds that each test took."""

    def __init__(self, sites: Sequence[Site], workspace: Workspace) -> None:
        records = workspace.records()
        self.seconds = {record.node_id: record.seconds for record in records if record.outcome == "passed"}
        self.failed = sorted({record.node_id for record in records if record.outcome == "failed"} - self.seconds.keys())
        self._counts = {record.node_id: int(record.seconds) for record in records if record.outcome == "collected"}
        reached = workspace.tests_by_probe()
        self._tests = {site: reached.get(number, set()) for number, site in enumerate(sites)}

    def parametrizations(self, node_id: str) -> int:
        """How many parametrizations the test's function has, of which this one alone was run."""
        return self._counts.get(node_id.partition("[")[0], 1)

    def tests(self, site: Site) -> list[str]:
        """The tests that reach it, fastest first."""
        known = [node_id for node_id in self._tests[site] if node_id in self.seconds]
        return sorted(known, key=lambda node_id: (self.seconds[node_id], node_id))


def run_covered(
    sites: Sequence[Site], workspace: Workspace, lanes: Sequence[Sequence[str]], *, logs: Path, is_sampled: bool
) -> Coverage:
    """Run the suite with a probe at each site; each lane is the arguments of one pytest, and all run side by side.

    An interrupt ends the suite early: what its tests reached until then is the result.
    """
    by_path: dict[str, list[tuple[int, Site]]] = defaultdict(list)
    for number, site in enumerate(sites):
        by_path[site.path].append((number, site))
    for path, probed in by_path.items():
        workspace.write(path, add_probes((workspace.folder / path).read_bytes(), probed))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, arguments in enumerate(lanes):
            output = logs.with_name(f"{logs.name}.lane{number}.log")
            output.unlink(missing_ok=True)
            processes.append(workspace.start_pytest(arguments, output=output, is_sampled=is_sampled))
            print(f"lane {number}: pytest {' '.join(arguments)}, output in {output}", flush=True)
        for number, process in enumerate(processes):
            print(f"lane {number}: exit status {process.wait()}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: the tests that have ended so far count", flush=True)
    finally:
        for process in processes:
            end_group(process)
    return Coverage(sites, workspace)


def as_json(
    described: Sequence[Mapping[str, object]], sites: Sequence[Site | None], coverage: Coverage
) -> dict[str, object]:
    """The mutants with the tests that reach them. Tests are listed once, and named by their place in that list."""
    reaching = [coverage.tests(site) if site else [] for site in sites]
    tests = sorted({node_id for node_ids in reaching for node_id in node_ids})
    place = {node_id: index for index, node_id in enumerate(tests)}
    return {
        "tests_failed": coverage.failed,
        "mutants": [
            {**mutant, "covered_by": [place[node_id] for node_id in node_ids]}
            for mutant, node_ids in zip(described, reaching, strict=True)
        ],
        "tests": [[node_id, coverage.seconds[node_id], coverage.parametrizations(node_id)] for node_id in tests],
    }
