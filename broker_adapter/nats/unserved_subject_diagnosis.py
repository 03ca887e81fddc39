"""Finds why a subject has no answer: no stream covers it, its stream confirms nothing, or this user may not publish."""

from __future__ import annotations

from collections.abc import Mapping

from broker_adapter.nats.batch_results import NatsBatchResults
from broker_adapter.nats.durability_inspection import StreamApi
from broker_adapter.nats.outstanding_publishes import NoAnswerReason
from outbox_core.common.errors import BrokerUnavailable, NotAuthorized


async def defer_unserved(batch: NatsBatchResults, unanswered: Mapping[str, NoAnswerReason], api: StreamApi) -> None:
    """Defer the messages of subjects that no stream confirms; others have one whose leader is being elected."""
    for subject, answer in unanswered.items():
        deferral = await _deferral(subject, answer, api)
        if deferral is not None:
            batch.defer(subject, deferral)


async def _deferral(subject: str, answer: NoAnswerReason, api: StreamApi) -> str | None:
    """Why an operator must help this subject; None where trying again may do."""
    if answer is NoAnswerReason.FORBIDDEN:
        return f"this user may not publish to {subject}: extend its permissions"
    if answer is NoAnswerReason.LOST:
        return None
    try:
        stream = await api.stream_of(subject)
    except NotAuthorized as error:
        return f"{subject}: {answer.value}, and whether there is one cannot be seen: {error}"
    except BrokerUnavailable:
        return None
    if stream is None:
        return f"no stream covers the subject {subject}: `nats stream add NAME --subjects {subject}`"
    if stream.config.no_ack:
        return f"the stream {stream.name} confirms nothing: `nats stream edit {stream.name} --ack`"
    return None
