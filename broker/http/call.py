"""One request on its way through: what handlers get. And what a server consists of. It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from broker.http import codec as codecs
from broker.http.access import Access, Principal, Role, authorize
from broker.http.codec import Codec
from broker.http.gate import Gate
from broker.http.long_poll import LongPolls
from broker.http.metrics import Metrics
from broker.http.problems import Problem, of_query
from broker.http.served import Served
from broker.http.settings import HttpSettings
from messaging.clock import Clock
from messaging.decoding import known
from messaging.problem import ProblemKind

Shape = TypeVar("Shape", bound=msgspec.Struct)


@dataclass(slots=True, kw_only=True)
class Services:
    """What one server is made of. Blocking calls to the engine run in these pools, of bounded size."""

    engine: Served
    settings: HttpSettings
    clock: Clock
    access: Access
    metrics: Metrics
    polls: LongPolls
    publishes: Gate
    requests: Gate
    pulls: Gate
    publish_pool: ThreadPoolExecutor
    settle_pool: ThreadPoolExecutor
    pull_pool: ThreadPoolExecutor
    stopping: bool = field(default=False)

    def stop(self) -> None:
        """Turn unready and send away those who wait for messages; requests in work go on. On the loop only."""
        self.stopping = True
        self.polls.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request whose route, sender, names and codecs are known and allowed. Names that the path lacks are empty."""

    services: Services
    principal: Principal
    topic: str
    group: str
    item: str
    query: Mapping[str, str]
    body: bytes
    body_codec: Codec
    answer_codec: Codec

    @property
    def engine(self) -> Served:
        """The engine that serves the call."""
        return self.services.engine

    @property
    def is_packed(self) -> bool:
        """Whether the answer is MessagePack, which carries bodies as they are."""
        return self.answer_codec is Codec.MSGPACK

    def read(self, shape: type[Shape]) -> Shape:
        """The body. Raises Problem that says where it is wrong."""
        return codecs.decode(self.body, self.body_codec, shape)

    def read_query(self, shape: type[Shape]) -> Shape:
        """The query. Raises Problem that says which part of it is wrong."""
        try:
            return msgspec.convert(self.query, known(shape), strict=False)
        except msgspec.ValidationError as error:
            unknown = [name for name in self.query if name not in shape.__struct_encode_fields__]
            raise of_query(error, unknown=unknown) from error

    def check_batch(self, entries: Sequence[object], *, where: str) -> None:
        """Raise Problem where a list has more entries than a request may have."""
        limit = self.services.settings.batch_messages_max
        if len(entries) > limit:
            raise Problem(
                ProblemKind.BATCH_TOO_LARGE,
                f"{len(entries):,} entries are more than the {limit:,} allowed in one request; send several",
                where=where,
                bound=("batch_messages_max", limit),
            )

    def require(self, role: Role, topic: str | None) -> None:
        """Raise Problem where the sender lacks this role for a topic that the path does not name; None: for all."""
        authorize(self.principal, role, topic)
        if topic is None and not self.principal.covers_all:
            raise Problem(ProblemKind.FORBIDDEN, f"the token {self.principal.name!r} is limited to some topics")
