"""The configuration of the broker and of the delay service."""
