"""The compensation service: finds committed messages that were not sent, and sends them.

The delivery itself is outbox.delivery.relay.
"""
