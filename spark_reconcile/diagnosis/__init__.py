"""Finds causes that explain many findings at once."""
