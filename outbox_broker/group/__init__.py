"""One consumer group as a state machine without I/O."""
