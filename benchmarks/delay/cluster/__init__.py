"""Benchmarks of the delay cluster, on a ZooKeeper and bookies that they start."""
