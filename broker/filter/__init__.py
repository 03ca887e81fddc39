"""Filters: which messages a group wants, said in RocketMQ's SQL92 subset over headers. Pure; knows no log and no HTTP.

`parse` reads an expression, `compile_condition` makes it callable, `FilterIndex` asks thousands of them at once.
"""

from broker.filter.compiling import Predicate, compile_condition
from broker.filter.index import INDEX_HEADER, FilterIndex
from broker.filter.parsing import parse
from broker.filter.rendering import render
from messaging.errors import FilterError

__all__ = ["INDEX_HEADER", "FilterError", "FilterIndex", "Predicate", "compile_condition", "parse", "render"]
