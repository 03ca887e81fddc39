"""The command `outbox delay`: the schedule as a process of its own, in front of a broker that has no delay."""
