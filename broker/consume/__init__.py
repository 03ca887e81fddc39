"""Consumption: topics' indexes, consumer groups, receipts. No I/O."""
