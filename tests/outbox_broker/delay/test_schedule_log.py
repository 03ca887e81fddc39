"""How much the schedule's log has grown since its checkpoint, by which a flush is due. Not what its records say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_broker.schedule.schedule_log import ScheduleLog
from outbox_broker.schedule.schedule_records import BatchFired, encode
from outbox_broker.schedule.schedule_state import ScheduleState
from outbox_broker.schedule.stores.local_segments import LocalSegmentStore

RECORDS = [BatchFired(number) for number in range(1, 6)]
RECORDS_BYTES = sum(len(encode(one)) for one in RECORDS)


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[LocalSegmentStore]:
    store = LocalSegmentStore.open(tmp_path / "delay")
    yield store
    store.close()


@pytest.fixture
def log(segments: LocalSegmentStore) -> ScheduleLog:
    """A log behind whose checkpoint there are the records."""
    made = ScheduleLog(segments)
    assert list(made.recover()) == []
    made.begin_anew(ScheduleState(cancels_max=1).checkpoint())
    for one in RECORDS:
        made.append(one)
    return made


def test_a_log_grows_by_the_bytes_of_its_records_and_not_by_what_a_store_adds(log: ScheduleLog) -> None:
    assert log.grown_bytes == RECORDS_BYTES


def test_a_log_that_is_recovered_has_grown_as_much_as_before(log: ScheduleLog, segments: LocalSegmentStore) -> None:
    log.commit()
    again = ScheduleLog(segments)

    assert list(again.recover())[1:] == RECORDS
    assert again.grown_bytes == log.grown_bytes


def test_a_log_has_not_grown_when_it_begins_anew(log: ScheduleLog) -> None:
    log.begin(ScheduleState(cancels_max=1).checkpoint())

    assert log.grown_bytes == 0
