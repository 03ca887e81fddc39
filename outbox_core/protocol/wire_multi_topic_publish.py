"""The shapes of a publish to several topics, in which each message names its topic. Extends wire.

With a request a topic, a batch of 500 messages on 500 topics had 500 syncs. It has a path of its own, since with an
optional topic in the other route's messages the path would say one topic and the body another, and a proxy that allows
paths by topic would be bypassed.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from outbox_core.protocol.wire import Batch, NewMessage, PackedMessage, Request

TopicName = Annotated[str, Meta(extra_json_schema={"pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}$"})]
"""Documentation only: the server checks the limit, so that it has one error text."""


class MultiTopicMessage(NewMessage, frozen=True, kw_only=True):
    """One message; see NewMessage."""

    topic: TopicName


class PackedMultiTopicMessage(PackedMessage, frozen=True, kw_only=True):
    """The same in MessagePack."""

    topic: TopicName


class MultiTopicPublishRequest(Request, frozen=True, kw_only=True):
    """POST /v1/publish; the response is a PublishAnswer."""

    messages: Annotated[list[MultiTopicMessage], Batch]


class PackedMultiTopicPublishRequest(Request, frozen=True, kw_only=True):
    """The same in MessagePack."""

    messages: Annotated[list[PackedMultiTopicMessage], Batch]
