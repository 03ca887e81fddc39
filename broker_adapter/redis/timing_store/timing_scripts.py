"""Keys, scripts and members of the timing store: how timers lie in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker_adapter.redis.script_sender import Argument, Script, ScriptCall
from outbox_core.messages.timing_port import TimedRow

_FOLDER: Final = Path(__file__).with_name("lua")


def _script(name: str) -> Script:
    return Script((_FOLDER / f"{name}.lua").read_text(encoding="utf-8"))


ADD: Final = _script("add")
TAKE: Final = _script("take")
SETTLE: Final = _script("settle")
MARK: Final = _script("mark")
FIGURES: Final = _script("figures")
ANNOUNCE: Final = _script("announce")
LIST: Final = _script("list")
REMOVE: Final = _script("remove")


@dataclass(frozen=True, slots=True)
class TimingKeys:
    """The keys of one source under a prefix. Those of one slot have one hash tag, so they are on one node."""

    prefix: str
    source: str

    @property
    def sources(self) -> str:
        """The hash of all sources, each with its number of slots."""
        return f"{self.prefix}timing:sources"

    @property
    def channel(self) -> str:
        """The channel of wake-ups."""
        return f"{self.prefix}timing:{self.source}:wake"

    def due(self, slot: int) -> str:
        """The sorted set of a slot."""
        return f"{self._slot_prefix(slot)}:due"

    def generation(self, slot: int) -> str:
        """The key that says whether a slot has all timers."""
        return f"{self._slot_prefix(slot)}:generation"

    def server(self, slot: int) -> str:
        """The key that says for some seconds who serves a slot."""
        return f"{self._slot_prefix(slot)}:server"

    def of_slot(self, slot: int) -> list[str]:
        """All keys of a slot."""
        return [self.due(slot), self.generation(slot), self.server(slot)]

    def call_on_due(self, script: Script, slot: int, arguments: Sequence[Argument]) -> ScriptCall:
        """The call of a script about the sorted set alone. A repetition does no harm."""
        return ScriptCall(script=script, keys=[self.due(slot)], arguments=arguments)

    def call_on_slot(self, script: Script, slot: int, arguments: Sequence[Argument]) -> ScriptCall:
        """The call of a script about the whole slot. A take that is repeated leaves the first one's rows leased."""
        return ScriptCall(script=script, keys=[self.due(slot), self.generation(slot)], arguments=arguments)

    def call_on_generation(self, slot: int, arguments: Sequence[Argument]) -> ScriptCall:
        """The call that sets a generation."""
        return ScriptCall(script=MARK, keys=[self.generation(slot)], arguments=arguments)

    def call_for_figures(self, slot: int) -> ScriptCall:
        """The call that counts what a slot has."""
        return ScriptCall(script=FIGURES, keys=self.of_slot(slot), arguments=[])

    def call_to_announce(self, slot: int, arguments: Sequence[Argument]) -> ScriptCall:
        """The call that says who serves a slot. A repetition does no harm."""
        return ScriptCall(script=ANNOUNCE, keys=[self.server(slot)], arguments=arguments)

    def _slot_prefix(self, slot: int) -> str:
        return f"{self.prefix}timing:{{{self.source}:{slot}}}"


def member_of(row: TimedRow) -> str:
    """Returns a row's name in a sorted set."""
    return f"{row.table}/{row.id}"


def row_of(member: bytes) -> TimedRow:
    """The row that a member names."""
    table, _, row_id = member.decode("utf-8", "replace").partition("/")
    return TimedRow(table, row_id)
