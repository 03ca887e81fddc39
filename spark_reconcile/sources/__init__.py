"""Readers of databases, of the logs of the broker, and of Parquet archives."""
