"""Code that our processes share: logging, settings, and the command `outbox`."""
