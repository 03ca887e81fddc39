"""Adapters: each puts one broker behind the Broker port of outbox_core, whose connect() finds them by entry point."""
