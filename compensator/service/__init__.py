"""Workers that take turns of sources, periodic work beside them, health and metrics."""
