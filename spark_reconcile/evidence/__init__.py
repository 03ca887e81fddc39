"""Evidence: one row of facts for each message, delivery and business key, joined from all sources."""
