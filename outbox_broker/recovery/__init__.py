"""Recovery: rebuilds the in-memory state from a data folder when a broker starts."""
