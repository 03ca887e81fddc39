"""In-memory state of topics, groups and messages, and its checkpoints."""
