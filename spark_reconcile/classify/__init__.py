"""Applies the rules to the evidence: one verdict for each message, delivery and business row."""
