"""Adapters: each puts one broker behind the Broker port of messaging. messaging.connect() finds them by entry point."""
