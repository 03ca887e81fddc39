"""BrokerAdmin over the HTTP protocol: groups, figures, dead letters. An unknown topic or group is BrokerRefused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from broker_adapter.http.http_transport import HttpTransport
from broker_adapter.http.request_codec import Request, group_path, no_result, slices, whole_result
from outbox_core.common.errors import BrokerRefused, InvalidMessage
from outbox_core.messages.message import DeadLetter, GroupConfig, check_topic
from outbox_core.protocol import wire, wire_conversion

_TOPICS_PAGE: Final = 1_000
_PAGES_MAX: Final = 1_000

Shape = TypeVar("Shape", bound=msgspec.Struct)


class HttpAdmin:
    """The operator's half of a broker, over the same connections."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Make a group, or change its settings."""
        settings = wire_conversion.group_settings_of(config)
        self._do("PUT", group_path(topic, group), body=settings, repeatable=True)

    def group_config(self, topic: str, group: str) -> GroupConfig | None:
        """The settings of a group that is there."""
        try:
            answer = self._group(topic, group)
        except BrokerRefused as error:
            if type(error) is not BrokerRefused:  # as NotAuthorized: whether it is there is not known
                raise
            return None
        return wire_conversion.group_config_of(answer.settings)

    def topics(self) -> list[str]:
        """The names of all topics that the token covers, sorted."""
        names: list[str] = []
        query = {"limit": str(_TOPICS_PAGE)}
        for _ in range(_PAGES_MAX):
            page = self._get("/v1/topics", wire.TopicsAnswer, query=query)
            names += page.topics
            if page.next is None:
                break
            query["after"] = page.next
        return names

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        """Counts of a topic or of a group."""
        if group is None:
            return self._get(f"/v1/topics/{check_topic(topic)}", wire.TopicAnswer).figures
        return self._group(topic, group).figures

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete a group. Raises InUse, unless forced."""
        self._do("DELETE", group_path(topic, group), query=_forced(force=force))

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic. Raises InUse, unless forced."""
        self._do("DELETE", f"/v1/topics/{check_topic(topic)}", query=_forced(force=force))

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move a group to a time or an offset."""
        self._do("POST", f"{group_path(topic, group)}/seek", body=wire.SeekRequest(to_ms=to_ms, to_offset=to_offset))

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Pause or resume deliveries to a group."""
        self._do("POST", f"{group_path(topic, group)}/{'pause' if paused else 'resume'}", repeatable=True)

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """One page of dead letters, and the cursor of the next one; up to 1,000 a page."""
        if limit < 1:
            raise InvalidMessage("limit must be at least 1")
        query = {"limit": str(min(limit, 1_000))} | ({"after": after} if after is not None else {})
        path = f"{group_path(topic, group)}/dead"
        if self._transport.codec.packed:
            packed_page = self._get(path, wire.PackedDeadAnswer, query=query)
            return packed_page.dead, packed_page.next
        page = self._get(path, wire.DeadAnswer, query=query)
        return [wire_conversion.dead_letter_of(letter) for letter in page.dead], page.next

    def redrive(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, per_second: int | None = None
    ) -> int:
        """Send dead letters again; returns how many."""
        path = f"{group_path(topic, group)}/dead/redrive"
        if ids is None:
            return self._redrive(path, wire.RedriveRequest(all=True, per_second=per_second))
        parts = [wire.RedriveRequest(ids=list(part), per_second=per_second) for part in slices(ids)]
        return sum(self._redrive(path, part) for part in parts)

    def _group(self, topic: str, group: str) -> wire.GroupAnswer:
        return self._get(group_path(topic, group), wire.GroupAnswer)

    def _get(self, path: str, shape: type[Shape], *, query: Mapping[str, str] | None = None) -> Shape:
        request = Request(method="GET", path=path, shape=shape, result=whole_result, query=query, repeatable=True)
        return self._transport.send(request)

    def _do(
        self,
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, str] | None = None,
        repeatable: bool = False,
    ) -> None:
        request = Request(
            method=method, path=path, shape=wire.NoAnswer, result=no_result, body=body, query=query,
            repeatable=repeatable,
        )  # fmt: skip
        self._transport.send(request)

    def _redrive(self, path: str, body: wire.RedriveRequest) -> int:
        """Not repeatable: what was sent again may have died again meanwhile."""
        request = Request(method="POST", path=path, shape=wire.RedriveAnswer, result=whole_result, body=body)
        return self._transport.send(request).redriven


def _forced(*, force: bool) -> dict[str, str] | None:
    return {"force": "true"} if force else None
