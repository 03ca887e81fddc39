"""Reconciliation: proves from stored records that no message was lost, invented, duplicated or early.

PySpark is imported only when run() is called.
"""

from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import (
    BusinessRule,
    CompletenessBound,
    Condition,
    Grace,
    InboxSource,
    Operator,
    OutboxSource,
    Settings,
)
from spark_reconcile.results.summary import Summary
from spark_reconcile.rules.verdict_rule import Scope, Severity, State
from spark_reconcile.runs.reconciliation import run, run_windows

__all__ = [
    "BusinessRule",
    "CompletenessBound",
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
    "run",
    "run_windows",
]
