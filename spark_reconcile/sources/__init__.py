"""Spark Python data sources: SQL tables without a JDBC driver, and the broker's logs in place."""
