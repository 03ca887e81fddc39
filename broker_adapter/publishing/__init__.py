"""What adapters that publish to another broker have in common."""
