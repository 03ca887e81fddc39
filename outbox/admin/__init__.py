"""Operators' view of the outbox tables: inspection of rows, and changes to them."""
