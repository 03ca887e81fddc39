"""Backups of a data folder: what it holds at one moment, a copy of that, its check, and the way back."""
