"""Configuration, and the totals of batches."""
