"""The context of one request, for handlers; and the parts of a server. Makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from outbox_broker.engine.engine import Engine
from outbox_broker.http import content_negotiation as codecs
from outbox_broker.http.access_control import Access, Principal, Role, authorize
from outbox_broker.http.admission_limits import BudgetLease, ByteBudget, ConcurrencyLimit, WorkClass
from outbox_broker.http.broker_metrics import BrokerMetrics
from outbox_broker.http.content_negotiation import Codec
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.long_poll import LongPolls
from outbox_broker.http.responses import CLOSE, Problem, of_query
from outbox_broker.http.service_ports import Catalog, ForProducers, ServicePorts
from outbox_broker.http.worker_threads import WorkerThreads
from outbox_core.common.clock import Clock
from outbox_core.protocol.decoder_cache import known
from outbox_core.protocol.problem import ProblemKind

Shape = TypeVar("Shape", bound=msgspec.Struct)


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of one server. Blocking calls to the engine run in these pools, of bounded size."""

    served: ServicePorts
    settings: HttpSettings
    clock: Clock
    access: Access
    metrics: BrokerMetrics
    polls: LongPolls
    budget: ByteBudget
    publishes: ConcurrencyLimit
    requests: ConcurrencyLimit
    pulls: ConcurrencyLimit
    threads: WorkerThreads
    stopping: bool = field(default=False)

    @classmethod
    def of(cls, served: ServicePorts, settings: HttpSettings, *, access: Access, clock: Clock) -> Services:
        """Create the parts of a server."""

        def gate(name: str, requests_max: int) -> ConcurrencyLimit:
            return ConcurrencyLimit(
                name=name, requests_max=requests_max, retry_after_ms=settings.throttled_retry_after_ms
            )

        def subscribe(topic: str, group: str, wake: Callable[[], None]) -> Callable[[], None]:
            return services.served.subscribe(topic, group, wake)

        services = cls(
            served=served,
            settings=settings,
            clock=clock,
            access=access,
            metrics=BrokerMetrics(lambda: services.served, series_max=settings.metric_series_max),
            polls=LongPolls(
                subscribe,
                idle_queue_ms=settings.idle_queue_ms, idle_queues_max=settings.idle_queues_max,
            ),
            budget=ByteBudget(settings.work_bytes_max, retry_after_ms=settings.throttled_retry_after_ms),
            publishes=gate("publishes", settings.publishes_max),
            requests=gate("requests", settings.requests_max),
            pulls=gate("waiting_pulls", settings.waiting_pulls_max),
            threads=WorkerThreads.of(settings),
        )  # fmt: skip
        return services

    def gate_of(self, work: WorkClass) -> ConcurrencyLimit:
        """Returns the limit for a class of work."""
        match work:
            case WorkClass.PUBLISH:
                return self.publishes
            case WorkClass.SETTLE | WorkClass.PAGE | WorkClass.OPERATE:
                return self.requests
            case WorkClass.PULL | WorkClass.READ:
                return self.pulls

    def out_of_connections(self) -> Problem:
        """Returns the problem of a reserved connection with a request that the reserve is not for."""
        return Problem(
            ProblemKind.OVERLOADED,
            "there are as many connections as connections_max or connections_per_address_max allows; those in reserve "
            "are for probes, metrics and operators",
            retry_after_ms=self.settings.throttled_retry_after_ms,
            headers=CLOSE,
        )

    def stop(self) -> None:
        """Become unready and end waits for messages; requests in progress go on. On the event loop only."""
        self.stopping = True
        self.polls.stop()


@dataclass(slots=True, kw_only=True)
class Call:
    """A routed and authorised request. Names that the path lacks are empty."""

    services: Services
    ports: ServicePorts
    """What was served when the request came: what is served next may be another engine."""
    principal: Principal
    topic: str
    group: str
    item: str
    query: Mapping[str, str]
    body: bytes | bytearray
    body_codec: Codec
    answer_codec: Codec
    lease: BudgetLease

    @property
    def served(self) -> ServicePorts:
        """The served ports. Raises BrokerUnavailable where another node owns what they serve."""
        self.ports.check_owner()
        return self.ports

    @property
    def producers(self) -> ForProducers:
        """Publishes, and scheduled messages."""
        return self.served.needed(self.served.producers)

    @property
    def catalog(self) -> Catalog:
        """The topics and groups."""
        return self.served.needed(self.served.catalog)

    @property
    def broker(self) -> Engine:
        """The broker's engine. Raises NotSupported where a delay service is served, which has no groups."""
        return self.served.needed(self.served.broker)

    @property
    def is_packed(self) -> bool:
        """Whether the response is MessagePack, which carries binary bodies."""
        return self.answer_codec is Codec.MSGPACK

    def read(self, shape: type[Shape]) -> Shape:
        """Decode the body. Raises Problem that names the position."""
        return codecs.decode(self.body, self.body_codec, shape)

    def read_query(self, shape: type[Shape]) -> Shape:
        """Parse the query. Raises Problem that names the parameter."""
        try:
            return msgspec.convert(self.query, known(shape), strict=False)
        except msgspec.ValidationError as error:
            unknown = [name for name in self.query if name not in shape.__struct_encode_fields__]
            raise of_query(error, unknown=unknown) from error

    def check_batch(self, entries: Sequence[object], *, where: str) -> None:
        """Raise Problem if a list has more entries than a request may have."""
        if len(entries) > self.services.settings.batch_messages_max:
            raise self.too_many(f"{len(entries):,} entries", where=where)

    def require(self, role: Role, topic: str | None) -> None:
        """Raise Problem if the sender lacks this role for a topic that is not in the path; None: for all topics."""
        authorize(self.principal, role, topic)
        if topic is None and not self.principal.covers_all:
            raise Problem(ProblemKind.FORBIDDEN, f"the token {self.principal.name!r} is limited to some topics")

    def too_many(self, entries: str, *, where: str) -> Problem:
        """Returns the problem of a list with more entries than a request may have."""
        limit = self.services.settings.batch_messages_max
        return Problem(
            ProblemKind.BATCH_TOO_LARGE,
            f"{entries} are more than the {limit:,} allowed in one request; send several",
            where=where,
            bound=("batch_messages_max", limit),
        )
