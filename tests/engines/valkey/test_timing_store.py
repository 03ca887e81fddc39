"""The timing store of the outbox on the newest Valkey."""

from tests.broker_adapter.redis.timing_store.test_timing_store import *  # noqa: F403

del test_a_cluster_has_the_slots_on_its_masters_and_wakes_from_any_node  # noqa: F821 - on the machine's own server
