"""A backup of a data folder, its check and its restore: what was acknowledged is there, nothing settled comes again;
what is flipped or cut is found, and what is killed leaves what was before.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from outbox_broker.backup.backup import BackupTaken, BackupTarget
from outbox_broker.backup.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from outbox_broker.backup.restore import restore_backup
from outbox_broker.backup.verify import BackupDamage, check_backup
from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.log.folder_format import FolderFormat
from outbox_broker.log.storage import DiskStorage, Storage
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.runtime.command import main
from tests.outbox_broker.killed_engine import RESERVE_BYTES, CopyEach, KillingStorage

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
SMALL = EngineOptions(segment_bytes=4096, checkpoint_bytes=4096, reserve_bytes=RESERVE_BYTES)
type_of_open = Callable[..., Engine]


def nothing(*_: object) -> None:
    """Shows no progress, and asks no broker."""


def take(
    data: Path, to: Path, *, storage: Storage | None = None, clock: ManualClock | None = None
) -> BackupTaken:  # fmt: skip
    """Back up a stopped folder as fast as it goes."""
    target = BackupTarget(
        to, storage=storage or DiskStorage(), clock=clock or ManualClock(), bytes_per_second=None
    )  # fmt: skip
    return target.take(data, ask=nothing, shows=nothing)


def restored(backup: Path, to: Path, *, clock: ManualClock, storage: Storage | None = None) -> Path:
    """Restore a backup; returns the folder."""
    restore_backup(backup, to, storage=storage or DiskStorage(), clock=clock, shows=nothing)
    return to


def damage_in(backup: Path) -> list[BackupDamage]:
    """What verify finds."""
    return check_backup(backup, shows=nothing)[1]


def outbox(*arguments: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", *arguments])
    return int(ended.value.code or 0)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def publish(engine: Engine, *ids: str, deliver_at_ms: int | None = None) -> None:
    batch = [Message(id=one, topic=TOPIC, body=one.encode() * 100, deliver_at_ms=deliver_at_ms) for one in ids]
    assert {result.status for result in engine.publisher.publish(batch)} == {"stored"}


def pulled(engine: Engine, count: int = 1_000) -> dict[str, str]:
    """Receipts by id."""
    return {one.id: one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=count, invisible_ms=60_000)}


@pytest.fixture
def engines(clock: ManualClock) -> Iterator[Callable[..., Engine]]:
    """Opens engines, which are closed at the end."""
    opened: list[Engine] = []

    def opens(folder: Path, durability: Durability = Durability.FSYNC, *, options: EngineOptions = SMALL) -> Engine:
        of_test = EngineOptions(
            durability=durability, segment_bytes=options.segment_bytes, checkpoint_bytes=options.checkpoint_bytes,
            reserve_bytes=options.reserve_bytes,
        )  # fmt: skip
        opened.append(Engine.open(folder, clock=clock, options=of_test))
        return opened[-1]

    yield opens
    for engine in opened:
        engine.close()


@pytest.fixture
def used(folder: Path, engines: Callable[..., Engine], clock: ManualClock) -> Path:
    """A small folder of a broker that was stopped."""
    engine = engines(folder)
    publish(engine, "m1", "m2")
    engine.settler.ack([pulled(engine, 1)["m1"]])
    publish(engine, "later", deliver_at_ms=clock.now_ms() + HOUR_MS)
    engine.close()
    return folder


@pytest.mark.parametrize("durability", Durability)
def test_a_restored_broker_goes_on_where_the_backup_ended(
    folder: Path, tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock, durability: Durability
) -> None:
    engine = engines(folder, durability)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    publish(engine, *(f"m{number}" for number in range(40)))
    publish(engine, "later", "never", deliver_at_ms=clock.now_ms() + HOUR_MS)
    receipts = pulled(engine, 20)
    engine.settler.ack([receipts[f"m{number}"] for number in range(10)])
    engine.settler.nack([receipts["m10"]], reason="broken")
    assert engine.publisher.cancel(["never"]) == ["canceled"]
    engine.close()

    taken = take(folder, tmp_path / "backup", clock=clock)
    engine = engines(restored(tmp_path / "backup", tmp_path / "restored", clock=clock), durability)

    assert taken.copied_bytes == taken.size_bytes > 0
    held = pulled(engine)
    assert list(held) == [f"m{number}" for number in range(20, 40)]
    clock.advance(59_000)
    engine.settler.ack(list(held.values()))
    clock.advance(1_000)
    again = pulled(engine)
    assert list(again) == [f"m{number}" for number in range(11, 20)], "what was in flight comes again"
    engine.settler.ack(list(again.values()))
    letters, _ = engine.admin.dead(TOPIC, GROUP)
    assert [letter.id for letter in letters] == ["m10"]
    clock.advance(HOUR_MS - 60_001)
    assert list(pulled(engine)) == []
    clock.advance(1)
    assert list(pulled(engine)) == ["later"]
    publish(engine, "new")
    assert [one.status for one in engine.publisher.publish([Message(id="m39", topic=TOPIC, body=b"")])] == ["duplicate"]


def test_receipts_of_before_are_stale_also_those_that_were_given_after_the_backup(
    folder: Path, tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock
) -> None:
    engine = engines(folder)
    publish(engine, "a", "b", "c")
    before = pulled(engine, 1)["a"]
    engine.close()
    take(folder, tmp_path / "backup")
    engine = engines(folder)
    after = pulled(engine)
    engine.close()
    engine = engines(restored(tmp_path / "backup", tmp_path / "restored", clock=clock))
    here = pulled(engine)

    stale = [before, after["b"], after["c"]]

    assert engine.settler.ack(stale) == ["stale"] * 3
    assert engine.settler.nack(stale) == ["stale"] * 3
    assert engine.settler.extend(stale, invisible_ms=60_000) == ["stale"] * 3
    assert engine.settler.ack(list(here.values())) == ["acked"] * 2
    clock.advance(60_000)
    assert list(pulled(engine)) == ["a"]


def test_a_folder_that_is_restored_twice_gives_other_receipts_each_time(
    used: Path, tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock
) -> None:
    take(used, tmp_path / "backup")
    first = engines(restored(tmp_path / "backup", tmp_path / "first", clock=clock))
    receipt = pulled(first)["m2"]
    first.close()
    clock.advance(60_000)

    second = engines(restored(tmp_path / "backup", tmp_path / "second", clock=clock))

    assert pulled(second)["m2"] != receipt
    assert second.settler.ack([receipt]) == ["stale"]


def test_every_flipped_byte_is_found_by_file_and_range(
    folder: Path, tmp_path: Path, engines: Callable[..., Engine]
) -> None:
    engine = engines(folder)
    publish(engine, "m1")
    engine.close()
    backup = tmp_path / "backup"
    take(folder, backup)
    assert damage_in(backup) == []
    files = {path: path.read_bytes() for path in (backup / MANIFEST, *(backup / "contents").iterdir())}
    assert sum(map(len, files.values())) > 1_000

    for path, data in files.items():
        descriptor = os.open(path, os.O_RDWR)
        for position, byte in enumerate(data):
            os.pwrite(descriptor, bytes([byte ^ 1 << position % 8]), position)
            found = damage_in(backup)
            os.pwrite(descriptor, bytes([byte]), position)
            assert {one.file for one in found} == {str(path.relative_to(backup))}
            assert all(one.first <= position < one.end for one in found)
        os.close(descriptor)
    assert damage_in(backup) == []


@pytest.mark.parametrize("what", ["cut", "added", "missing"])
def test_bytes_that_are_missing_or_too_much_are_found(used: Path, tmp_path: Path, what: str) -> None:
    backup = tmp_path / "backup"
    take(used, backup)
    content = max((backup / "contents").iterdir(), key=lambda path: path.stat().st_size)
    size_bytes = content.stat().st_size
    if what == "missing":
        content.unlink()
    else:
        os.truncate(content, size_bytes + (1 if what == "added" else -1))

    [found] = damage_in(backup)

    ranges = {"cut": (size_bytes - 1, size_bytes), "added": (size_bytes, size_bytes + 1), "missing": (0, size_bytes)}
    assert (found.what, (found.first, found.end)) == (what, ranges[what])


def test_what_is_damaged_is_not_restored_and_nothing_is_begun(used: Path, tmp_path: Path, clock: ManualClock) -> None:
    backup = tmp_path / "backup"
    take(used, backup)
    content = max((backup / "contents").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(content, content.stat().st_size - 1)

    with pytest.raises(SegmentDamaged, match=content.name):
        restored(backup, tmp_path / "restored", clock=clock)

    assert not (tmp_path / "restored").exists()


def test_a_folder_that_is_not_empty_or_in_use_is_not_restored_into(
    used: Path, tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock
) -> None:
    take(used, tmp_path / "backup")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    before = contents(used)

    for folder in (used, tmp_path / "other"):
        with pytest.raises(ConfigurationError, match="not empty"):
            restored(tmp_path / "backup", folder, clock=clock)
    assert contents(used) == before
    engines(used)
    with pytest.raises(ConfigurationError, match="not empty"):
        restored(tmp_path / "backup", used, clock=clock)


def test_a_backup_of_another_format_is_refused_with_the_cure(used: Path, tmp_path: Path, clock: ManualClock) -> None:
    (used / "format").write_text(json.dumps({"format": 1_000, "opened_by": 1_000, "release": "9.0"}))
    with pytest.raises(ConfigurationError, match=r"release 9\.0"):
        take(used, tmp_path / "backup")
    (used / "format").write_text(json.dumps({"format": 0, "opened_by": 0, "release": "0.0"}))
    with pytest.raises(ConfigurationError, match=r"drain it with release 0\.0"):
        take(used, tmp_path / "backup")

    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    ("found", "cure"),
    [
        (FolderFormat(format=1_000, opened_by=1_000, release="9.0"), r"release 9\.0, .*restore the backup"),
        (FolderFormat(format=0, opened_by=0, release="0.0"), r"drain it with release 0\.0"),
    ],
)
def test_a_folder_of_another_format_in_a_backup_is_not_restored(
    used: Path, tmp_path: Path, clock: ManualClock, found: FolderFormat, cure: str
) -> None:
    backup = tmp_path / "backup"
    take(used, backup)
    manifest = msgspec.structs.replace(read_manifest(backup), folder_format=found)
    write_manifest(backup, manifest, DiskStorage())

    with pytest.raises(ConfigurationError, match=cure):
        restored(backup, tmp_path / "restored", clock=clock)

    assert not (tmp_path / "restored").exists()


def test_a_backup_of_a_later_format_is_named_and_not_written_over(
    used: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = tmp_path / "backup"
    take(used, backup)
    write_manifest(backup, msgspec.structs.replace(read_manifest(backup), format=1_000), DiskStorage())

    assert outbox("verify", str(backup)) == 8
    assert "format 1000" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="format 1000"):
        take(used, backup)


@pytest.mark.parametrize("boot", ["this start of the machine", "an earlier one"])
def test_a_torn_tail_in_a_backup_is_cut_as_it_would_have_been(
    folder: Path, tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock, boot: str
) -> None:
    engine = engines(folder, options=EngineOptions(reserve_bytes=RESERVE_BYTES))
    publish(engine, "m1")
    killed = tmp_path / "killed"
    shutil.copytree(folder, killed)
    [segment] = (killed / "messages").glob("*.segment")
    durable_bytes = segment.stat().st_size
    note = segment.with_suffix(".proven")
    end = note.read_text().split()[0]
    publish(engine, "m2", "m3")
    torn = (folder / "messages" / segment.name).read_bytes()
    if boot == "an earlier one":  # a page was lost, and a later one was not
        note.write_text(f"{end} another-start\n")
        torn = torn[: durable_bytes + 20] + bytes(60) + torn[durable_bytes + 80 :]
    segment.write_bytes(torn[:-1])

    take(killed, tmp_path / "backup")
    restored(tmp_path / "backup", tmp_path / "restored", clock=clock)

    assert outbox("log", str(tmp_path / "restored")) == outbox("log", str(killed)) == 1
    again = engines(tmp_path / "restored")
    assert list(pulled(again)) == ["m1"]


@pytest.mark.parametrize("way", ["before", "half", "power"])
def test_a_backup_that_is_killed_at_any_call_leaves_the_one_before(
    used: Path, tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock, way: str
) -> None:
    backup, told = tmp_path / "backup", tmp_path / "told"
    take(used, backup, clock=clock)
    first = check_backup(backup, shows=nothing)[0]
    engine = engines(used)
    publish(engine, "m3")
    engine.close()
    told.touch()
    clock.advance(HOUR_MS)

    killed = tmp_path / "killed"
    killed.mkdir()
    storage = KillingStorage(way=way, on_call=CopyEach(backup, told, into=killed))
    take(used, backup, storage=storage, clock=clock)
    second = check_backup(backup, shows=nothing)[0]

    copies = [path for path in killed.iterdir() if path.is_dir()]
    assert len(copies) > 20
    seen: list[Manifest | None] = []
    for copy in copies:
        manifest, damage = check_backup(copy, shows=nothing)
        assert not damage
        seen.append(manifest)
        take(used, copy, clock=clock)
        assert check_backup(copy, shows=nothing)[1] == []
        assert {path.name for path in (copy / "contents").iterdir()} == {
            path.name for path in (backup / "contents").iterdir()
        }
    assert first in seen
    assert all(one in (first, second) for one in seen)


@pytest.mark.parametrize("way", ["before", "half", "power"])
def test_a_restore_that_is_killed_at_any_call_is_never_opened(
    used: Path, tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock, way: str
) -> None:
    backup, told, killed = tmp_path / "backup", tmp_path / "told", tmp_path / "killed"
    take(used, backup)
    told.touch()
    killed.mkdir()
    storage = KillingStorage(way=way, on_call=CopyEach(tmp_path / "restored", told, into=killed))
    restored(backup, tmp_path / "restored", clock=clock, storage=storage)

    copies = sorted((path for path in killed.iterdir() if path.is_dir()), key=lambda path: int(path.name))
    whole = [copy for copy in copies if (copy / "restored").exists() and not (copy / "restoring").exists()]
    begun = [copy for copy in copies if (copy / "restoring").exists()]
    assert len(begun) > 20
    for copy in begun:
        before = contents(copy)
        with pytest.raises(ConfigurationError, match="restore did not end"):
            Engine.open(copy, clock=clock)
        with pytest.raises(ConfigurationError, match="restore did not end"):
            restored(backup, copy, clock=clock)
        assert contents(copy) == before
    for copy in whole:
        assert list(pulled(engines(copy))) == ["m2"]
    for copy in set(copies) - set(whole) - set(begun):
        assert contents(copy).keys() <= {"lock"}


def test_a_second_backup_copies_what_is_new_and_what_was_lost_of_the_first(
    folder: Path, tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock
) -> None:
    backup = tmp_path / "backup"
    engine = engines(folder)
    for number in range(100):
        publish(engine, f"m{number}")
    engine.close()
    first = take(folder, backup)
    engine = engines(folder)
    publish(engine, "new")
    engine.close()

    second = take(folder, backup)

    assert second.copied_bytes < first.copied_bytes / 2
    assert second.size_bytes > first.size_bytes
    manifest = check_backup(backup, shows=nothing)[0]
    assert manifest is not None
    [lost] = [file for file in manifest.files if file.path == "messages/messages-000000000001.segment"]
    (backup / "contents" / lost.content).unlink()
    third = take(folder, backup)
    assert third.copied_bytes == second.copied_bytes + lost.size_bytes
    assert damage_in(backup) == []
    engine = engines(restored(backup, tmp_path / "restored", clock=clock))
    assert list(pulled(engine)) == [*(f"m{number}" for number in range(100)), "new"]


def test_what_retention_drops_and_publishers_add_while_it_is_copied_changes_nothing(
    folder: Path, tmp_path: Path, clock: ManualClock
) -> None:
    options = EngineOptions(
        segment_bytes=4096, checkpoint_bytes=4096, reserve_bytes=RESERVE_BYTES, retention_bytes=1, retention_ms=1
    )
    engine = Engine.open(folder, clock=clock, options=options)
    assert engine.snapshots is not None
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    for number in range(100):
        publish(engine, f"m{number}")
    begun = set(folder.rglob("*.segment"))

    def change(done: int, _total: int) -> None:
        if done == changed_at[0]:
            return
        changed_at[0] = done
        publish(engine, *(f"new-{done}-{number}" for number in range(40)))
        engine.settler.ack(list(pulled(engine).values()))
        clock.advance(HOUR_MS)
        engine.writer.write_checkpoint()
        engine.retention.drop_outdated()

    changed_at = [0]
    target = BackupTarget(tmp_path / "backup", storage=DiskStorage(), clock=clock, bytes_per_second=None)
    try:
        taken = target.take(folder, ask=engine.snapshots.take, shows=change)
        dropped = begun - set(folder.rglob("*.segment"))
    finally:
        engine.close()

    assert taken.was_running
    assert len(dropped) > 2
    assert damage_in(tmp_path / "backup") == []
    again = Engine.open(restored(tmp_path / "backup", tmp_path / "restored", clock=clock), clock=clock, options=SMALL)
    assert list(pulled(again)) == [f"m{number}" for number in range(100)]
    again.close()


def test_a_segment_of_the_same_name_and_size_of_another_broker_is_copied(
    tmp_path: Path, engines: Callable[..., Engine], clock: ManualClock
) -> None:
    for name in ("one", "two"):
        engine = engines(tmp_path / name)
        for number in range(60):
            publish(engine, f"{name}-{number}")
        engine.close()
        clock.advance(1)
        take(tmp_path / name, tmp_path / "backup")

    engine = engines(restored(tmp_path / "backup", tmp_path / "restored", clock=clock))

    assert list(pulled(engine)) == [f"two-{number}" for number in range(60)]


def test_files_of_backup_and_restored_folder_are_their_owners_alone(
    used: Path, tmp_path: Path, clock: ManualClock
) -> None:
    old = os.umask(0)
    try:
        take(used, tmp_path / "backup")
        restored(tmp_path / "backup", tmp_path / "restored", clock=clock)
    finally:
        os.umask(old)

    for folder in (tmp_path / "backup", tmp_path / "restored"):
        modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
        folders = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*")) if path.is_dir()}
        assert (modes, folders) == ({0o600}, {0o700})


def test_the_rate_is_kept(used: Path, tmp_path: Path) -> None:
    waited: list[int | None] = []

    class PacedClock(ManualClock):
        def wait(self, condition: object, timeout_ms: int | None) -> bool:
            waited.append(timeout_ms)
            self.advance(timeout_ms or 0)
            return False

    target = BackupTarget(tmp_path / "backup", storage=DiskStorage(), clock=PacedClock(), bytes_per_second=1_000)
    taken = target.take(used, ask=nothing, shows=nothing)

    assert sum(one or 0 for one in waited) == taken.copied_bytes


def test_a_target_that_holds_other_things_or_is_inside_the_folder_is_refused(used: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()

    for target, why in ((tmp_path / "other", "other things"), (used / "backup", "inside one another")):
        with pytest.raises(ConfigurationError, match=why):
            take(used, target)
    with pytest.raises(ConfigurationError, match="no data folder"):
        take(tmp_path / "other", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_the_commands_take_verify_and_restore_a_backup(
    used: Path, tmp_path: Path, engines: Callable[..., Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    backup, to = str(tmp_path / "backup"), str(tmp_path / "restored")

    assert outbox("backup", str(used), "--to", backup, "--rate", "max") == 0
    assert "bodies of messages are in it" in capsys.readouterr().out
    assert outbox("verify", backup) == 0
    assert capsys.readouterr().out.startswith("whole: ")
    assert outbox("verify", backup, "--json") == 0
    assert json.loads(capsys.readouterr().out)["damage"] == []
    assert outbox("restore", backup, "--to", to) == 0
    assert "are delivered again" in capsys.readouterr().out
    assert outbox("restore", backup, "--to", to) == 2
    assert "not empty" in capsys.readouterr().err
    assert outbox("folder", to) == 0
    assert list(pulled(engines(Path(to)))) == ["m2"]


def test_verify_says_by_its_status_what_is_wrong(
    used: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = tmp_path / "backup"
    take(used, backup)
    shutil.copytree(backup, tmp_path / "copy")
    with (backup / MANIFEST).open("ab") as file:
        file.write(b"x")

    assert outbox("verify", str(backup)) == 4
    assert MANIFEST in capsys.readouterr().out
    assert outbox("verify", str(backup), "--json") == 4
    assert json.loads(capsys.readouterr().out)["damage"][0]["file"] == MANIFEST
    assert outbox("verify", str(tmp_path)) == 8
    assert "is no backup" in capsys.readouterr().err
    assert outbox("verify", str(tmp_path / "copy"), "--progress", "json") == 0
    shown = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert shown[-1]["done"] == shown[-1]["total"] > 0
