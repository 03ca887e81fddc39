"""Runs from settings to published results: a full run, and an incremental run by the hour."""
