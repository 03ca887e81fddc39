"""Compares digests of the sources by key and by id, so that only what disagrees is classified row by row."""
