"""Finds a group's dead letters and reads them. Without the lock, which a search of many would hold for long."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_writer import DeadLetterWriter
from outbox_broker.engine.footer_repair import FooterRepair
from outbox_broker.group.consumer_group import Group
from outbox_broker.group.dead_letters import DeadRun
from outbox_broker.journal.message_reader import read_runs
from outbox_broker.log.topic_index import PlaceRun
from outbox_broker.state.engine_state import Topic
from outbox_core.messages import limits
from outbox_core.messages.message import DeadFilter, Record

_CHAR_BYTES: Final = 4
RUNS_AT_ONCE: Final = 1_000
"""Runs of dead letters that are gone over in one hold of the lock: some 15 ms."""
ChosenRun = tuple[int, int, int]
"""Dead letters from a sequence to an end (exclusive) that died at a time, in epoch milliseconds."""


FoundLetter = tuple[int, DeadRun, Record | None]
"""A dead letter's sequence, how it died, and its record; None if that is damaged."""


@dataclass(slots=True)
class DeadPage:
    """Dead letters, and the next dead sequence, if any."""

    found: list[FoundLetter]
    following: int | None


class DeadLetterReader:
    """Pages of dead letters, and which of them are meant."""

    def __init__(self, context: EngineContext, writer: DeadLetterWriter, footer_repair: FooterRepair) -> None:
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._writer = writer
        self._footer_repair = footer_repair

    def bury_expired(self, topic: str, group: Group) -> None:
        """Make dead letters of what has no attempts left. Under the lock."""
        now_ms = self._clock.now_ms()
        _, deaths = group.visible_again(now_ms=now_ms, count_max=len(group.unsettled))
        self._writer.bury(topic, group, deaths, at_ms=now_ms)

    def page(self, topic: Topic, group: Group, *, start: int, count_max: int, bytes_max: int) -> DeadPage:
        """Returns dead letters from the sequence `start` on, read without the lock; fewer than `count_max` if they are
        large: always the first one, and what fits after it.
        """
        while True:
            moves = group.moves
            page = self._page(topic, group, start=start, count_max=count_max, bytes_max=bytes_max)
            if moves == group.moves or all(record is not None for _, _, record in page.found):
                return page  # else retention may have moved one, and dropped its segment, while it was read

    def _page(self, topic: Topic, group: Group, *, start: int, count_max: int, bytes_max: int) -> DeadPage:
        runs, following = self._footer_repair.looked_up(
            lambda: _dead_runs(topic, group, start=start, count_max=count_max)
        )
        page, bytes_left = DeadPage([], following), bytes_max
        for run, locations in runs:
            if bytes_left <= 0:
                page.following = run.first
                break
            read = read_runs(self._context.messages, locations, first=run.first, end=run.end, bytes_max=bytes_left)
            for sequence, record in read:
                bytes_left -= _letter_bytes(run, record)
                if bytes_left < 0 and page.found:
                    page.following = sequence
                    return page
                page.found.append((sequence, run, record))
            if run.first + len(read) < run.end:
                page.following = run.first + len(read)
                break
        return page

    def chosen(
        self, topic: Topic, group: Group, *, ids: Collection[str] | None, where: DeadFilter | None,
        dead_before_ms: int | None,
    ) -> list[ChosenRun]:  # fmt: skip
        """Returns the dead letters that have one of these ids, or that fit `where`; without both, all. In order, and
        only those that died before `dead_before_ms`. Reads their messages if it has to, without the lock, and the runs
        of a million not in one hold of it: so whoever acts on them asks whether they are those that died then.
        """
        before_ms = limits.TIME_MS_MAX if dead_before_ms is None else dead_before_ms

        def fits(run: DeadRun) -> bool:
            return run.dead_at_ms < before_ms and (
                where is None or where.fits_death(reason=run.reason, dead_at_ms=run.dead_at_ms)
            )

        if ids is not None:
            wanted = set(ids)
            return _chosen_runs(
                (sequence, run.dead_at_ms)
                for sequence, run, record in self._all(topic, group)
                if record is not None and record.id in wanted and run.dead_at_ms < before_ms
            )
        if where is None or not where.needs_messages:
            return [(run.first, run.end, run.dead_at_ms) for run in self._runs(group) if fits(run)]
        return _chosen_runs(
            (sequence, run.dead_at_ms)
            for sequence, run, record in self._all(topic, group)
            if record is not None and fits(run) and where.fits_message(key=record.key, headers=record.headers)
        )

    def _runs(self, group: Group) -> Iterator[DeadRun]:
        """Yields all runs of dead letters; the lock is let go after each thousand."""
        start: int | None = 0
        while start is not None:
            with self._lock:
                runs = list(islice(group.dead.runs(start), RUNS_AT_ONCE))
            yield from runs
            start = runs[-1].end if len(runs) == RUNS_AT_ONCE else None

    def _all(self, topic: Topic, group: Group) -> Iterator[FoundLetter]:
        following: int | None = 0
        while following is not None:
            page = self.page(
                topic, group, start=following, count_max=self._options.dead_search_messages_max,
                bytes_max=self._options.pull_bytes_max,
            )  # fmt: skip
            yield from page.found
            following = page.following


def _chosen_runs(letters: Iterable[tuple[int, int]]) -> list[ChosenRun]:
    """Returns ascending (sequence, dead_at_ms) as runs."""
    runs: list[ChosenRun] = []
    for sequence, dead_at_ms in letters:
        if runs and runs[-1][1:] == (sequence, dead_at_ms):
            runs[-1] = (runs[-1][0], sequence + 1, dead_at_ms)
        else:
            runs.append((sequence, sequence + 1, dead_at_ms))
    return runs


def _dead_runs(
    topic: Topic, group: Group, *, start: int, count_max: int
) -> tuple[list[tuple[DeadRun, list[PlaceRun]]], int | None]:
    """Returns up to `count_max` dead letters from a sequence on, with locations; and the next dead sequence, if any."""
    runs: list[tuple[DeadRun, list[PlaceRun]]] = []
    count_left, following = count_max, None
    for run in group.dead.runs(start):
        if not count_left:
            following = run.first if following is None else following
            break
        end = min(run.end, run.first + count_left)
        located = group.located(topic.index, [(run.first, end)])
        runs += [(replace(run, first=first, end=behind), place_runs) for (first, behind), place_runs in located]
        count_left -= end - run.first
        following = end if end < run.end else None
    return runs, following


def _letter_bytes(dead: DeadRun, record: Record | None) -> int:
    """Returns the approximate size of a dead letter, in bytes."""
    size = _CHAR_BYTES * (len(dead.reason) + sum(len(reason) for reason, _ in dead.history))
    if record is None:
        return size
    return size + len(record.body) + len(record.key or "") + sum(map(len, chain.from_iterable(record.headers.items())))
