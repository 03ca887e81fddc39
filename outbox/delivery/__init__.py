"""A batch of rows to the broker, and what the broker answered back into the table."""
