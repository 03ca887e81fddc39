"""A cordon: a broker's owner takes no new messages, for as long as there is the annotation `cordoned` (annotations.py).

It is there or not, whatever it holds: one that a power failure cut still keeps the cordon. What it holds is for people:
since when, and why.
"""

from __future__ import annotations

import threading
from typing import Final

import msgspec

from outbox_broker.log.annotations import Annotations
from outbox_core.common.clock import Clock
from outbox_core.common.errors import DECODE_ERRORS, BrokerCordoned
from outbox_core.protocol.wire import CordonNote
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

NAME: Final = "cordoned"
RETRY_AFTER_MS: Final = 10_000
"""A cordon is for maintenance: publishers need not ask every second."""
_decode = msgspec.json.Decoder(CordonNote).decode


class Cordon:
    """The cordon of one broker. Thread-safe."""

    def __init__(self, annotations: Annotations, *, clock: Clock) -> None:
        self._annotations = annotations
        self._clock = clock
        self._changing = threading.Lock()
        self.lock = threading.RLock()
        """Held while a batch is stored, from the check on: once a cordon is set, no batch is on its way."""
        self._note: CordonNote | None = None

    @property
    def note(self) -> CordonNote | None:
        """Since when there is a cordon, and why; None: there is none."""
        return self._note

    def load(self) -> None:
        """Find out whether there is a cordon: the owner calls this before it takes anything. Raises StorageFailed."""
        data = self._annotations.get(NAME)
        if data is None:
            return
        try:
            self._note = _decode(data)
        except DECODE_ERRORS:
            self._note = CordonNote(since_ms=0, reason="its note cannot be read")

    def refuse(self) -> None:
        """Raise BrokerCordoned if there is a cordon. Under `lock`."""
        if self._note is not None:
            why = f" ({self._note.reason})" if self._note.reason else ""
            raise BrokerCordoned(
                f"the broker is cordoned{why}: it takes no new messages until it is uncordoned; nothing was stored",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def begin(self, *, reason: str = "") -> None:
        """Take no new messages from now on, nor does an owner behind this one; a second one changes the reason alone,
        if it has one.

        Raises StorageFailed: then what was before holds until the broker is opened again.
        """
        with self._changing:
            before = self._note
            if before is None:
                note = CordonNote(since_ms=self._clock.now_ms(), reason=reason)
            else:
                note = CordonNote(since_ms=before.since_ms, reason=reason or before.reason)
            self._annotations.set(NAME, msgspec.json.encode(note))
            with self.lock:
                self._note = note
        logger.warning("broker_cordoned", extra={"reason": note.reason})

    def end(self) -> None:
        """Take messages again; idempotent. Raises StorageFailed: then there is a cordon still."""
        with self._changing:
            self._annotations.set(NAME, None)
            with self.lock:
                was_cordoned, self._note = self._note is not None, None
        if was_cordoned:
            logger.warning("broker_uncordoned")
