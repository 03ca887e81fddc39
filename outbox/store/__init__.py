"""The outbox tables: their definition and their SQL, and what is needed of a database."""
