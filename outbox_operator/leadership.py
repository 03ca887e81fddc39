"""Which one of several operators acts: the one that has the lease, as client-go's leader election has it.

A lease of another is expired when it has not been renewed for its duration, by our own clock since we first saw it so:
the clocks of two machines are never compared. The client's own election has no end and no release, and dies with a
request that fails.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from outbox_operator.kubernetes_api import KubernetesApi, KubernetesRefused, Object
from outbox_operator.resource import MANAGER

DURATION_S: Final = 15
RENEW_EVERY_S: Final = 2
LOST_AFTER_S: Final = 10
"""Without a renewal for so long, an operator stops before another one may begin."""
REQUEST_S_MAX: Final = 3
_LEASE: Final = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}


class Leadership:
    """The lease, for one thread."""

    def __init__(self, api: KubernetesApi, *, namespace: str, monotonic_s: Callable[[], float]) -> None:
        self._api = KubernetesApi(api.client, timeout_s=REQUEST_S_MAX)
        self._namespace = namespace
        self._monotonic_s = monotonic_s
        self._seen: object = None
        self._seen_at_s = 0.0
        self.identity = f"{os.environ.get('HOSTNAME') or socket.gethostname()}_{uuid.uuid4()}"

    def hold(self) -> bool:
        """Take the lease if it is free, or renew it; returns whether it is ours. Raises KubernetesRefused."""
        lease = self._lease()
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        ours = {"holderIdentity": self.identity, "leaseDurationSeconds": DURATION_S, "renewTime": now}
        metadata = {"name": MANAGER, "namespace": self._namespace}
        try:
            if lease is None:
                self._api.create(_LEASE | {"metadata": metadata, "spec": ours | {"acquireTime": now}})
                return True
            if not self._is_free(lease):
                return False
            taken = {} if lease["spec"].get("holderIdentity") == self.identity else {"acquireTime": now}
            self._change(lease, ours | taken)
        except KubernetesRefused as error:
            if error.status == HTTPStatus.CONFLICT:  # another one was faster
                return False
            raise
        return True

    def release(self) -> None:
        """Give the lease up, if it is ours, so that the next operator need not wait. Raises KubernetesRefused."""
        lease = self._lease()
        if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
            self._change(lease, {"holderIdentity": None})

    def _lease(self) -> Object | None:
        found = self._api.get(_LEASE["apiVersion"], _LEASE["kind"], self._namespace, MANAGER)
        return None if found is None else {"spec": {}} | found

    def _change(self, lease: Object, spec: Object) -> None:
        """Change the lease, unless somebody else has since it was read."""
        self._api.merge(lease, {"metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]}, "spec": spec})

    def _is_free(self, lease: Object) -> bool:
        spec, now_s = lease["spec"], self._monotonic_s()
        if spec.get("holderIdentity") in {None, "", self.identity}:
            return True
        if lease["metadata"]["resourceVersion"] != self._seen:
            self._seen, self._seen_at_s = lease["metadata"]["resourceVersion"], now_s
        return bool(now_s - self._seen_at_s >= spec.get("leaseDurationSeconds", DURATION_S))
