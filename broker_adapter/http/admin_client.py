"""The one client of a broker's administration: the commands of `outbox broker`, and `admin` of a Broker over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import requests

from broker_adapter.http.errors import of_problem, problem_kind
from broker_adapter.http.request_codec import group_path, slices
from broker_adapter.publishing.admin_http import AnswerTooLong, ask
from outbox_core.common.errors import (
    DECODE_ERRORS,
    BrokerRefused,
    BrokerUnavailable,
    ConfigurationError,
    InvalidMessage,
)
from outbox_core.messages.broadcast_port import Start, TopicRead
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.limits import BATCH_MESSAGES_MAX, PULL_MESSAGES_MAX
from outbox_core.messages.message import (
    DeadCount,
    DeadEdit,
    DeadFilter,
    DeadLetter,
    EditPage,
    EditResult,
    GroupConfig,
    Message,
    PublishResult,
    check_message_id,
    check_recurring,
    check_topic,
    check_why,
)
from outbox_core.messages.recurring_message import RecurringMessage
from outbox_core.protocol import wire
from outbox_core.protocol.decoder_cache import json_decoder
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import JSON_TYPE
from outbox_core.protocol.wire_conversion import (
    dead_letter_of,
    group_config_of,
    group_settings_of,
    json_edit,
    json_letter_edit,
    json_message,
    recurring_settings_of,
    topic_read_of,
)
from outbox_core.runtime.config_files import read_secret
from outbox_core.runtime.http_broker_url import HttpBrokerUrl, check_token

ANSWER_BYTES_MAX: Final = 128 * 1024 * 1024
"""More than a broker's page of dead letters, or of a read, takes in JSON."""
DEAD_PAGE_MAX: Final = 1_000
NO_URL: Final = "a broker's URL looks like http://127.0.0.1:7788"
_WRAPPED_MAX: Final = 8
_TOPICS_PAGE: Final = 1_000
_PAGES_MAX: Final = 1_000
_SHOWN_BYTES: Final = 200
_EDITS_BYTES: Final = 1024 * 1024
"""A request with edits has about so much, or one edit."""
_REASON_CHARS_MAX: Final = 500
Shape = TypeVar("Shape")


class AdminClient:
    """The administration of a broker at a URL, a method an operation, as BrokerAdmin and TopicAdmin describe them; and
    its schedule, its recurring messages, its topics' messages, and what a delay service's target refused. Thread-safe.

    Each request has a connection of its own, and is sent once. Errors: BrokerUnavailable (no answer), BrokerRefused, in
    the broker's own words; NotAuthorized, InUse, NotSupported are kinds of it.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_ms: int = 10_000,
        token: str | None = None,
        token_file: Path | None = None,
        ca_file: Path | str | None = None,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        """`timeout_ms` is for all of a request, to the last byte of its answer, and a second more for each MiB of it.
        `token`, `token_file` and `ca_file` win over those of the URL.
        """
        self._url = url
        self._timeout_ms = timeout_ms
        self._token = token
        self._token_file = token_file
        self._ca_file = None if ca_file is None else str(ca_file)
        self._answer_bytes_max = answer_bytes_max
        self._closed = False

    def close(self) -> None:
        """Refuse what is asked from now on; idempotent."""
        self._closed = True

    @property
    def shown_url(self) -> str:
        """The URL without user, password and query, for messages."""
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def request(self, method: str, path: str, body: msgspec.Struct | None = None) -> tuple[int, bytes]:
        """Send a request; returns status and body of the answer. Raises BrokerUnavailable if there is none, and
        BrokerRefused if it is too long.
        """
        if self._closed:
            raise ConfigurationError("this broker was closed; connect again")
        of_url = HttpBrokerUrl.parse(self._url)
        target = _without_login(of_url.address) + path
        ca_file = of_url.ca_file if self._ca_file is None else self._ca_file
        if ca_file is not None and target.startswith("https:"):
            _check_certificates(ca_file)
        token = of_url.token if self._token is None else self._token
        if self._token_file is not None:
            token = read_secret(self._token_file, what="token")
        check_token(token)
        headers = {"accept": JSON_TYPE} | ({} if token is None else {"authorization": f"Bearer {token}"})
        try:
            response = ask(
                method,
                target,
                timeout_s=self._timeout_ms / 1000,
                answer_bytes_max=self._answer_bytes_max,
                paying_bytes_max=self._answer_bytes_max,  # what a slow network brings steadily is no trickle
                headers=headers,
                json=None if body is None else msgspec.to_builtins(body),
                ca_file=ca_file,
            )
        except AnswerTooLong as error:
            raise BrokerRefused(f"{error}: ask for less at once") from error
        except requests.RequestException as error:
            raise BrokerUnavailable(f"no broker answers at {self.shown_url}: {_reason(error)}") from error
        return response.status_code, response.content

    # -- topics and groups

    def topics(self) -> list[str]:
        """Returns the names of all topics that the token covers, sorted."""
        names: list[str] = []
        query = {"limit": str(_TOPICS_PAGE)}
        for _ in range(_PAGES_MAX):
            page = self._get("/v1/topics", wire.TopicsAnswer, query=query)
            names += page.topics
            if page.next is None:
                break
            query["after"] = page.next
        return names

    def topic(self, topic: str) -> wire.TopicAnswer:
        """Returns a topic's figures and the names of its groups."""
        return self._get(_topic_path(topic), wire.TopicAnswer)

    def group(self, topic: str, group: str) -> wire.GroupAnswer:
        """Returns a group's figures and settings."""
        return self._get(group_path(topic, group), wire.GroupAnswer)

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        """Returns the figures of a topic or of a group."""
        return self.topic(topic).figures if group is None else self.group(topic, group).figures

    def group_config(self, topic: str, group: str) -> GroupConfig | None:
        """Returns the settings of a group; None if it is not there."""
        answer = self._get_if_there(group_path(topic, group), wire.GroupAnswer)
        return None if answer is None else group_config_of(answer.settings)

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Create a group, or change its settings."""
        self._do("PUT", group_path(topic, group), group_settings_of(config))

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete a group. Raises InUse, unless forced."""
        self._do("DELETE", group_path(topic, group) + _forced(force=force))

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic. Raises InUse, unless forced."""
        self._do("DELETE", _topic_path(topic) + _forced(force=force))

    def purge_topic(self, topic: str, *, scheduled: bool = False, dead: bool = False) -> wire.PurgeAnswer:
        """Move each group of a topic behind what is stored in it; `scheduled`: cancel what is scheduled, too; `dead`:
        discard the dead letters.
        """
        path, body = f"{_topic_path(topic)}/purge", wire.PurgeRequest(scheduled=scheduled, dead=dead)
        return self._ask("POST", path, wire.PurgeAnswer, body)

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move a group to a time or an offset."""
        self._do("POST", f"{group_path(topic, group)}/seek", wire.SeekRequest(to_ms=to_ms, to_offset=to_offset))

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Pause or resume deliveries to a group."""
        self._do("POST", f"{group_path(topic, group)}/{'pause' if paused else 'resume'}")

    # -- the broker as a whole

    def cordon(self, *, reason: str = "") -> None:
        """Have the broker take no new messages, also after a restart; deliveries go on. Idempotent."""
        self._do("POST", "/v1/cordon", wire.CordonRequest(reason=reason))

    def uncordon(self) -> None:
        """Have the broker take new messages again; idempotent."""
        self._do("POST", "/v1/uncordon")

    def snapshot(self, token: str) -> wire.SnapshotAnswer:
        """Have the files of the broker's data folder stand still for a backup that waits beside it, with this token."""
        return self._ask("POST", "/v1/snapshot", wire.SnapshotAnswer, wire.SnapshotRequest(token=token))

    def status(self, *, limit: int = _TOPICS_PAGE, after: str | None = None) -> wire.StatusAnswer:
        """Returns whether the broker takes new messages, what is left of all topics, and a page of it by topic."""
        query = {"limit": str(limit)} | ({} if after is None else {"after": after})
        return self._get("/v1/status", wire.StatusAnswer, query=query)

    def health(self) -> wire.HealthAnswer:
        """Returns whether the broker can serve, with its version where the token has a role."""
        status, content = self.request("GET", "/readyz")
        is_answer = status in {HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE}
        return self._decoded(HTTPStatus.OK if is_answer else status, content, wire.HealthAnswer)

    # -- dead letters

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """Returns a page of dead letters, up to 1,000, and the cursor of the next one."""
        if limit < 1:
            raise InvalidMessage("limit must be at least 1")
        query = {"limit": str(min(limit, DEAD_PAGE_MAX))} | ({} if after is None else {"after": after})
        page = self._get(f"{group_path(topic, group)}/dead", wire.DeadAnswer, query=query)
        return [dead_letter_of(letter) for letter in page.dead], page.next

    def redrive(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, per_second: int | None = None
    ) -> int:
        """Redrive dead letters, all or these; returns how many."""
        path = f"{group_path(topic, group)}/dead/redrive"
        if ids is None:
            parts = [wire.RedriveRequest(all=True, per_second=per_second)]
        else:
            parts = [wire.RedriveRequest(ids=list(part), per_second=per_second) for part in slices(ids)]
        return sum(self._ask("POST", path, wire.RedriveAnswer, part).redriven for part in parts)

    def stop_redrive(self, topic: str, group: str) -> int:
        """Stop the redrives of a group; returns how many are dead letters again. The broker notes the token's name."""
        path = f"{group_path(topic, group)}/dead/redrive/stop"
        return self._ask("POST", path, wire.StopRedriveAnswer).stopped

    def count_dead(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, where: DeadFilter | None = None
    ) -> DeadCount:
        """Returns how many dead letters are meant, all, these, or those that fit; and until when they died."""
        path = f"{group_path(topic, group)}/dead/count"
        counts = [self._ask("POST", path, DeadCount, part) for part in _choices(ids, where)]
        return DeadCount(
            count=sum(counted.count for counted in counts),
            dead_before_ms=min((counted.dead_before_ms for counted in counts), default=0),  # of no ids, none is meant
        )

    def discard(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, where: DeadFilter | None = None,
        dead_before_ms: int | None = None, why: str,
    ) -> int:  # fmt: skip
        """Discard dead letters, all, these, or those that fit; returns how many. The broker notes the token's name."""
        check_why(why)
        path = f"{group_path(topic, group)}/dead/discard"
        parts = [
            wire.DiscardRequest(
                ids=part.ids, where=part.where, all=part.all, why=why, dead_before_ms=dead_before_ms
            )
            for part in _choices(ids, where)
        ]  # fmt: skip
        return sum(self._ask("POST", path, wire.DiscardAnswer, part).discarded for part in parts)

    def edit(
        self, topic: str, group: str, edits: Mapping[str, DeadEdit], *, why: str, operation: str | None = None
    ) -> list[EditResult]:
        """Edit the dead letters of these ids; returns what became of each. The broker notes the token's name.

        `operation`: a name under which a repeat, after an answer that was lost, is known as such (by default a new
        one).
        """
        check_why(why)
        path, name = f"{group_path(topic, group)}/dead/edit", operation or new_message_id()
        results: list[EditResult] = []
        for part in _edit_parts(edits):
            request = wire.EditRequest(operation=name, why=why, edits=part)
            results += self._ask("POST", path, EditPage, request).results
        return results

    def edit_many(
        self, topic: str, group: str, edit: DeadEdit, *, where: DeadFilter | None = None,
        dead_before_ms: int | None = None, why: str, operation: str | None = None,
    ) -> Iterator[EditResult]:  # fmt: skip
        """Edit all dead letters, or those that fit, in one way, without a body; yields what became of each, page by
        page. `operation` as of edit().
        """
        check_why(why)
        path = f"{group_path(topic, group)}/dead/edit"
        request = wire.EditRequest(
            operation=operation or new_message_id(), why=why, edit=json_edit(edit), where=where, all=where is None,
            dead_before_ms=dead_before_ms,
        )  # fmt: skip
        while True:
            page = self._ask("POST", path, EditPage, request)
            yield from page.results
            if page.next is None or page.next <= request.after:
                return
            request = msgspec.structs.replace(request, after=page.next)

    # -- messages

    def publish(self, messages: Sequence[Message]) -> list[PublishResult]:
        """Publish messages; one result each."""
        body = wire.PublishRequest(messages=[json_message(message) for message in messages])
        outcomes = self._ask("POST", "/v1/publish", wire.PublishAnswer, body).results
        return [PublishResult(outcome.id, outcome.status, outcome.error) for outcome in outcomes]

    def read(self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int) -> TopicRead:
        """Returns messages of a topic from an offset on, without a group; up to 1,000."""
        body = wire.ReadRequest(offset=offset, start=start, max_messages=min(max_messages, PULL_MESSAGES_MAX))
        answer = self._ask("POST", f"{_topic_path(topic)}/read", wire.ReadAnswer, body)
        return topic_read_of(answer)

    # -- the schedule

    def scheduled(self, topic: str | None = None, *, bucket: str = "hour") -> Iterator[wire.ScheduledCount]:
        """Yields how many messages are due when, by minute, hour or day."""
        query = {"bucket": bucket} if topic is None else {"bucket": bucket, "topic": topic}
        for _ in range(_PAGES_MAX):
            page = self._get("/v1/scheduled", wire.ScheduledAnswer, query=query)
            yield from page.counts
            if page.next_from_ms is None:
                return
            query["from_ms"] = str(page.next_from_ms)

    def scheduled_message(self, message_id: str) -> wire.ScheduledMessage | None:
        """Returns where and when a message is due; None if it is not scheduled."""
        path = f"/v1/scheduled/{quote(check_message_id(message_id), safe='')}"
        return self._get_if_there(path, wire.ScheduledMessage)

    def cancel(self, message_ids: Sequence[str]) -> list[wire.CancelOutcome]:
        """Cancel scheduled messages; one outcome each."""
        parts = [wire.CancelRequest(ids=list(part)) for part in slices(message_ids)]
        answers = [self._ask("POST", "/v1/scheduled/cancel", wire.CancelAnswer, part) for part in parts]
        return [outcome for answer in answers for outcome in answer.results]

    # -- recurring messages

    def add_recurring(self, name: str, message: RecurringMessage, *, paused: bool = False) -> None:
        """Add a message that the broker publishes again and again, or, `paused`, not yet. The same one again changes
        nothing.

        Raises InUse if another one has this name.
        """
        message.check(name)
        self._do("PUT", _recurring_path(name), recurring_settings_of(message, paused=paused))

    def recurring(self) -> Iterator[wire.RecurringAnswer]:
        """Yields the recurring messages on topics that the token covers, by name, without key, headers and body."""
        query = {"limit": str(_TOPICS_PAGE)}
        for _ in range(_PAGES_MAX):
            page = self._get("/v1/recurring", wire.RecurringListAnswer, query=query)
            yield from page.recurring
            if page.next is None:
                return
            query["after"] = page.next

    def recurring_message(self, name: str, *, runs: int = 5) -> wire.RecurringAnswer | None:
        """Returns a recurring message with so many of its next occurrences, up to 1,000; None if it is not there."""
        path = f"{_recurring_path(name)}?{urlencode({'runs': str(runs)})}"
        return self._get_if_there(path, wire.RecurringAnswer)

    def pause_recurring(self, name: str, *, paused: bool) -> None:
        """Pause a recurring message, or resume it; of what it missed the newest is published then. Idempotent."""
        self._do("POST", f"{_recurring_path(name)}/{'pause' if paused else 'resume'}")

    def delete_recurring(self, name: str) -> None:
        """Delete a recurring message. What it has published stays."""
        self._do("DELETE", _recurring_path(name))

    # -- what a delay service's target refused

    def refused(self) -> list[wire.RefusedMessage]:
        """Returns what a delay service's target refused for good: at most a thousand of each process or shard."""
        return self._get("/v1/refused", wire.RefusedAnswer).messages

    def retry_refused(self, message_ids: Sequence[str]) -> list[wire.RetryOutcome]:
        """Send refused messages to the target once more; one outcome each."""
        parts = [wire.RetryRequest(ids=list(part)) for part in slices(message_ids)]
        answers = [self._ask("POST", "/v1/refused/retry", wire.RetryAnswer, part) for part in parts]
        return [outcome for answer in answers for outcome in answer.results]

    def _get(self, path: str, shape: type[Shape], *, query: Mapping[str, str] | None = None) -> Shape:
        return self._ask("GET", path + (f"?{urlencode(query)}" if query else ""), shape)

    def _get_if_there(self, path: str, shape: type[Shape]) -> Shape | None:
        status, content = self.request("GET", path)
        if status == HTTPStatus.NOT_FOUND and problem_kind(content) is ProblemKind.NOT_FOUND:
            return None
        return self._decoded(status, content, shape)

    def _do(self, method: str, path: str, body: msgspec.Struct | None = None) -> None:
        self._ask(method, path, wire.NoAnswer, body)

    def _ask(self, method: str, path: str, shape: type[Shape], body: msgspec.Struct | None = None) -> Shape:
        return self._decoded(*self.request(method, path, body), shape)

    def _decoded(self, status: int, content: bytes, shape: type[Shape]) -> Shape:
        if status != HTTPStatus.OK:
            raise of_problem(status, content, address=self.shown_url)
        try:
            return json_decoder(shape).decode(content)
        except DECODE_ERRORS as error:
            raise BrokerRefused(
                f"{self.shown_url} answered what is nothing of a broker's: {content[:_SHOWN_BYTES]!r}"
            ) from error


def _choices(ids: Sequence[str] | None, where: DeadFilter | None) -> list[wire.DeadCountRequest]:
    """Returns which dead letters are meant, in as many requests as their ids need."""
    if where is not None:
        where.check()
        return [wire.DeadCountRequest(where=where)]
    if ids is None:
        return [wire.DeadCountRequest(all=True)]
    return [wire.DeadCountRequest(ids=list(part)) for part in slices(ids)]


def _edit_parts(edits: Mapping[str, DeadEdit]) -> Iterator[list[wire.JsonLetterEdit]]:
    """Yields edits in as many requests as they need."""
    part: list[wire.JsonLetterEdit] = []
    size_bytes = 0
    for message_id, edit in edits.items():
        sent = json_letter_edit(message_id, edit)
        sent_bytes = len(msgspec.json.encode(sent))
        if part and (len(part) == BATCH_MESSAGES_MAX or size_bytes + sent_bytes > _EDITS_BYTES):
            yield part
            part, size_bytes = [], 0
        part.append(sent)
        size_bytes += sent_bytes
    if part:
        yield part


def _topic_path(topic: str) -> str:
    """Returns the path of a topic. Raises InvalidMessage: of a name `..` a client makes another path."""
    return f"/v1/topics/{check_topic(topic)}"


def _recurring_path(name: str) -> str:
    return f"/v1/recurring/{check_recurring(name)}"


def _forced(*, force: bool) -> str:
    return "?force=true" if force else ""


def _without_login(url: str) -> str:
    """Returns the URL that paths are added to; requests would send a user and a password of it in the token's place.

    Raises ConfigurationError.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(NO_URL) from error
    if parts.scheme not in {"http", "https"} or parts.hostname is None:
        raise ConfigurationError(NO_URL)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


def _check_certificates(ca_file: str) -> None:
    """Raise ConfigurationError that says what is wrong with the file; requests says it as of the server's."""
    try:
        ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is one of them
        raise ConfigurationError(f"the certificates in {ca_file} cannot be read: {error.strerror or error}") from error


def _reason(error: BaseException) -> str:
    """Returns the innermost reason: requests and urllib3 wrap it thrice, in texts with object addresses in them."""
    reason = error
    for _ in range(_WRAPPED_MAX):
        inner = getattr(reason, "reason", None) or next(
            (argument for argument in reversed(reason.args) if isinstance(argument, BaseException)), None
        )
        if not isinstance(inner, BaseException):
            break
        reason = inner
    system = reason.__cause__ or reason.__context__ or reason
    if isinstance(system, OSError) and system.strerror:
        return system.strerror
    return f"{type(reason).__name__}: {reason}"[:_REASON_CHARS_MAX]
