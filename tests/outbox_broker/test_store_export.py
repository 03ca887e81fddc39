"""The logs of a broker on ledgers, as files that the reconciliation reads: what its owner confirmed, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.server.store_files import LogsExported, export_logs
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal import journal
from outbox_core.messages.message import GroupConfig, Message, decode_record
from spark_reconcile.sources.broker_logs import ACTION_KINDS, MESSAGE_KINDS, begins_whole, frames_of, survey
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster, Told

TOPIC, GROUP = "orders", "billing"
OPTIONS = EngineOptions(segment_bytes=4096, checkpoint_bytes=4096, retention_ms=1)


@contextmanager
def owned(cluster: LedgerCluster, folder: Path) -> Iterator[Engine]:
    """An engine that takes the shard over."""
    taken = cluster.open()
    engine = Engine.open(folder, clock=cluster.clock, options=OPTIONS, segments=lambda _part: taken)
    try:
        yield engine
    finally:
        engine.close()


def exported(cluster: LedgerCluster, folder: Path) -> LogsExported:
    return export_logs(folder, cluster="trips", view=lambda: LedgerView.open(cluster.shard()), pause=Told(cluster))


def work(engine: Engine, name: str, count: int = 60) -> list[str]:
    """Publish, deliver and acknowledge so many; returns the ids."""
    ids = [f"{name}-{number}" for number in range(count)]
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    for one in ids:
        engine.publisher.publish([Message(id=one, topic=TOPIC, body=one.encode() * 30)])
    while found := engine.puller.pull(TOPIC, GROUP, max_messages=7):
        engine.settler.ack([one.receipt for one in found])
    return ids


def messages_in(folder: Path) -> list[str]:
    segments = survey(folder, "messages")
    return [decode_record(frame.payload).id for one in segments for frame in frames_of(one, wanted=MESSAGE_KINDS)]


def settled_in(folder: Path) -> int:
    actions = [
        journal.decode_action(frame.payload)
        for segment in survey(folder, "actions")
        for frame in frames_of(segment, wanted=ACTION_KINDS)
    ]
    return sum(count for one in actions if isinstance(one, journal.Settled) for _, count in one.runs)


def test_what_an_owner_confirmed_is_in_the_export_while_it_runs_and_a_second_one_reads_what_is_new(
    tmp_path: Path,
) -> None:
    cluster, folder = LedgerCluster(), tmp_path / "export"
    with owned(cluster, tmp_path / "a") as engine:
        ids = work(engine, "first")
        before = exported(cluster, folder)
        assert messages_in(folder) == ids
        assert settled_in(folder) == len(ids)
        ids += work(engine, "second")

        after = exported(cluster, folder)

        assert messages_in(folder) == ids
        assert settled_in(folder) == len(ids)
        assert begins_whole(survey(folder, "messages"))
        assert before.kept == 0
        assert after.kept >= before.segments - 2, "all that was sealed"
        assert exported(cluster, folder).written_bytes < after.written_bytes


def test_the_export_of_another_owner_goes_on_where_that_of_the_one_before_ended(tmp_path: Path) -> None:
    cluster, folder = LedgerCluster(), tmp_path / "export"
    with owned(cluster, tmp_path / "a") as engine:
        ids = work(engine, "first")
        exported(cluster, folder)
        with owned(cluster, tmp_path / "b") as successor:
            ids += work(successor, "second")
            exported(cluster, folder)

    assert messages_in(folder) == ids
    assert settled_in(folder) == len(ids)


def test_segments_that_retention_dropped_go_from_the_export(tmp_path: Path) -> None:
    cluster, folder = LedgerCluster(), tmp_path / "export"
    with owned(cluster, tmp_path / "a") as engine:
        work(engine, "first")
        exported(cluster, folder)
        cluster.clock.advance(60_000)
        last = work(engine, "second", 40)
        engine.retention.check()
        exported(cluster, folder)

        assert not begins_whole(survey(folder, "messages"))
        assert messages_in(folder)[-1] == last[-1]


def test_a_path_that_no_broker_has_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no broker has opened this path yet"):
        exported(LedgerCluster(), tmp_path / "export")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    cluster = LedgerCluster()
    Engine.open(tmp_path / "data", clock=cluster.clock).close()
    files = sorted(path for path in (tmp_path / "data").rglob("*") if path.is_file())
    with owned(cluster, tmp_path / "a") as engine:
        work(engine, "first", 3)
        with pytest.raises(ConfigurationError, match="holds other things than an export"):
            exported(cluster, tmp_path / "data")
        exported(cluster, tmp_path / "export")
        with pytest.raises(ConfigurationError, match="is the export of another broker"):
            export_logs(tmp_path / "export", cluster="others", view=lambda: LedgerView.open(cluster.shard()))

    assert sorted(path for path in (tmp_path / "data").rglob("*") if path.is_file()) == files


def test_a_folder_into_which_another_export_goes_is_refused(tmp_path: Path) -> None:
    cluster, folder = LedgerCluster(), tmp_path / "export"
    with owned(cluster, tmp_path / "a") as engine:
        ids = work(engine, "first", 3)
        views = 0

        def view() -> LedgerView | None:
            nonlocal views
            views += 1
            if views == 2:  # the first is of the look before
                with pytest.raises(ConfigurationError, match="is in use"):
                    exported(cluster, folder)
            return LedgerView.open(cluster.shard())

        export_logs(folder, cluster="trips", view=view, pause=Told(cluster))

        assert views > 2
        assert messages_in(folder) == ids
        exported(cluster, folder)


def test_no_broker_is_started_on_an_export_whose_files_are_for_one_user(tmp_path: Path) -> None:
    cluster, folder = LedgerCluster(), tmp_path / "export"
    with owned(cluster, tmp_path / "a") as engine:
        work(engine, "first", 3)
        exported(cluster, folder)

    with pytest.raises(ConfigurationError, match="is an export of a broker's logs"):
        Engine.open(folder, clock=cluster.clock)
    assert {path.stat().st_mode & 0o077 for path in (folder, *folder.rglob("*"))} == {0}


def test_what_earlier_owners_left_is_not_read_again(tmp_path: Path) -> None:
    cluster, folder = LedgerCluster(), tmp_path / "export"
    for number in range(3):
        with owned(cluster, tmp_path / f"owner-{number}") as engine:
            work(engine, f"of-{number}", 5)
    exported(cluster, folder)

    again = exported(cluster, folder)

    assert again.segments - again.kept <= 2, "those that may still grow"


def test_a_broker_without_a_message_is_exported_as_an_empty_log(tmp_path: Path) -> None:
    cluster, folder = LedgerCluster(), tmp_path / "export"
    with owned(cluster, tmp_path / "a") as engine:
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
        exported(cluster, folder)
        assert messages_in(folder) == []
        assert begins_whole(survey(folder, "actions"))
        ids = work(engine, "first", 3)
        exported(cluster, folder)

    assert messages_in(folder) == ids
