"""`outbox broker log`: what it says of whole, torn and damaged logs, also while their owner writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from typer.testing import CliRunner

from outbox_broker.engine.engine import Engine
from outbox_broker.server.cli import app
from outbox_core.journal.block import BLOCK_HEAD_BYTES, SEGMENT_HEAD_BYTES
from outbox_core.messages.message import Message
from tests.outbox_broker.delay.conftest import DAY_MS, NOW_MS, Opened, flush, put, settle, timed

STRIDE = 5
CLEAN, TORN_TAIL, DAMAGED, UNREADABLE = 0, 1, 4, 8


def said(folder: Path, *options: str) -> tuple[int, str]:
    """The exit status, and what is printed."""
    result = CliRunner().invoke(app, ["log", str(folder), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def stores(folder: Path) -> Iterator[dict[str, Any]]:
    for line in said(folder, "--json")[1].splitlines():
        yield json.loads(line)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder of a schedule that was closed: two checkpoints, buckets, a piece of the id index, changes."""
    opened = Opened(tmp_path / "delay")
    schedule = opened.open()
    for number in range(2):
        put(schedule, NOW_MS, *(timed(f"m{number}-{at}", NOW_MS + DAY_MS) for at in range(3)))
        flush(schedule, NOW_MS)
        settle(schedule, NOW_MS)
    put(schedule, NOW_MS, timed("pending", NOW_MS + DAY_MS))
    schedule.cancel(["m0-1", "m1-1"], now_ms=NOW_MS)
    schedule.close()
    opened.drop()
    return opened.folder


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_whole_log_is_listed_with_its_segments_kinds_and_checkpoints_and_nothing_is_written(made: Path) -> None:
    before = bytes_in(made)

    status, text = said(made)
    [store] = stores(made)

    assert status == CLEAN
    assert bytes_in(made) == before
    [log] = store["logs"]
    assert [checkpoint["is_whole"] for checkpoint in log["checkpoints"]] == [True] * len(log["checkpoints"])
    assert log["replayed_from"] == log["checkpoints"][-1]["captured"]
    assert [segment["first"] for segment in log["segments"][1:]] == [segment["end"] for segment in log["segments"][:-1]]
    kinds = {kind for segment in log["segments"] for kind in segment["blocks"]}
    assert kinds == {"checkpoint", "change", "scheduled"}
    assert {segment["kind"] for segment in store["others"]} == {"bucket", "id_index"}
    assert all(segment["name"] in text for segment in log["segments"])
    assert f"{log['replayed_from']:,} to {log['end']:,} replayed by an opening" in text


@pytest.mark.parametrize("first", range(STRIDE))
def test_a_flipped_byte_shows_wherever_it_is(made: Path, first: int) -> None:
    for path in sorted(made.glob("*.segment")):
        data = path.read_bytes()
        for position in range(first, len(data), STRIDE * 3):
            path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            status, text = said(made)
            assert status & (DAMAGED | UNREADABLE), (path.name, position, text)
            assert path.stem in text
        path.write_bytes(data)


def test_a_tail_that_was_cut_short_is_told_apart_from_damage(made: Path) -> None:
    newest = max(made.glob("log-*.segment"))
    data = newest.read_bytes()
    note = newest.with_suffix(".proven")
    _, boot = note.read_text(encoding="ascii").split()
    note.write_text(f"0 {boot}\n", encoding="ascii")  # as a kill leaves it

    newest.write_bytes(data + data[SEGMENT_HEAD_BYTES : SEGMENT_HEAD_BYTES + BLOCK_HEAD_BYTES + 5])
    status, text = said(made)

    assert status == TORN_TAIL
    assert f"{newest.stem}: torn tail of {BLOCK_HEAD_BYTES + 5} bytes" in text
    newest.write_bytes(data[:-1])
    assert said(made)[0] == TORN_TAIL
    Opened(made).open().close()
    assert said(made)[0] == CLEAN


def test_an_opening_that_would_refuse_a_log_is_told_with_its_cure(made: Path) -> None:
    oldest = min(made.glob("log-*.segment"))
    oldest.write_bytes(oldest.read_bytes()[:-30])

    status, text = said(made)

    assert status == DAMAGED
    assert "it ends before the next one begins" in text
    newest = max(made.glob("log-*.segment"))
    newest.unlink()
    assert f"AN OPENING REFUSES IT: {newest.stem} is missing" in said(made)[1]


def test_what_no_version_of_this_can_read_is_named(made: Path, tmp_path: Path) -> None:
    newest = max(made.glob("log-*.segment"))
    data = newest.read_bytes()
    head = data[:8] + b"\x02\x00" + data[10 : SEGMENT_HEAD_BYTES - 4]
    newest.write_bytes(head + google_crc32c.value(head).to_bytes(4, "little") + data[SEGMENT_HEAD_BYTES:])

    status, text = said(made)

    assert status == UNREADABLE
    assert f"CANNOT READ {newest.stem}" in text
    assert "upgrade" in text
    empty = tmp_path / "empty"
    empty.mkdir()
    assert said(empty) == (
        UNREADABLE,
        f"{empty} holds no log: name the data folder of a broker, or of a delay service\n",
    )
    assert said(tmp_path / "gone")[0] == UNREADABLE


def test_the_data_folder_of_a_broker_is_listed_whole_also_after_a_flip_in_a_message(
    open_engine: Callable[..., Engine], folder: Path
) -> None:
    engine = open_engine()
    engine.publisher.publish([Message(id=f"m{number}", topic="t", body=b"body-%d" % number) for number in range(5)])
    assert said(folder)[0] == CLEAN
    names = {store["store"] for store in stores(folder)}
    assert {"messages", "actions", "schedule"} <= names
    engine.close()
    assert said(folder)[0] == CLEAN
    [messages] = (folder / "messages").glob("*.segment")
    data = bytearray(messages.read_bytes())
    data[data.index(b"body-2")] ^= 1
    messages.write_bytes(data)

    status, text = said(folder)

    assert status == DAMAGED
    assert f"messages/{messages.stem}: DAMAGED at" in text


def test_while_its_owner_writes_rolls_and_drops_a_log_is_never_told_to_be_damaged(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "delay")
    schedule = opened.open(memory_messages_max=20)
    rounds, stopped = threading.Semaphore(0), threading.Event()

    def write() -> None:
        number = 0
        while not stopped.is_set():
            put(schedule, NOW_MS, *(timed(f"m{number}-{at}", NOW_MS + DAY_MS) for at in range(20)))
            settle(schedule, NOW_MS)
            number += 1
            rounds.release()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(10):
            assert rounds.acquire(timeout=60)
            status, text = said(opened.folder)
            assert status == CLEAN, text
    finally:
        stopped.set()
        writer.join()
        opened.drop()
