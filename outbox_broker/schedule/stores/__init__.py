"""Implementations of the segment store: files of one folder, and ledgers of a BookKeeper cluster."""
