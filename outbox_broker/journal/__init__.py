"""A log of the broker: one class for all, over segments of any medium."""
