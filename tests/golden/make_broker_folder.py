"""Writes broker.tar.xz, a data folder of the broker as today's code makes it.

Run as `python -m tests.golden.make_broker_folder`.

Only for a format that is changed on purpose before the first release. Afterwards the archive stays as it is, and a
new format gets an archive of its own beside it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import Delivery, GroupConfig, Message

ARCHIVE: Final = Path(__file__).parent / "broker.tar.xz"
BEGUN_MS: Final = 1_800_000_000_000
DAY_MS: Final = 24 * 3_600_000
TOPIC, DELETED = "orders", "deleted"
BILLING, ORDERED, AUDIT, GONE = "billing", "ordered", "audit", "gone"


def message(message_id: str, *, topic: str = TOPIC, due_ms: int | None = None) -> Message:
    """A message whose key, header and body follow from its id."""
    key, headers = f"k{len(message_id)}", {"type": "paid", "id": message_id}
    body = message_id.encode() * 20
    return Message(
        id=message_id, topic=topic, key=key, headers=headers, body=body, deliver_at_ms=due_ms, created_at_ms=BEGUN_MS
    )


def publish(engine: Engine, *messages: Message) -> None:
    """Publish messages that are new."""
    assert [one.status for one in engine.publisher.publish(messages)] == ["stored"] * len(messages)


def fill(engine: Engine, clock: ManualClock) -> None:
    """What a log of the broker can say, once at least, but for damage and full disks. Ends ten seconds later."""
    _schedule(engine, clock)
    engine.admin.declare_group(
        TOPIC, BILLING, GroupConfig(max_attempts=2, backoff_initial_ms=DAY_MS, backoff_max_ms=DAY_MS)
    )
    engine.admin.declare_group(TOPIC, ORDERED, GroupConfig(ordered=True, filter="type = 'paid'"))
    for first in range(0, 60, 10):
        publish(engine, *(message(f"m{number}") for number in range(first, first + 10)))
    _consume(engine)
    _delete(engine)
    assert len(_audit(engine)) == 60
    clock.advance(10_000)
    assert _audit(engine) == ["soon"]
    assert [one.id for one in engine.puller.pull(TOPIC, ORDERED, max_messages=1)] == ["m0"]


def _schedule(engine: Engine, clock: ManualClock) -> None:
    """s0 to s5 are due in a day, of which s1 is canceled before and s2 after they are in a bucket; `soon` falls due."""
    publish(engine, *(message(f"s{number}", due_ms=BEGUN_MS + DAY_MS) for number in range(5)))
    assert engine.publisher.cancel(["s1", "early"]) == ["canceled", "unknown"]
    engine.context.schedule.make_room(clock.now_ms(), fill=0)
    assert engine.publisher.cancel(["s2"]) == ["canceled"]
    publish(engine, message("s5", due_ms=BEGUN_MS + DAY_MS), message("soon", due_ms=BEGUN_MS + 10_000))


def _consume(engine: Engine) -> None:
    """Of m0 to m11: even ones below 8 acked, m1 dead by a nack and redriven, m3 and m5 dead; m7 extended, the others
    in flight.
    """
    found = {one.id: one for one in engine.puller.pull(TOPIC, BILLING, max_messages=12, invisible_ms=30_000)}
    engine.settler.ack(_receipts(found, "m0", "m2", "m4", "m6"))
    engine.settler.nack(_receipts(found, "m1", "m3", "m5"), delay_ms=0, reason="refused")
    again = {one.id: one for one in engine.puller.pull(TOPIC, BILLING, max_messages=6)}  # half of it are fresh ones
    engine.settler.nack(_receipts(again, "m1", "m3", "m5"), reason="refused again")
    engine.settler.nack(_receipts(again, "m12", "m13", "m14"), delay_ms=0, counts=False)
    assert engine.admin.redrive(TOPIC, BILLING, ids=["m1"]) == 1
    engine.settler.nack(_receipts(found, "m8"), reason="later")
    engine.settler.extend(_receipts(found, "m7"), invisible_ms=3_600_000)
    engine.admin.pause(TOPIC, BILLING, paused=True)
    engine.admin.pause(TOPIC, BILLING, paused=False)


def _audit(engine: Engine) -> list[str]:
    """Ack all that is ready, each by itself: so that the action log comes to a checkpoint."""
    ids: list[str] = []
    while found := engine.puller.pull(TOPIC, AUDIT, max_messages=1):
        ids += [one.id for one in found]
        assert engine.settler.ack([one.receipt for one in found]) == ["acked"]
    return ids


def _receipts(deliveries: dict[str, Delivery], *ids: str) -> list[str]:
    return [deliveries[one].receipt for one in ids]


def _delete(engine: Engine) -> None:
    """A group; and a topic, of which another one is made."""
    engine.admin.declare_group(TOPIC, GONE, GroupConfig())
    engine.admin.seek(TOPIC, GONE, to_offset=5)
    engine.deletion.delete_group(TOPIC, GONE)
    publish(engine, message("d0", topic=DELETED), message("d1", topic=DELETED, due_ms=BEGUN_MS + DAY_MS))
    engine.deletion.delete_topic(DELETED, force=True)
    publish(engine, message("d2", topic=DELETED))


def main() -> None:
    """Make the folder, and put it into the archive: without the lock and the reserve, which no reader needs."""
    with TemporaryDirectory() as temporary:
        folder, clock = Path(temporary) / "broker", ManualClock(BEGUN_MS)
        engine = Engine.open(folder, clock=clock, options=EngineOptions(segment_bytes=4096))
        try:
            fill(engine, clock)
        finally:
            engine.close()
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix != ".lock" and path.name not in {"lock", "reserve"}:
                    archive.add(path, arcname=path.relative_to(folder.parent), filter=anonymous)


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without whose it is and when it was made."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
