"""This project's broker, kept by three bookies: `outbox broker serve --store`, with the client HttpBroker."""

from __future__ import annotations

from benchmarks.broker.contestants.outbox_http import make

__all__ = ["make"]
