"""The outbox tables: their definition, their SQL, and the database engines that they need."""
