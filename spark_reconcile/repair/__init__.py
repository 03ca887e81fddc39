"""Plans and applies repairs of findings: rows that are sent again, and what must be decided by people."""
