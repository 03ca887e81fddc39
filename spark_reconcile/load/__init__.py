"""Checks the sources of a run and reads them into Spark."""
