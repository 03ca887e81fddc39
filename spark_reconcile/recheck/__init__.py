"""Reads the records of what would be a finding once more after a pause, and classifies it again."""
