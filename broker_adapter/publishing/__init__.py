"""Common parts of adapters that publish to another broker."""
