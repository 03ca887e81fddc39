"""The slots of a topic in Redis: their keys, and the calls of the scripts that move messages between these."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from broker_adapter.redis.script_sender import Argument, Script, ScriptCall

MOVES_MAX: Final = 500
"""In one call of a script, beside which nothing else runs on the server."""
_FOLDER: Final = Path(__file__).with_name("lua")
_SHARED: Final = (_FOLDER / "slot.lua").read_text(encoding="utf-8")
_SLOT_KEYS: Final = ("meta", "store", "log", "body", "ids", "canceled", "acks")
_GROUP_KEYS: Final = ("config", "retry", "prepare", "dead", "state")
GROUP_CONFIG: Final = len(_SLOT_KEYS)
"""The place of the group's settings among the keys of a call about a group."""


def _script(name: str) -> Script:
    header, _, code = (_FOLDER / f"{name}.lua").read_text(encoding="utf-8").partition("\n")
    return Script(f"{header}\n{_SHARED}\n{code}")


ADD: Final = _script("add")
FIRE: Final = _script("fire")
TAKE: Final = _script("take")
ACK: Final = _script("ack")
NACK: Final = _script("nack")
EXPIRE: Final = _script("expire")
EXTEND: Final = _script("extend")
CANCEL: Final = _script("cancel")
REDRIVE: Final = _script("redrive")
DECLARE: Final = _script("declare")
PAUSE: Final = _script("pause")
LIST_DEAD: Final = _script("list_dead")
FIGURES: Final = _script("figures")
GROUPS: Final = _script("groups")
DROP_GROUP: Final = _script("drop_group")
UNLINK: Final = Script((_FOLDER / "unlink.lua").read_text(encoding="utf-8"))
UNREGISTER: Final = Script((_FOLDER / "unregister.lua").read_text(encoding="utf-8"))
REGISTER: Final = Script((_FOLDER / "register.lua").read_text(encoding="utf-8"))
_NOT_REPEATABLE: Final = frozenset({TAKE, NACK, REDRIVE})
"""What would be done twice, or answered wrongly, if the connection broke after it was done the first time."""


def slot_of(message_id: str, slots: int) -> int:
    """The slot of an id: its CRC32, so that publish, settle and cancel find the same one."""
    return zlib.crc32(message_id.encode()) & (slots - 1)


class SlotScripts:
    """Calls of scripts under a prefix. All keys of one slot have one hash tag, so they are on one node of a cluster."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}timers:"

    @property
    def topics_key(self) -> str:
        """The hash of all topics, each with its number of slots."""
        return f"{self._prefix}topics"

    def wake_channel(self, topic: str) -> str:
        """The channel that tells consumers of a topic that a message may be delivered sooner than they know."""
        return f"{self._prefix}wake:{topic}"

    def of_slot(self, script: Script, topic: str, slot: int, arguments: Sequence[Argument] = ()) -> ScriptCall:
        """The call of a script about a slot."""
        return _call(script, self._slot_keys(topic, slot), arguments)

    def of_group(
        self, script: Script, topic: str, slot: int, group: str, arguments: Sequence[Argument] = ()
    ) -> ScriptCall:
        """The call of a script about a slot and a consumer group."""
        prefix = self._slot_prefix(topic, slot)
        group_keys = [f"{prefix}:group:{group}:{name}" for name in _GROUP_KEYS]
        return _call(script, [*self._slot_keys(topic, slot), *group_keys], arguments)

    def _slot_keys(self, topic: str, slot: int) -> list[str]:
        return [f"{self._slot_prefix(topic, slot)}:{name}" for name in _SLOT_KEYS]

    def _slot_prefix(self, topic: str, slot: int) -> str:
        return f"{self._prefix}{{{topic}:{slot}}}"


def _call(script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> ScriptCall:
    is_repeatable = script not in _NOT_REPEATABLE
    return ScriptCall(script=script, keys=keys, arguments=arguments, is_repeatable=is_repeatable)
