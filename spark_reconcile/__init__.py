"""Reconciliation: proves from the records that nothing was lost, invented, doubled or early.

PySpark is imported only when run() is called.
"""

from spark_reconcile.errors import NotComparable
from spark_reconcile.incremental import run_windows
from spark_reconcile.reconciliation import run
from spark_reconcile.settings import (
    BusinessRule,
    Condition,
    Grace,
    InboxSource,
    Operator,
    OutboxSource,
    Settings,
    Until,
)
from spark_reconcile.summary import Summary
from spark_reconcile.verdict import Scope, Severity, State

__all__ = [
    "BusinessRule",
    "Condition",
    "Grace",
    "InboxSource",
    "NotComparable",
    "Operator",
    "OutboxSource",
    "Scope",
    "Settings",
    "Severity",
    "State",
    "Summary",
    "Until",
    "run",
    "run_windows",
]
