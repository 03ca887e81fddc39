"""A server of Pulsar under an Outbox and a compensator: each fault."""

from tests.engines.fault_conformance import *  # noqa: F403
