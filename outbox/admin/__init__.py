"""What an operator may see of rows in the outbox tables, and do with them."""
