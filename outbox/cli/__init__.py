"""The command `outbox`, and its sub-commands on the tables of one outbox."""
