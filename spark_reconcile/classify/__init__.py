"""Puts the rules on the evidence: one verdict for each message, delivery and business row."""
