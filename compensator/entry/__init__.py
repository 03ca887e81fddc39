"""The command `outbox compensator`, its process, and the wiring of its parts."""
