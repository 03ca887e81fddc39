"""Reconciliation: proves from the records that nothing was lost, invented or early.

PySpark is imported only when it runs.
"""

from spark_reconcile.config import Settings, read_settings
from spark_reconcile.summary import Summary

__all__ = ["Settings", "Summary", "read_settings"]
