"""Benchmarks of the adapter for Redis."""
