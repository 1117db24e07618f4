"""Mutation points: each wait, order, record and event of the package, found by syntax tree and taken out.

What is taken out is the call alone: what it is called on is evaluated as before, a look answers that all is
over, a value that is waited for is what is there without the wait.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.rules import GUARDS, LOOKS, METHODS, OURS, WAITS, Other, other

_NOTHING = "(lambda held: lambda *_, **__: (held, None)[1])"  # what begins the work stays, and keeps it alive


@dataclass(frozen=True)
class Point:
    """One place at which something can be taken out.

    Attributes:
        file: Path within the package.
        where: Qualified name of the function or class around it.
        text: What is taken out, as Python writes it.
        number: 1 for the first of these in that function, and so on.
        span: Start and end of what is replaced, in bytes of the source.
        instead: What takes its place.
        left_out: Why it is no mutation point, or None where it is one.
    """

    file: str
    where: str
    text: str
    number: int
    span: tuple[int, int]
    instead: str
    left_out: Other | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """It, however lines move."""
        return self.file, self.where, self.text, self.number

    def __str__(self) -> str:
        number = f" ({self.number})" if self.number > 1 else ""
        return f"{self.file} {self.where}: {self.text}{number}"


def in_package(root: Path) -> list[Point]:
    """All of a package's points, those that are left out among them, by file and place."""
    found = []
    for file in sorted(root.rglob("*.py")):
        found += in_source(file.read_text(), file.relative_to(root).as_posix())
    return found


def in_source(source: str, file: str) -> list[Point]:
    """The points of one file, by place."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counted: Counter[tuple[str, str]] = Counter()
    found = []
    tree = ast.parse(source)
    for where, node, instead, receiver in sorted(_candidates(tree), key=lambda one: _place(one[1])):
        text = ast.unparse(node)
        counted[where, text] += 1
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        number, out = counted[where, text], other(file, receiver)
        found.append(Point(file, where, text, number, (begin, end), instead, out))
    return found


def without(source: str, point: Point) -> str:
    """The source with a point taken out."""
    data, (begin, end) = source.encode(), point.span
    return (data[:begin] + point.instead.encode() + data[end:]).decode()


_Node = ast.expr | ast.stmt
_Candidate = tuple[str, _Node, str, str]


def _place(node: _Node) -> tuple[int, int, int]:
    return node.lineno, node.col_offset, -(node.end_col_offset or 0)


def _candidates(tree: ast.Module) -> Iterator[_Candidate]:
    """Qualified name, node, replacement and receiver of each."""
    yield from _below(tree, [], set(), None)


def _below(
    node: ast.AST, names: list[str], methods: set[str], parent: ast.AST | None
) -> Iterator[_Candidate]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        names = [*names, node.name]
    if isinstance(node, ast.ClassDef):
        methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for handed in _events_handed_over(node):
            yield ".".join(names), handed, "pass", ""
    if isinstance(node, (ast.expr, ast.stmt)) and (found := _as_point(node, parent, methods)) is not None:
        yield ".".join(names), node, *found
    for child in ast.iter_child_nodes(node):
        yield from _below(child, names, methods, node)


def _as_point(node: _Node, parent: ast.AST | None, methods: set[str]) -> tuple[str, str] | None:
    """What replaces it, and its receiver's name, where it is one."""
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name):  # wait(): a function of the file's own
            return ("None", function.id) if function.id in METHODS else None
        if not isinstance(function, ast.Attribute):
            return None
        if ast.unparse(function) == "torch.cuda.stream":
            return '__import__("contextlib").nullcontext()', "cuda"
        if function.attr in METHODS:
            return _instead(node, function, parent), _last_name(function.value)
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and _handed_over(node, parent, methods)
    ):
        return f"{_NOTHING}({ast.unparse(node.value)})", _last_name(node.value)
    return None


def _instead(call: ast.Call, function: ast.Attribute, parent: ast.AST | None) -> str:
    on = ast.unparse(function.value)
    if function.attr in GUARDS and (call.args or call.keywords):
        return f"{ast.unparse(function)}()"
    if function.attr in LOOKS:
        return "True"
    if not isinstance(parent, ast.Expr) and function.attr in WAITS:
        return f'getattr({on}, "_value", {on})'
    return f"({on})"


def _handed_over(node: ast.Attribute, parent: ast.AST | None, methods: set[str]) -> bool:
    """A wait that somebody else is to call: `return work.wait`, `f(self.order)` where that is a method."""
    if node.attr not in (*WAITS, *OURS) or not isinstance(parent, (ast.Call, ast.Return)):
        return False
    if isinstance(parent, ast.Call) and parent.func is node:
        return False
    own = isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr in methods if own else node.attr in ("wait", "synchronize", *OURS)


def _events_handed_over(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.Assign]:
    """Assignments of an event that was made in this function to an attribute of something."""
    made = {
        ast.unparse(target)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.cuda.Event(")
        for target in node.targets
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in made:
            yield node


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return _last_name(node.value) if isinstance(node, ast.Subscript) else ""
