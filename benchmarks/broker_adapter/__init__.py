"""Benchmarks of adapters to other brokers, compared with a minimal fast program with the same client."""
