"""Digests of files that stay are kept: what changed is scanned again, nothing else, and no verdict is another's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_reconcile import Settings, Summary, run_windows
from spark_reconcile.compare.file_digest_cache import FOLDER, INDEX, FileDigestCache
from spark_reconcile.compare.key_digests import digest
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.sources.parquet_archives import read_archive
from spark_reconcile.sources.parquet_file_identity import Files
from tests.fixtures.databases import Database
from tests.spark_reconcile.faults import plant_all
from tests.spark_reconcile.test_windows import SINCE_MS, Killed, _books, _judged, _kill_at, _rows_of_windows
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, TICKETS, World, no_wait, sha

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Row = dict[str, Any]
AT_REST_AT_ONCE = RunLimits(file_rest_ms=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An archive of three files, an hour each."""
    for number in range(3):
        _write(tmp_path / "archive" / f"{number}.parquet", [_row(f"{number}-{one}", number) for one in range(4)])
    return tmp_path / "archive"


@pytest.mark.spark
def test_what_is_kept_of_files_sums_up_to_what_a_scan_of_all_gives(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    first, _ = _known(spark, folder, tmp_path)
    again, scanned = _known(spark, folder, tmp_path)

    assert first == again == _scan_of_all(spark, folder)
    assert scanned == []


@pytest.mark.spark
def test_a_file_that_was_replaced_by_another_of_its_size_and_time_is_scanned_again(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    _known(spark, folder, tmp_path)
    path = folder / "1.parquet"
    before = path.stat()
    _write(path, [_row(f"9-{one}", 1) for one in range(4)])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    sums, scanned = _known(spark, folder, tmp_path)

    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert scanned == ["1.parquet"]
    assert sums == _scan_of_all(spark, folder)


@pytest.mark.spark
def test_a_file_that_is_gone_is_forgotten_and_a_new_one_is_scanned(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    _known(spark, folder, tmp_path)
    (folder / "0.parquet").unlink()
    _write(folder / "with a space.parquet", [_row("new", 2)])

    sums, scanned = _known(spark, folder, tmp_path)
    again, none = _known(spark, folder, tmp_path)

    assert scanned == ["with a space.parquet"]
    assert sums == again == _scan_of_all(spark, folder)
    assert none == []


@pytest.mark.spark
def test_a_run_that_is_killed_between_scan_and_keep_leaves_nothing_that_counts(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    wanted = _scan_of_all(spark, folder)
    writes: list[str] = []
    _known(spark, folder, tmp_path / "counted", checkpoint=writes.append)
    assert writes == ["write digests", "place digests", "show digests"]

    for number, write in enumerate(writes):
        with pytest.raises(Killed):
            _known(spark, folder, tmp_path / write, checkpoint=_kill_at(number))
        sums, scanned = _known(spark, folder, tmp_path / write)
        assert (sums, len(scanned)) == (wanted, 3), write
        assert len(list((tmp_path / write / FOLDER).iterdir())) == 2, "the index and one generation"


@pytest.mark.spark
def test_what_other_code_or_half_a_disk_has_kept_is_made_again(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    wanted, _ = _known(spark, folder, tmp_path)
    index = tmp_path / FOLDER / INDEX
    index.write_text(json.dumps({**json.loads(index.read_text()), "about": "other code"}))
    of_other_code, scanned = _known(spark, folder, tmp_path)
    assert (of_other_code, len(scanned)) == (wanted, 3)

    kept = next((tmp_path / FOLDER).glob("*/*.parquet"))
    os.truncate(kept, kept.stat().st_size // 2)
    of_half, scanned = _known(spark, folder, tmp_path)
    assert (of_half, len(scanned)) == (wanted, 3)


@pytest.mark.spark
def test_digests_that_are_damaged_in_any_byte_are_made_again(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    settings, _ = _moved(_world(groups=False), sqlite, tmp_path)
    given = {"since_ms": SINCE_MS, "session": spark, "pause": no_wait}
    run_windows(settings, now_ms=NOW_MS, **given)
    wanted, versions = _rows_of_windows(settings), _versions(settings)

    for number, damaged in enumerate((_zeroed, _flipped), start=1):
        kept = max((settings.output / FOLDER).glob("*/*.parquet"), key=lambda path: path.stat().st_size)
        kept.write_bytes(damaged(kept.read_bytes()))

        summary = run_windows(settings, now_ms=NOW_MS + number, **given)

        assert (_judged(summary), _versions(settings)) == (0, versions), "the digests are what they were"
        assert _rows_of_windows(settings) == wanted
        assert not kept.exists(), "its files were scanned again"
        assert any(pq.read_table(path).num_rows for path in (settings.output / FOLDER).glob("*/*.parquet"))


@pytest.mark.spark
def test_generations_become_one_where_there_are_too_many(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    limits = RunLimits(file_rest_ms=0, digest_generations_max=2)
    generations = []
    for number in range(3, 6):
        _known(spark, folder, tmp_path, limits=limits)
        generations.append(len(list((tmp_path / FOLDER).glob("*/_SUCCESS"))))
        _write(folder / f"{number}.parquet", [_row(str(number), number)])

    sums, scanned = _known(spark, folder, tmp_path, limits=limits)

    assert generations == [1, 2, 1]
    assert scanned == ["5.parquet"]
    assert sums == _scan_of_all(spark, folder)


@pytest.mark.spark
def test_a_file_that_was_written_a_moment_ago_is_scanned_and_not_kept(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    assert _known(spark, folder, tmp_path, limits=RunLimits(file_rest_ms=HOUR_MS)) == (set(), [])


@pytest.mark.spark
def test_a_file_that_is_replaced_while_it_is_scanned_is_not_kept(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    def replacing() -> None:
        _write(folder / "2.parquet", [_row("other", 2)])

    _known(spark, folder, tmp_path, meanwhile=replacing)
    sums, scanned = _known(spark, folder, tmp_path)

    assert scanned == ["2.parquet"]
    assert sums == _scan_of_all(spark, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing:
    """Runs by the hour on records most of which are in files, and between which something changes."""

    settings: Settings
    world: World
    database: Database
    spark: SparkSession
    hours: dict[str, list[Row]]
    random: Random

    def run(self, number: int, *, output: Path | None = None) -> Summary:
        """The run of this number, by default with what those before it kept."""
        settings = replace(self.settings, output=output or self.settings.output)
        return run_windows(settings, since_ms=SINCE_MS, now_ms=NOW_MS + number, session=self.spark, pause=no_wait)

    def change_at_random(self) -> None:
        """Change three things."""
        for _ in range(3):
            change = self.random.choice([_change, _merge, _move_to_table, _come_late])
            change(self.random, self.world, self.hours, self.settings)
        standing = {path.name for path in self.settings.archives[0].iterdir()}
        for name in standing - self.hours.keys():
            (self.settings.archives[0] / name).unlink()
        for name, rows in self.hours.items():
            if name not in standing or _stands(self.settings, name) != rows:
                _write(self.settings.archives[0] / name, rows)
        self.world.write_tables(self.database)

    def check(self, number: int, fresh: Path) -> None:
        """The run of this number says what one says that knows nothing of those before it."""
        kept, anew = self.run(number), self.run(number, output=fresh)
        assert _rows_of_windows(self.settings) == _rows_of_windows(replace(self.settings, output=fresh))
        assert _books(kept) == _books(anew)


def _changing(spark: SparkSession, database: Database, folder: Path, *, groups: bool) -> Changing:
    seed = 20261121
    print(f"seed {seed}")
    world = _world(groups=groups)
    settings, hours = _moved(world, database, folder)
    return Changing(
        settings=settings, world=world, database=database, spark=spark, hours=hours, random=Random(seed)
    )  # fmt: skip


@pytest.mark.spark
@pytest.mark.slow
def test_verdicts_are_the_same_with_and_without_kept_digests_and_a_changed_file_opens_exactly_its_hour(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    changing = _changing(spark, sqlite, tmp_path, groups=True)
    settings = changing.settings
    changing.run(0)
    changing.change_at_random()
    changing.check(1, tmp_path / "fresh")  # from here on the log's segments are files

    stored = {one.id for one in changing.world.stored}
    name, rows, changed = next(
        (name, rows, row)
        for name, rows in changing.hours.items() if len(rows) > 2
        for row in rows if row["id"] in stored
    )  # fmt: skip
    changed["body_sha256"] = sha("another")
    _write(settings.archives[0] / name, rows)
    before = _versions(settings)
    summary = changing.run(2)

    assert _judged(summary) == 1
    assert {start for start, version in _versions(settings).items() if version != before[start]} == {
        changed["created_at_us"] // 1000 // HOUR_MS * HOUR_MS
    }
    assert ("message", changed["id"], "", "mismatch", "body_differs") in _rows_of_windows(settings)


@pytest.mark.spark
@pytest.mark.slow
def test_without_groups_verdicts_are_the_same_with_and_without_what_two_runs_kept_whatever_changed_in_between(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    changing = _changing(spark, sqlite, tmp_path, groups=False)
    for number in range(2):
        changing.run(number)
        changing.change_at_random()

    changing.check(2, tmp_path / "fresh")


def _zeroed(data: bytes) -> bytes:
    """A third of it is gone, as of a disk that has lost pages."""
    third = len(data) // 3
    return data[:third] + bytes(third) + data[2 * third :]


def _flipped(data: bytes) -> bytes:
    """One bit of it is another."""
    third = len(data) // 3
    return data[:third] + bytes([data[third] ^ 1]) + data[third + 1 :]


def _change(random: Random, _: World, hours: dict[str, list[Row]], __: Settings) -> None:
    """A row of the archive is another than it was."""
    row = random.choice(hours[random.choice(sorted(hours))])
    row["body_sha256"] = sha(str(random.random()))


def _merge(random: Random, _: World, hours: dict[str, list[Row]], __: Settings) -> None:
    """Two files become one."""
    if len(hours) > 2:
        one, other = random.sample(sorted(hours), 2)
        hours[one] += hours.pop(other)


def _move_to_table(random: Random, world: World, hours: dict[str, list[Row]], _: Settings) -> None:
    """A row goes back from a file to the database."""
    rows = hours[random.choice(sorted(hours))]
    if len(rows) > 1:
        world.archive.append(rows.pop())


def _come_late(random: Random, world: World, hours: dict[str, list[Row]], _: Settings) -> None:
    """An order whose message nobody sent, and a message whose row has been there for hours."""
    world.order(age_ms=random.randrange(70, 280) * MINUTE_MS)
    row = random.choice(hours[random.choice(sorted(hours))])
    hours[f"late-{len(hours)}.parquet"] = [{**row, "id": f"late-{random.random()}"}]


def _stands(settings: Settings, name: str) -> list[Row]:
    return list(pq.read_table(settings.archives[0] / name).to_pylist())


def _world(*, groups: bool) -> World:
    """Orders of five hours, and with groups all that can go wrong."""
    world = World()
    if groups:
        world.groups()
        plant_all(world)
    for number in range(30):
        order, age_ms = world.order(age_ms=280 * MINUTE_MS - number * 7 * MINUTE_MS), 0
        age_ms = 280 * MINUTE_MS - number * 7 * MINUTE_MS
        name = world.sent(f"good-{order}", key=str(order), age_ms=age_ms)
        sequence = world.store(name, key=str(order), age_ms=age_ms)
        for group in (TICKETS, MAIL) if groups else ():
            world.done(name, sequence, group, age_ms=age_ms)
    with_timed_ids(world)
    return world


def _moved(world: World, sqlite: Database, tmp_path: Path) -> tuple[Settings, dict[str, list[Row]]]:
    """Most of the archive moved to a file an hour, which is at rest at once, and segments that are worth keeping."""
    hours: dict[str, list[Row]] = {}
    for row in world.archive[5:]:
        hours.setdefault(f"{row['created_at_us'] // 1000 // HOUR_MS}.parquet", []).append(row)
    del world.archive[5:]
    settings = world.write(sqlite, tmp_path, records_a_segment=10)
    for name, rows in hours.items():
        _write(tmp_path / "moved" / name, rows)
    inboxes = settings.inboxes if world.inbox else []
    limits = RunLimits(file_rest_ms=0, kept_segment_bytes_min=0)
    return replace(settings, archives=[tmp_path / "moved"], inboxes=inboxes, limits=limits), hours


def _versions(settings: Settings) -> dict[int, str]:
    return {start: window.version for start, window in WindowStore(settings.output).windows.items()}


def _row(name: str, hour: int) -> Row:
    return {
        "id": name, "kind": "publish", "topic": "order.paid", "message_key": name, "body_sha256": sha(name),
        "deliver_at_ms": None, "created_at_us": hour * HOUR_MS * 1000, "sent_at_us": hour * HOUR_MS * 1000,
        "attempts": 1, "outcome": "stored",
    }  # fmt: skip


_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("id", "kind", "topic", "message_key", "body_sha256", "outcome")]
    + [(name, pa.int64()) for name in ("deliver_at_ms", "created_at_us", "sent_at_us", "attempts")]
)


def _write(path: Path, rows: Sequence[Row]) -> None:
    """A Parquet file whose size tells nothing of what is in it."""
    path.parent.mkdir(exist_ok=True)
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.Table.from_pylist(list(rows), schema=_SCHEMA), path, **plain)


def _known(
    spark: SparkSession, folder: Path, output: Path, *, checkpoint: Any = lambda _: None,
    meanwhile: Callable[[], None] = lambda: None, limits: RunLimits = AT_REST_AT_ONCE,
) -> tuple[set[tuple[Any, ...]], list[str]]:  # fmt: skip
    """The kept sums of the folder's files, and which of these were scanned."""
    scanned: list[str] = []
    found = read_archive(spark, folder).files

    def reading(names: Sequence[str]) -> DataFrame:
        scanned.extend(Path(name).name.replace("%20", " ") for name in names)
        meanwhile()
        return found.read(names)

    files = Files(input_kind=found.input_kind, names=found.names, read=reading)
    known = FileDigestCache(output, limits, checkpoint=checkpoint).known(spark, [files])
    return _summed(known.sums) if known.sums is not None else set(), sorted(scanned)


def _scan_of_all(spark: SparkSession, folder: Path) -> set[tuple[Any, ...]]:
    files = read_archive(spark, folder).files
    return _summed(digest(files.read(files.names), files.input_kind))


def _summed(sums: DataFrame) -> set[tuple[Any, ...]]:
    placed = ("input_kind", "number", "period", "part", "note")
    return {tuple(row) for row in sums.groupBy(*placed).sum("n", "low", "high", "odd").collect()}
