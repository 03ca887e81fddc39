"""What processes of ours share: logging, values of configuration, and the command `outbox`."""
