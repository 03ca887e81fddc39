"""Errors, clocks and waits."""
