"""Tokens that are renewed while a broker serves: neither its pod nor the operator is started again for that."""

from __future__ import annotations

import secrets

from broker_adapter.http.admin_client import AdminClient
from outbox_core.common.errors import NotAuthenticated
from tests.engines.kubernetes.cluster import DEADLINE_S, Cluster, KeptBroker, StartOperator, eventually, tokens_of
from tests.engines.kubernetes.load import Load


def is_known(broker: KeptBroker, token: str) -> bool:
    """Whether a broker lets this token in."""
    try:
        AdminClient(broker.url, token=token).status(limit=1)
    except NotAuthenticated:
        return False
    return True


def restarts(broker: KeptBroker) -> int:
    """How often the container of the pod was started again."""
    pod = broker.pod()
    assert pod is not None
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def test_all_tokens_are_renewed_under_load_by_their_secret_alone(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    start_operator()
    broker = cluster.create(namespace, "orders")
    broker.wait_until_ready()
    before, old, new = broker.ready_pod(), cluster.token, secrets.token_urlsafe(16)
    load = Load(broker)

    with load.running():
        load.wait_for(100)
        cluster.change_secret(namespace, "outbox-mq", {"tokens.toml": tokens_of(old, new)})
        eventually(lambda: is_known(broker, new), what="a broker that knows the new token, too")
        cluster.change_secret(namespace, "outbox-mq", {"operator-token": new})
        broker.token = new
        assert load.renewed.acquire(timeout=DEADLINE_S)
        assert load.renewed.acquire(timeout=DEADLINE_S)
        cluster.change_secret(namespace, "outbox-mq", {"tokens.toml": tokens_of(new)})
        eventually(lambda: not is_known(broker, old), what="a broker that does not know the old token any more")
        load.wait_for(len(load.delivered) + 100)
        assert (broker.ready_pod(), restarts(broker), load.failures) == (before, 0, [])
        broker.delete()  # the operator cordons it, and asks what is left, with the new one
        broker.wait_until_gone()

    assert sorted(load.delivered) == sorted(load.stored)
