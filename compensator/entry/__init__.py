"""The command `outbox compensator`, its process, and the construction of its parts."""
