"""The command `outbox delay`: the schedule as a separate process, in front of a broker without delayed delivery."""
