"""The command `outbox broker`, its process, and commands for operators of a running broker."""
