"""The shapes of a publish to many topics, whose messages name theirs. All others of the protocol are in wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from outbox_core.protocol.wire import Batch, PackedMessage, PublishedMessage, Request

TopicName = Annotated[str, Meta(extra_json_schema={"pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}$"})]
"""Checked by the server, so that there is one text for it; here it is only told."""


class AddressedMessage(PublishedMessage, frozen=True, kw_only=True):
    """One message; see PublishedMessage."""

    topic: TopicName


class PackedAddressedMessage(PackedMessage, frozen=True, kw_only=True):
    """The same in MessagePack."""

    topic: TopicName


class AddressedPublishRequest(Request, frozen=True, kw_only=True):
    """POST /v1/publish; answered with a PublishAnswer."""

    messages: Annotated[list[AddressedMessage], Batch]


class PackedAddressedPublishRequest(Request, frozen=True, kw_only=True):
    """The same in MessagePack."""

    messages: Annotated[list[PackedAddressedMessage], Batch]
