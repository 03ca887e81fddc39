"""The commands of `outbox broker` that need no client, and the process of `serve`."""
