"""Measures the match of a message with subscriptions: by the filter index, by every filter, and by rule engines.

    python -m benchmarks.broker.filter [--rounds 5] [--messages 20000] [--no-peers] [--quick]

10 to 1,000 subscriptions have a type of their own each, as in the article that the index follows ("How does Alibaba
RocketMQ endure zero failures in Double 11 for 7 years"). The other conditions depend on the shape:

    type      type = 'T'
    region    type = 'T' AND region = 'R', of 20 regions
    amount    type = 'T' AND amount > N
    mixed     a quarter each: the three above, and type = 'T' AND region IN ('R', 'S') AND amount BETWEEN N AND M
    loose     as mixed, but every tenth subscription does not name a type at all: region IN (...) AND amount BETWEEN ...

Messages come in batches of 500, in two kinds of traffic: `all` has every one of the 1,000 types, so that few messages
matter to anybody while there are few subscriptions; `wanted` has only types that somebody subscribed to, so that every
message reaches at least one subscription's filter. The growth is that of `wanted`, which is the harder one. Each size
has a figure for the cost of a match as well.

The time is processor time of one thread. Unindexed is every filter, compiled as well, one after the other. Peers are
told the same in their own language and get the amount as a number: rule-engine (pure Python) and
common-expression-language (CEL in Rust), where `pip install` has put the versions below; neither has an index.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import random
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import report, rounds
from outbox_broker.filter import FilterIndex, compile_condition, parse

SIZES = (10, 100, 1_000)
"""As many as a topic may have groups."""
TYPES = 1_000
REGIONS = 20
BATCH = 500
SHAPES = ("type", "region", "amount", "mixed", "loose")
TRAFFICS = ("all", "wanted")
PEERS = {"rule_engine": ("rule-engine", "5.1.0"), "cel": ("common-expression-language", "0.10.0")}
EVALUATIONS = 200_000
"""Evaluations of one filter in a round: limits the messages of contestants that evaluate every filter."""
MEMORY_SIZE = 1_000

Headers = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A subscription's filter, independent of any filter language."""

    type: str | None = None
    regions: tuple[str, ...] = ()
    above: int | None = None
    between: tuple[int, int] | None = None

    def ours(self) -> str:
        """For the index."""
        regions = ", ".join(f"'{one}'" for one in self.regions)
        return " AND ".join([
            *([f"type = '{self.type}'"] if self.type else []),
            *([f"region IN ({regions})" if len(self.regions) > 1 else f"region = {regions}"] if regions else []),
            *([f"amount > {self.above}"] if self.above is not None else []),
            *([f"amount BETWEEN {self.between[0]} AND {self.between[1]}"] if self.between else []),
        ])  # fmt: skip

    def theirs(self, conjunction: str) -> str:
        """For rule-engine and CEL, which differ in how they spell AND."""
        regions = ", ".join(f"'{one}'" for one in self.regions)
        return f" {conjunction} ".join([
            *([f"type == '{self.type}'"] if self.type else []),
            *([f"region in [{regions}]" if len(self.regions) > 1 else f"region == {regions}"] if regions else []),
            *([f"amount > {self.above}"] if self.above is not None else []),
            *([f"amount >= {self.between[0]} {conjunction} amount <= {self.between[1]}"] if self.between else []),
        ])  # fmt: skip


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="medians of so many (5)")
    parser.add_argument("--messages", type=int, default=20_000, help="a round, for the index")
    parser.add_argument("--seed", type=int, default=1, help="of subscriptions and messages")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; figures mean nothing")
    chosen = parser.parse_args()
    sizes = (10, 100) if chosen.quick else SIZES
    if chosen.quick:
        chosen.rounds, chosen.messages = 1, 1_000
    peers, missing = ({}, {}) if chosen.no_peers else _peers()
    results = {
        "shapes": {shape: _shape(shape, sizes, peers, chosen) for shape in SHAPES},
        "memory": _memory(sizes[-1] if chosen.quick else MEMORY_SIZE, chosen.seed),
        "peers": {**PEERS, "missing": missing},
    }
    _show(results["shapes"], chosen)
    report.emit("broker.filter", chosen=chosen, server={}, results=results)


def wishes(shape: str, count: int, chance: random.Random) -> list[Wish]:
    """So many subscriptions."""
    return [_wish(shape, number, chance) for number in range(count)]


def messages(count: int, *, types: int, chance: random.Random) -> list[dict[str, str]]:
    """Headers of so many messages, as a producer of CloudEvents sends them."""
    return [
        {
            "content-type": "application/json",
            "ce-id": f"{number:012x}",
            "type": f"type-{chance.randrange(types)}",
            "region": _region(chance),
            "amount": str(chance.randrange(1_000)),
        }
        for number in range(count)
    ]


def _wish(shape: str, number: int, chance: random.Random) -> Wish:
    kind = f"type-{number % TYPES}"
    least = chance.randrange(500)
    between = (least, least + 100)
    if shape == "loose" and number % 10 == 9:
        return Wish(regions=(_region(chance), _region(chance)), between=between)
    match chance.choice(("type", "region", "amount", "both")) if shape in {"mixed", "loose"} else shape:
        case "type":
            return Wish(type=kind)
        case "region":
            return Wish(type=kind, regions=(_region(chance),))
        case "amount":
            return Wish(type=kind, above=chance.randrange(1_000))
        case _:
            return Wish(type=kind, regions=(_region(chance), _region(chance)), between=between)


def _region(chance: random.Random) -> str:
    return f"region-{chance.randrange(REGIONS)}"


def _shape(
    shape: str, sizes: Sequence[int], peers: Mapping[str, Callable[[list[Wish]], Any]], chosen: argparse.Namespace
) -> dict[str, Any]:
    by_size = {str(size): _size(shape, size, peers, chosen) for size in sizes}
    first, last = by_size[str(sizes[0])], by_size[str(sizes[-1])]
    growth = {
        traffic: round(
            last["traffic"][traffic]["us_a_message"]["indexed"]["median"]
            / first["traffic"][traffic]["us_a_message"]["indexed"]["median"],
            2,
        )
        for traffic in TRAFFICS
    }
    return {"sizes": by_size, "growth": growth}


def _size(
    shape: str, size: int, peers: Mapping[str, Callable[[list[Wish]], Any]], chosen: argparse.Namespace
) -> dict[str, Any]:
    chance = random.Random(f"{chosen.seed} {shape} {size}")
    wanted = wishes(shape, size, chance)
    index, build = _built([wish.ours() for wish in wanted])
    contestants = {"indexed": index.match_batch, "unindexed": _unindexed(wanted)}
    contestants |= {name: make(wanted) for name, make in peers.items()}
    return {
        **build,
        "traffic": {
            traffic: _traffic(contestants, size, TYPES if traffic == "all" else min(size, TYPES), chance, chosen)
            for traffic in TRAFFICS
        },
    }


def _built(texts: list[str]) -> tuple[FilterIndex[int], dict[str, float]]:
    started = time.process_time()
    nodes = [parse(text) for text in texts]
    parsed = time.process_time()
    index: FilterIndex[int] = FilterIndex()
    for key, node in enumerate(nodes):
        index.add(key, node)
    added = time.process_time()
    return index, {
        "parse_us": round((parsed - started) / len(texts) * 1e6, 1),
        "add_us": round((added - parsed) / len(texts) * 1e6, 1),
    }


def _unindexed(wanted: list[Wish]) -> Callable[[Sequence[Headers]], list[list[int]]]:
    filters = [(key, compile_condition(parse(wish.ours()))) for key, wish in enumerate(wanted)]
    return lambda batch: [[key for key, matches in filters if matches(headers)] for headers in batch]


def _traffic(
    contestants: Mapping[str, Callable[[Any], Any]],
    size: int,
    types: int,
    chance: random.Random,
    chosen: argparse.Namespace,
) -> dict[str, Any]:
    whole = messages(chosen.messages, types=types, chance=chance)
    few = whole[: max(10, min(len(whole), EVALUATIONS // size))]
    expected = [sorted(keys) for keys in contestants["unindexed"](few[:50])]
    costs: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(chosen.rounds):
        for name in rounds.rotated(list(contestants), number):
            costs[name].append(_cost_us(name, contestants[name], whole if name == "indexed" else few))
    for name, ask in contestants.items():
        found = [sorted(keys) for keys in ask(_typed(name, few[:50]))]
        if found != expected:
            raise RuntimeError(f"{name} finds others than every filter by itself does")
    matches = sum(len(keys) for keys in contestants["indexed"](whole)) / len(whole)
    indexed = rounds.spread(costs["indexed"])["median"]
    return {
        "matches_a_message": round(matches, 3),
        "us_a_message": {name: rounds.spread(values) for name, values in costs.items()},
        "us_a_match": round(indexed / matches, 3) if matches else None,
        "below_unindexed": round(1 - rounds.ratio(costs["indexed"], costs["unindexed"]), 4),
    }


def _cost_us(name: str, ask: Callable[[Any], Any], of: list[dict[str, str]]) -> float:
    batches = [_typed(name, of[start : start + BATCH]) for start in range(0, len(of), BATCH)]
    started = time.process_time()
    for batch in batches:
        ask(batch)
    return (time.process_time() - started) / len(of) * 1e6


def _typed(name: str, batch: list[dict[str, str]]) -> Sequence[Headers]:
    """Peers compare numbers with numbers; what reading them would cost is not counted."""
    if name in {"indexed", "unindexed"}:
        return batch
    return [{**headers, "amount": int(headers["amount"])} for headers in batch]


def _memory(size: int, seed: int) -> dict[str, float]:
    texts = [wish.ours() for wish in wishes("mixed", size, random.Random(seed))]
    parse(texts[0])  # the grammar's tables are no subscription's
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    index, _ = _built(texts)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"subscriptions": len(index), "bytes_a_subscription": round((after - before) / size)}


def _peers() -> tuple[dict[str, Callable[[list[Wish]], Any]], dict[str, str]]:
    made: dict[str, Callable[[list[Wish]], Any]] = {"rule_engine": _rule_engine, "cel": _cel}
    missing = {}
    for name, (package, version) in PEERS.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != version:
            missing[name] = f"{installed}; pip install {package}=={version}"
            del made[name]
    return made, missing


def _rule_engine(wanted: list[Wish]) -> Callable[[Sequence[Headers]], list[list[int]]]:
    import rule_engine

    rules = [(key, rule_engine.Rule(wish.theirs("and"))) for key, wish in enumerate(wanted)]
    return lambda batch: [[key for key, rule in rules if rule.matches(headers)] for headers in batch]


def _cel(wanted: list[Wish]) -> Callable[[Sequence[Headers]], list[list[int]]]:
    import cel

    programs = [(key, cel.compile(wish.theirs("&&"))) for key, wish in enumerate(wanted)]

    def ask(batch: Sequence[Headers]) -> list[list[int]]:
        contexts = (cel.Context(variables=dict(headers)) for headers in batch)  # taken over to Rust once a message
        return [[key for key, program in programs if program.execute(context)] for context in contexts]

    return ask


def _show(shapes: Mapping[str, Any], chosen: argparse.Namespace) -> None:
    for traffic in TRAFFICS:
        rows = []
        for shape, found in shapes.items():
            for size, figures in found["sizes"].items():
                of = figures["traffic"][traffic]
                costs = [one["median"] for one in of["us_a_message"].values()]
                rows.append((
                    f"{shape}, {int(size):,}", *costs, f"{of['below_unindexed']:.1%}", of["matches_a_message"],
                    of["us_a_match"],
                ))  # fmt: skip
            rows.append((f"{shape}, growth", found["growth"][traffic]))
        names = next(iter(next(iter(shapes.values()))["sizes"].values()))["traffic"][traffic]["us_a_message"]
        title = f"filter, traffic of {traffic} types, {chosen.rounds} rounds, microseconds of processor a message"
        report.table(title, ("", *names, "below", "matches", "us a match"), rows)


if __name__ == "__main__":
    main()
