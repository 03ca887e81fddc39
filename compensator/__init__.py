"""The compensation service: finds what was committed and not sent, and sends it.

The delivery itself is outbox.delivery.relay.
"""
