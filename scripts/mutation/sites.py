"""Finds the places in a module where one mutation operator applies, and writes the mutated or the probed source.

A site is an expression or a simple statement inside a function. Left out: module and class level (they run at import),
decorators, default values, annotations, `if TYPE_CHECKING`, patterns, f-strings, assertions, the text of errors, and
calls of a logger.
"""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate

PROBE_NAME = "_mutation_hit"

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_NEGATED_BY_SWAP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_TEXT_KEYWORDS = {"help", "metavar", "rich_help_panel", "description", "summary", "documentation", "title", "caption"}
_INITIALIZERS = {"__init__", "__post_init__"}


@dataclass(frozen=True, slots=True)
class Site:
    """One mutant: where it is, what it replaces by what. `start` and `end` are byte offsets into the module."""

    path: str
    line: int
    qualname: str
    statement: str
    operator: str
    before: str
    after: str
    ordinal: int
    start: int
    end: int
    is_statement: bool

    @property
    def package(self) -> str:
        """The top-level folder."""
        return self.path.partition("/")[0]

    def as_json(self) -> dict[str, object]:
        """All that finds it again in a later tree, and what a reader wants to see."""
        return {name: value for name, value in asdict(self).items() if name not in {"start", "end", "is_statement"}}


def find_sites(path: str, source: bytes, defaults: Mapping[str, set[str]] | None = None) -> list[Site]:
    """All sites of a module, in source order. `defaults` is what `keyword_defaults` says of all modules."""
    finder = _Finder(path, source, defaults or {})
    finder.visit_module(ast.parse(source))
    return finder.sites


def mutate(source: bytes, site: Site) -> bytes:
    """The module with this site's mutation."""
    after = site.after if site.is_statement else f"({site.after})"
    return source[: site.start] + after.encode() + source[site.end :]


def add_probes(source: bytes, probed: Iterable[tuple[int, Site]]) -> bytes:
    """The module, reporting the number of each of these sites when control reaches it. Line numbers stay."""
    insertions: list[tuple[tuple[int, int, int], bytes]] = []
    for number, site in probed:
        call = f"{PROBE_NAME}({number})"
        if site.is_statement:
            insertions.append(((site.start, 1, -len(source)), f"{call}; ".encode()))
        else:
            # What opens at one place opens outermost first, and what closes there closes innermost first.
            insertions.append(((site.start, 1, -site.end), f"({call} or (".encode()))
            insertions.append(((site.end, 0, -site.start), b"))"))
    if not insertions:
        return source
    insertions.append(_probe_definition(_after_future_imports(source)))
    for (offset, *_), text in sorted(insertions, reverse=True, key=lambda insertion: insertion[0]):
        source = source[:offset] + text + source[offset:]
    return source


def keyword_defaults(sources: Iterable[bytes]) -> dict[str, set[str]]:
    """For each function or class name defined in these modules, the keywords that a call may leave out."""
    found: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name].update(_defaulted(node.args))
            elif isinstance(node, ast.ClassDef):
                fields = [field for field in node.body if isinstance(field, ast.AnnAssign) and field.value]
                found[node.name].update(field.target.id for field in fields if isinstance(field.target, ast.Name))
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        found[node.name].update(_defaulted(method.args))
    return dict(found)


def _defaulted(arguments: ast.arguments) -> set[str]:
    positional = [*arguments.posonlyargs, *arguments.args][::-1][: len(arguments.defaults)]
    keywords = [name for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
    return {argument.arg for argument in [*positional, *keywords]}


def _after_future_imports(source: bytes) -> int:
    """The offset behind the docstring and the imports from __future__, or 0."""
    offsets = _Offsets(source)
    end = 0
    for node in ast.parse(source).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        end = offsets.range(node)[1]
    return end


def _probe_definition(offset: int) -> tuple[tuple[int, int, int], bytes]:
    # A Python without the probe (an environment that a test makes) runs the same source.
    definition = f'{PROBE_NAME} = getattr(__import__("builtins"), "{PROBE_NAME}", lambda number: None)'
    return (offset, 2, 0), (f"; {definition}" if offset else f"{definition}\n").encode()


class _Offsets:
    """Byte offsets of the nodes of one source."""

    def __init__(self, source: bytes) -> None:
        self._lines = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]

    def range(self, node: ast.AST) -> tuple[int, int]:
        """Where the node begins and ends."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset


class _Finder:
    """Walks one module. The names of the enclosing scopes and the current statement are kept along the way."""

    def __init__(self, path: str, source: bytes, defaults: Mapping[str, set[str]]) -> None:
        self.sites: list[Site] = []
        self._path = path
        self._offsets = _Offsets(source)
        self._defaults = defaults
        self._scopes: list[str] = []
        self._functions: list[str] = []
        self._statement = ""
        self._seen: dict[tuple[str, ...], int] = defaultdict(int)

    def visit_module(self, module: ast.Module) -> None:
        """Collect the sites of a module."""
        self._visit_all(module.body)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self._visit(node)

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.ClassDef(name=name, body=body):
                self._visit_scope(name, body)
            case ast.FunctionDef(name=name, body=body) | ast.AsyncFunctionDef(name=name, body=body):
                self._functions.append(name)
                self._visit_scope(name, body)
                self._functions.pop()
            case ast.stmt() | ast.match_case():
                self._visit_statement(node)
            case ast.expr():
                self._visit_expression(node)
            case ast.comprehension(ifs=conditions):
                for condition in conditions if self._functions else []:
                    self._add_negation(condition)
                self._visit_all(ast.iter_child_nodes(node))
            case _:
                self._visit_all(ast.iter_child_nodes(node))

    def _visit_scope(self, name: str, body: list[ast.stmt]) -> None:
        self._scopes.append(name)
        self._visit_all(body)
        self._scopes.pop()

    def _visit_statement(self, node: ast.stmt | ast.match_case) -> None:
        if self._functions:
            outer, self._statement = self._statement, _header(node)
            for part, operator, after in _statement_mutations(node, self._functions[-1]):
                self._add(part, operator, after)
        children = list(_mutable_children(node))
        for child in children:
            if isinstance(child, ast.expr):
                self._visit(child)
        for child in children:
            if not isinstance(child, ast.expr):
                self._visit(child)
        if self._functions:
            self._statement = outer

    def _visit_expression(self, node: ast.expr) -> None:
        if isinstance(node, ast.JoinedStr) or _is_log_call(node):
            return
        if self._functions:
            for operator, after in _expression_mutations(node, self._defaults):
                self._add(node, operator, after)
        self._visit_all(_mutable_operands(node))

    def _add_negation(self, condition: ast.expr) -> None:
        for part, operator, after in _negations(condition):
            self._add(part, operator, after)

    def _add(self, node: ast.AST, operator: str, after: ast.AST) -> None:
        try:
            texts = ast.unparse(node), ast.unparse(ast.fix_missing_locations(after))
        except ValueError:  # an f-string that this Python cannot write again
            return
        key = (".".join(self._scopes), self._statement, operator, *texts)
        start, end = self._offsets.range(node)
        site = Site(
            path=self._path, line=node.lineno, qualname=key[0], statement=self._statement, operator=operator,  # type: ignore[attr-defined]
            before=texts[0], after=texts[1], ordinal=self._seen[key], start=start, end=end,
            is_statement=isinstance(node, ast.stmt),
        )  # fmt: skip
        self._seen[key] += 1
        self.sites.append(site)


def _header(node: ast.stmt | ast.match_case) -> str:
    """A statement as text, formatted one way; of a compound statement the part before its body."""
    if isinstance(node, ast.match_case):
        guard = f" if {ast.unparse(node.guard)}" if node.guard else ""
        return f"case {ast.unparse(node.pattern)}{guard}:"
    if not hasattr(node, "body"):
        return ast.unparse(node)
    short = copy.copy(node)
    short.body = [ast.Pass()]
    for name in ("orelse", "finalbody", "handlers"):
        if hasattr(short, name):
            setattr(short, name, [])
    if isinstance(node, ast.Try):
        short.finalbody = [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(short).partition("\n")[0]


def _mutable_children(node: ast.stmt | ast.match_case) -> Iterator[ast.AST]:
    match node:
        case ast.If(test=test, orelse=orelse) if "TYPE_CHECKING" in ast.unparse(test):
            yield from orelse
        case ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return
        case ast.AnnAssign(value=value):
            yield from [value] if value else []
        case ast.Expr(value=ast.Constant()):
            return
        case ast.match_case(guard=guard, body=body):
            yield from [guard] if guard else []
            yield from body
        case ast.Try() as attempt:
            yield from attempt.body
            yield from (statement for handler in attempt.handlers for statement in handler.body)
            yield from [*attempt.orelse, *attempt.finalbody]
        case _:
            yield from ast.iter_child_nodes(node)


def _mutable_operands(node: ast.expr) -> Iterator[ast.AST]:
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[subject, *_]):
            yield subject
        case ast.Call(func=ast.Name(id="cast"), args=[_, subject]):
            yield subject
        case ast.Call():
            yield from [node.func, *node.args]
            yield from (keyword.value for keyword in node.keywords if keyword.arg not in _TEXT_KEYWORDS)
        case ast.Lambda(body=body):
            yield body
        case _:
            yield from ast.iter_child_nodes(node)


def _statement_mutations(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    match node:
        case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
            if not _is_log_call(call) and ast.unparse(call.func) != "assert_never":
                yield node, "call deleted", ast.Pass()
        case ast.Raise():
            yield node, "raise deleted", ast.Pass()
        case ast.AugAssign(op=op) if type(op) in _ARITHMETIC and not _is_text(node.value):
            yield node, "arithmetic swapped", _replaced(node, op=_ARITHMETIC[type(op)]())
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Delete():
            if function not in _INITIALIZERS:
                yield node, "assignment deleted", ast.Pass()
        case ast.Break() | ast.Continue():
            yield node, "break swapped", ast.Continue() if isinstance(node, ast.Break) else ast.Break()
        case ast.If(test=test) | ast.While(test=test) | ast.match_case(guard=ast.expr() as test):
            yield from _negations(test)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant) or _is_number(value):
            yield value, "None returned", ast.Constant(value=None)


def _negations(condition: ast.expr) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    match condition:
        case ast.Compare(ops=[op]) if isinstance(op, _NEGATED_BY_SWAP):
            return
        case ast.Constant() | ast.UnaryOp(op=ast.Not()):
            return
        case ast.expr() if "TYPE_CHECKING" not in ast.unparse(condition):
            yield condition, "condition negated", ast.UnaryOp(op=ast.Not(), operand=condition)


def _expression_mutations(node: ast.expr, defaults: Mapping[str, set[str]]) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                swapped = [*ops[:index], _COMPARISONS[type(op)](), *ops[index + 1 :]]
                yield "comparison swapped", _replaced(node, ops=swapped)
        case ast.BoolOp(op=op):
            yield "and/or swapped", _replaced(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", operand
        case ast.IfExp(test=test):
            for _, operator, after in _negations(test):
                yield operator, _replaced(node, test=after)
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not (_is_text(node.left) or _is_text(node.right)):
            yield "arithmetic swapped", _replaced(node, op=_ARITHMETIC[type(op)]())
        case ast.Constant(value=int() | float() as value):  # a bool is an int
            is_flag = isinstance(value, bool)
            yield "boolean flipped" if is_flag else "number plus one", ast.Constant(not value if is_flag else value + 1)
        case ast.Call():
            yield from _shortened(node, defaults)


def _shortened(call: ast.Call, defaults: Mapping[str, set[str]]) -> Iterator[tuple[str, ast.AST]]:
    """The call without one of its keywords, where that may be valid: a call that must fail tells nothing of tests."""
    name = ast.unparse(call.func).rpartition(".")[2]
    for keyword in call.keywords:
        if keyword.arg in _TEXT_KEYWORDS or not keyword.arg:
            continue
        if name not in defaults or keyword.arg in defaults[name]:
            rest = [other for other in call.keywords if other is not keyword]
            yield "keyword argument dropped", _replaced(call, keywords=rest)


def _replaced(node: ast.AST, **fields: object) -> ast.AST:
    replaced = copy.copy(node)
    for name, value in fields.items():
        setattr(replaced, name, value)
    return replaced


def _is_text(node: ast.expr) -> bool:
    """A text, or None: `+` then joins, and `|` makes a type."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and not _is_number(node))


def _is_number(node: ast.Constant) -> bool:
    return isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _is_log_call(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _LOG_METHODS
        and "log" in ast.unparse(node.func.value).lower()
    )
