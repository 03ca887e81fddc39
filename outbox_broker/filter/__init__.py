"""Filters: which messages a group receives, in RocketMQ's SQL92 subset over headers. Pure functions and values.

`parse` reads an expression, `compile_condition` makes it callable, `FilterIndex` evaluates thousands at once.
"""

from outbox_broker.filter.compiler import Predicate, compile_condition
from outbox_broker.filter.expression_tree import render
from outbox_broker.filter.parser import parse
from outbox_broker.filter.subscription_index import INDEX_HEADER, FilterIndex
from outbox_core.common.errors import FilterError

__all__ = ["INDEX_HEADER", "FilterError", "FilterIndex", "Predicate", "compile_condition", "parse", "render"]
