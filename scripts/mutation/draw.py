"""Draws mutants by a seed, a share for each package, and finds drawn mutants again in a later tree."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.mutation.sites import Site, find_sites, keyword_defaults

PER_PACKAGE_MIN = 3
SPARE_FACTOR = 2  # candidates for each mutant wanted, since some lines no test reaches


@dataclass(frozen=True, slots=True)
class Lot:
    """The candidates of one package in the order drawn, and how many mutants are wanted of them."""

    share: int
    candidates: list[Site]


@dataclass(frozen=True, slots=True)
class Match:
    """A drawn mutant's site in another tree, and by how much of its identity it was found."""

    site: Site
    by: str


def all_sites(tree: Path, packages: Sequence[str]) -> list[Site]:
    """The sites of all modules of these packages, in a fixed order."""
    paths = [path for package in packages for path in sorted((tree / package).rglob("*.py"))]
    sources = {path.relative_to(tree).as_posix(): path.read_bytes() for path in paths}
    defaults = keyword_defaults(sources.values())
    return [site for name, source in sources.items() for site in find_sites(name, source, defaults)]


def shares(lines: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of `count` mutants each package gets: proportional to its lines, and at least a few."""
    ideal = {package: count * own / sum(lines.values()) for package, own in lines.items()}
    given = {package: max(PER_PACKAGE_MIN, int(share)) for package, share in ideal.items()}
    while sum(given.values()) < count:
        given[max(given, key=lambda package: ideal[package] - given[package])] += 1
    while sum(given.values()) > count and max(given.values()) > 1:
        above = [package for package in given if given[package] > PER_PACKAGE_MIN] or list(given)
        given[max(above, key=lambda package: given[package] - ideal[package])] -= 1
    return given


def draw(sites: Sequence[Site], *, seed: int, count: int) -> list[Lot]:
    """Draw the candidates of each package: a random line, then a random operator of that line, then one of its sites.

    Lines are drawn rather than sites, so that a line full of operators weighs no more than another.
    """
    chance = random.Random(seed)
    by_line: dict[tuple[str, int], list[Site]] = defaultdict(list)
    for site in sites:
        by_line[site.path, site.line].append(site)
    drawn: dict[str, list[Site]] = {package: [] for package in sorted({site.package for site in sites})}
    for place in chance.sample(sorted(by_line), len(by_line)):
        by_operator: dict[str, list[Site]] = defaultdict(list)
        for site in by_line[place]:
            by_operator[site.operator].append(site)
        site = chance.choice(by_operator[chance.choice(sorted(by_operator))])
        drawn[site.package].append(site)
    wanted = shares({package: len(candidates) for package, candidates in drawn.items()}, count)
    return [
        Lot(share=share, candidates=drawn[package][: SPARE_FACTOR * share + PER_PACKAGE_MIN])
        for package, share in wanted.items()
    ]


def choose(lots: Sequence[Lot], is_covered: Callable[[Site], bool]) -> list[Site]:
    """The first covered candidates of each lot up to its share; where a lot has too few, the largest give more."""
    chosen: list[Site] = []
    spare: list[Site] = []
    for lot in sorted(lots, key=lambda lot: -lot.share):
        covered = [site for site in lot.candidates if is_covered(site)]
        chosen += covered[: lot.share]
        spare += covered[lot.share :]
    missing = sum(lot.share for lot in lots) - len(chosen)
    return sorted([*chosen, *spare[:missing]], key=lambda site: (site.path, site.start))


def find_again(drawn: Mapping[str, object], sites: Sequence[Site]) -> Match | None:
    """The site of a mutant that was drawn in another tree, wherever it moved to; None if it is not there or not clear.

    What must agree is loosened step by step; each step but the first takes only what is found once.
    """
    same = [site for site in sites if (site.operator, site.before, site.after) == _change(drawn)]
    for by, agreed in _STEPS:
        found = [site for site in same if agreed(site) == agreed(_Drawn(drawn))]
        if len(found) == 1:
            return Match(site=found[0], by=by)
        by_ordinal = [site for site in found if site.ordinal == drawn["ordinal"]]
        if len(by_ordinal) == 1:
            return Match(site=by_ordinal[0], by=by)
    return None


def _change(drawn: Mapping[str, object]) -> tuple[object, object, object]:
    return drawn["operator"], drawn["before"], drawn["after"]


class _Drawn:
    """A drawn mutant with the attributes of a site."""

    def __init__(self, drawn: Mapping[str, object]) -> None:
        self.path = str(drawn["path"])
        self.qualname = str(drawn["qualname"])
        self.statement = str(drawn["statement"])
        self.package = self.path.partition("/")[0]


def _function(site: Site | _Drawn) -> str:
    return site.qualname.rpartition(".")[2].lstrip("_")


_STEPS: tuple[tuple[str, Callable[[Site | _Drawn], tuple[str, ...]]], ...] = (
    ("file, name and statement", lambda site: (site.path, site.qualname, site.statement)),
    ("package, name and statement", lambda site: (site.package, site.qualname, site.statement)),
    ("package, function and statement", lambda site: (site.package, _function(site), site.statement)),
    ("function and statement", lambda site: (_function(site), site.statement)),
    ("statement", lambda site: (site.statement,)),
    ("function and change", lambda site: (_function(site),)),
)
