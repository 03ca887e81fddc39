"""Reconciliation: proves from stored records that no message was lost, invented, duplicated or early.

PySpark is imported only when run() is called, and what else comes with the extra `spark` only when run() is looked up:
`outbox reconcile --help` must work without it.
"""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in {"run", "run_windows"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spark_reconcile.runs import reconciliation

    return getattr(reconciliation, name)
