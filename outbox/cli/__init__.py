"""The command `outbox`, and its subcommands for the tables of one outbox."""
