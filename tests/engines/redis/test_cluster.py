"""A Redis cluster under an Outbox and a compensator, with WAIT 1: each fault of a master."""

from tests.engines.fault_conformance import *  # noqa: F403
