"""Delivery: sends a batch of rows to the broker, and writes the results to the table."""
