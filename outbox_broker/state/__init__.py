"""What the engine keeps in memory of topics, groups and messages, and its checkpoints."""
