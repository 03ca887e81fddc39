"""Consumers: they pull messages, handle each once, and acknowledge it."""
