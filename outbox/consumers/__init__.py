"""Consumers: pull, handle each message once, acknowledge."""
