"""Adapters: each makes one kind of broker look like messaging.Broker.

Found by entry point, never imported from below.
"""
