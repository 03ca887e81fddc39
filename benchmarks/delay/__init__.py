"""Benchmarks of scheduled messages: cost and lateness."""
