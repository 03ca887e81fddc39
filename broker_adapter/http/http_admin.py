"""BrokerAdmin over the HTTP protocol: groups, figures, dead letters. An unknown topic or group is BrokerRefused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from broker_adapter.http.http_transport import RequestSender
from outbox_core.common.errors import BrokerRefused, InvalidMessage
from outbox_core.messages import limits
from outbox_core.messages.message import DeadLetter, GroupConfig, check_group, check_topic
from outbox_core.protocol import wire, wire_conversion, wire_dead

_TOPICS_PAGE: Final = 1_000
_PAGES_MAX: Final = 1_000


class HttpAdmin:
    """The operator's half of a broker, over the same connections."""

    def __init__(self, connection: RequestSender) -> None:
        self._connection = connection

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Make a group, or change its settings."""
        settings = wire_conversion.group_settings_of(config)
        self._connection.send("PUT", _path(topic, group), wire.NoAnswer, body=settings, repeatable=True)

    def group_config(self, topic: str, group: str) -> GroupConfig | None:
        """The settings of a group that is there."""
        try:
            answer = self._connection.send("GET", _path(topic, group), wire.GroupAnswer, repeatable=True)
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
            page = self._connection.send("GET", "/v1/topics", wire.TopicsAnswer, query=query, repeatable=True)
            names += page.topics
            if page.next is None:
                break
            query["after"] = page.next
        return names

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        """Counts of a topic or of a group."""
        if group is None:
            path = f"/v1/topics/{check_topic(topic)}"
            return self._connection.send("GET", path, wire.TopicAnswer, repeatable=True).figures
        return self._connection.send("GET", _path(topic, group), wire.GroupAnswer, repeatable=True).figures

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete a group. Raises InUse, unless forced."""
        self._connection.send("DELETE", _path(topic, group), wire.NoAnswer, query=_forced(force=force))

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic. Raises InUse, unless forced."""
        path = f"/v1/topics/{check_topic(topic)}"
        self._connection.send("DELETE", path, wire.NoAnswer, query=_forced(force=force))

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move a group to a time or an offset."""
        body = wire.SeekRequest(to_ms=to_ms, to_offset=to_offset)
        self._connection.send("POST", f"{_path(topic, group)}/seek", wire.NoAnswer, body=body)

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Pause or resume deliveries to a group."""
        verb = "pause" if paused else "resume"
        self._connection.send("POST", f"{_path(topic, group)}/{verb}", wire.NoAnswer, repeatable=True)

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """One page of dead letters, and the cursor of the next one; up to 1,000 a page."""
        if limit < 1:
            raise InvalidMessage("limit must be at least 1")
        query = {"limit": str(min(limit, 1_000))} | ({"after": after} if after is not None else {})
        path = f"{_path(topic, group)}/dead"
        page: wire_dead.PackedDeadAnswer | wire_dead.DeadAnswer
        if self._connection.packed:
            page = self._connection.send("GET", path, wire_dead.PackedDeadAnswer, query=query, repeatable=True)
        else:
            page = self._connection.send("GET", path, wire_dead.DeadAnswer, query=query, repeatable=True)
        return [_letter(message) for message in page.dead], page.next

    def redrive(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, per_second: int | None = None
    ) -> int:
        """Send dead letters again; returns how many."""
        path = f"{_path(topic, group)}/dead/redrive"
        if ids is None:
            body = wire_dead.RedriveRequest(all=True, per_second=per_second)
            return self._connection.send("POST", path, wire_dead.RedriveAnswer, body=body).redriven
        redriven = 0
        for start in range(0, len(ids), limits.BATCH_MESSAGES_MAX):
            part = list(ids[start : start + limits.BATCH_MESSAGES_MAX])
            body = wire_dead.RedriveRequest(ids=part, per_second=per_second)
            redriven += self._connection.send("POST", path, wire_dead.RedriveAnswer, body=body).redriven
        return redriven


def _forced(*, force: bool) -> dict[str, str] | None:
    return {"force": "true"} if force else None


def _path(topic: str, group: str) -> str:
    return f"/v1/topics/{check_topic(topic)}/groups/{check_group(group)}"


def _letter(message: wire_dead.DeadMessage) -> DeadLetter:
    return DeadLetter(
        id=message.id,
        topic=message.topic,
        group=message.group,
        attempts=message.attempts,
        reason=message.reason,
        dead_at_ms=message.dead_at_ms,
        history=tuple((entry.reason, entry.attempts) for entry in message.history),
        key=message.key,
        headers=message.headers or {},
        body=b"" if message.body is None else wire_conversion.body_bytes(message.body, message.encoding),
    )
