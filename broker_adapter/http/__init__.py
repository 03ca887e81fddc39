"""The broker of `outbox broker serve`, or any that speaks its protocol, behind the Broker port."""

from broker_adapter.http.http_broker import HttpBroker

__all__ = ["HttpBroker"]
