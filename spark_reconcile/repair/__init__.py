"""Plans and applies repairs of findings: rows to send again, and findings that users must decide."""
