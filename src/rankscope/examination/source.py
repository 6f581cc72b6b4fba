"""Edits of the user's own source, so that a printed change can be made as it stands.

A change names the function, the text that is there and the text to write instead. Text is only quoted from files that
are not part of an installed package; where nothing fits exactly, nothing is proposed, and a row falls back to words.
"""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from rankscope.errors import RankscopeError

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages: an environment may see those of another one, or of the user."""


@dataclass(frozen=True)
class Edit:
    """Text to write instead of other text; an empty new text removes the statement."""

    old: str
    new: str


@dataclass(frozen=True)
class SourcePlace:
    """A function of the user's source, and a line in it.

    Attributes:
        name: qualified name of the function.
        node: its syntax tree.
        source: the whole file.
        file: its name.
        line: the line that ran, or where the function begins.
        known: its global names.
    """

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    source: str
    file: str
    line: int
    known: Mapping[str, Any] = field(compare=False, hash=False)

    def text(self, node: ast.AST, changed: Mapping[ast.AST, str] | None = None) -> str:
        """The text of a node, with other text for some of the nodes in it; in one line."""
        begin, end = self._span(node)
        raw = self.source.encode()
        parts, at = [], begin
        for (first, last), new in sorted((self._span(inner), new) for inner, new in (changed or {}).items()):
            parts += [raw[at:first], new.encode()]
            at = last
        return re.sub(r"\s*\n\s*", " ", b"".join([*parts, raw[at:end]]).decode())

    def _span(self, node: Any) -> tuple[int, int]:
        starts = [0]
        for line in self.source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def calls(self, *names: str) -> list[ast.Call]:
        """The calls of some functions or methods on the line."""
        return [
            node
            for node in ast.walk(self.node)
            if isinstance(node, ast.Call)
            and _called(node) in names
            and not self._is_submodule(node)
            and node.lineno <= self.line <= (node.end_lineno or node.lineno)
        ]

    def _is_submodule(self, call: ast.Call) -> bool:
        """Whether ``a.softmax(b)`` may be a module: only with a number as its axis is it a method of a tensor."""
        if _called(call) != "softmax" or not isinstance(call.func, ast.Attribute) or self.is_module(call.func.value):
            return False
        given = self.arguments(call, "dim")
        number = given[0].operand if given and isinstance(given[0], ast.UnaryOp) else given[0] if given else None
        return not (isinstance(number, ast.Constant) and isinstance(number.value, int))

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The simple statement that holds a node."""
        simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
        holding = [
            one for one in ast.walk(self.node) if isinstance(one, simple) and any(n is node for n in ast.walk(one))
        ]
        return holding[0] if len(holding) == 1 else None

    def is_module(self, node: ast.AST) -> bool:
        """Whether an expression is a name of an imported module, such as ``F`` or ``torch``."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and isinstance(self.known.get(node.id), ModuleType)

    def arguments(self, call: ast.Call, name: str = "") -> list[ast.expr]:
        """The argument of that name, or the one after the tensor; without a name, the tensor itself. At most one."""
        own = [call.func.value] if isinstance(call.func, ast.Attribute) and not self.is_module(call.func.value) else []
        named = [one.value for one in call.keywords if name and one.arg == name]
        return named[:1] or [*own, *call.args][bool(name) : bool(name) + 1]


class NotWrittenError(Exception):
    """A line is written in another form than an edit needs."""


N = TypeVar("N")


def only(found: Sequence[N]) -> N:
    """The only one.

    Raises:
        NotWrittenError: there is not exactly one.
    """
    if len(found) != 1:
        raise NotWrittenError
    return found[0]


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def place_of(function: Callable[..., Any]) -> SourcePlace | None:
    """Where a function is written; None if that is not known, or in an installed package."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    return None if code is None else _place(code.co_filename, code.co_firstlineno, inner.__globals__)


def running() -> SourcePlace | None:
    """The line of the user's source that is being run, outside torch and rankscope."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return None if frame is None else _place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def _place(file: str, line: int, known: Mapping[str, Any]) -> SourcePlace | None:
    if file.startswith((*_OURS, _STDLIB)) or _PACKAGES & set(Path(file).parts):
        return None
    source = "".join(linecache.getlines(file))
    inside = [one for one in _functions(source) if one[1] <= line <= (one[2].end_lineno or 0)]
    if not inside:
        return None
    name, _, node = max(inside, key=lambda one: one[1])
    return SourcePlace(name, node, source, file, line, known)


@lru_cache(maxsize=32)
def _functions(source: str) -> tuple[tuple[str, int, ast.FunctionDef | ast.AsyncFunctionDef], ...]:
    """Name, first line and tree of every function."""

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (*_Function, ast.ClassDef)):
                name = f"{prefix}.{child.name}" if prefix else child.name
            if isinstance(child, _Function):
                yield name, min([child.lineno, *(one.lineno for one in child.decorator_list)]), child
            yield from inside(child, name)

    try:
        return tuple(inside(ast.parse(source), ""))
    except SyntaxError:  # a file that was changed since it was imported, or is not Python
        return ()


def said(place: SourcePlace, edits: Sequence[Edit]) -> str:
    """The edits as a sentence."""
    steps = [f"write `{one.new}` instead of `{one.old}`" if one.new else f"remove `{one.old}`" for one in edits]
    return f"In `{place.name}`, {', and '.join(steps)}"


def tried(place: SourcePlace, edits: Sequence[Edit], helps: Callable[[], bool]) -> bool:
    """Whether the model runs with the edits and they help."""
    try:
        with _carried_out(place, edits) as possible:
            return possible and helps()
    except (RankscopeError, SyntaxError, RuntimeError, ValueError, TypeError, LookupError, NameError, AttributeError):
        return False  # the edit does not fit, or the source has changed since it was imported


@contextmanager
def _carried_out(place: SourcePlace, edits: Sequence[Edit]) -> Iterator[bool]:
    """Run with a function as the edits make it; False if that cannot be done.

    The whole file is compiled again with the edits and none of it is run: only the code of this function is taken from
    it, so that every name in it means what it means in the file.
    """
    begin, end = place._span(place.node)
    raw = place.source.encode()
    text = raw[begin:end].decode()
    for one in edits:
        if one.old not in text:
            yield False
            return
        text = text.replace(one.old, one.new or "pass")
    as_written = _code_of(place, place.source)
    edited = _code_of(place, (raw[:begin] + text.encode() + raw[end:]).decode())
    # The function is found by its code, which also shows that the file was not changed since it was imported.
    functions = [one for one in gc.get_objects() if type(one) is FunctionType and one.__code__ == as_written]
    functions = [one for one in functions if one.__code__.co_filename == place.file]
    if edited is None or not functions:
        yield False
        return
    originals = [one.__code__ for one in functions]
    try:
        for function in functions:
            function.__code__ = edited
        yield True
    finally:
        for function, original in zip(functions, originals, strict=True):
            function.__code__ = original


def _code_of(place: SourcePlace, source: str) -> CodeType | None:
    """The code of a function in a file; it begins at the same line after an edit."""
    first = min([place.node.lineno, *(one.lineno for one in place.node.decorator_list)])
    waiting = [compile(source, place.file, "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        if code.co_name == place.node.name and code.co_firstlineno == first:
            return code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return None


def with_skips(place: SourcePlace, block: nn.Module) -> list[Edit]:
    """``x + f(x)`` wherever a forward assigns or returns ``f(x)``, with the name of its first input for ``x``."""
    names = [one.arg for one in place.node.args.args]
    if len(names) < 2:
        return []
    stream, edits = names[1], []
    of_stream = {stream}
    for one in _statements(place):
        value = one.value
        if value is None or isinstance(value, ast.Tuple) or _is_name(value, stream) or _adds(value, stream):
            continue
        reads = any(_names(value, name) for name in of_stream)
        if reads and isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            of_stream.add(one.targets[0].id)
        again = isinstance(one, ast.Assign) and _is_name(one.targets[0], stream) and reads
        if not (again or isinstance(one, ast.Return)):
            continue
        if isinstance(value, ast.Call) and len(value.args) == 1 and _is_norm(value.func, block):
            value = value.args[0]  # a norm after the sum
            if _is_name(value, stream) or _adds(value, stream):
                continue
        text = place.text(value)
        text = f"({text})" if isinstance(value, (ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda)) else text
        edits.append(Edit(place.text(one), place.text(one, {value: f"{stream} + {text}"})))
    return edits


def _adds(value: ast.expr, stream: str) -> bool:
    """Whether an expression is a sum with the stream itself."""
    if not (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)):
        return False
    return any(_is_name(side, stream) or _adds(side, stream) for side in (value.left, value.right))


def with_whole_skips(place: SourcePlace) -> list[Edit]:
    """``x + f(x)`` for ``g * x + f(x)``."""
    edits = []
    for one in _statements(place):
        for total in ast.walk(one):
            if not (isinstance(total, ast.BinOp) and isinstance(total.op, ast.Add)):
                continue
            for side, branch in ((total.left, total.right), (total.right, total.left)):
                if not (isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult)):
                    continue
                for stream, gain in ((side.left, side.right), (side.right, side.left)):
                    if isinstance(stream, ast.Name) and _names(branch, stream.id) and not _names(gain, stream.id):
                        edits.append(Edit(place.text(one), place.text(one, {side: stream.id})))
    return edits


def with_norms_first(place: SourcePlace, block: nn.Module) -> list[Edit]:
    """``x + f(norm(x))`` for ``norm(x + f(x))``."""
    edits = []
    for one in _statements(place):
        for norm in ast.walk(one):
            if not (isinstance(norm, ast.Call) and len(norm.args) == 1 and not norm.keywords):
                continue
            total = norm.args[0]
            if not (isinstance(total, ast.BinOp) and isinstance(total.op, ast.Add) and _is_norm(norm.func, block)):
                continue
            stream, branch = total.left, total.right
            if not isinstance(stream, ast.Name):
                stream, branch = branch, stream
            if not isinstance(stream, ast.Name) or not _names(branch, stream.id):
                continue
            normed = f"{place.text(norm.func)}({stream.id})"
            read = {n: normed for n in ast.walk(branch) if _is_name(n, stream.id)}
            edits.append(Edit(place.text(one), place.text(one, {norm: f"{stream.id} + {place.text(branch, read)}"})))
    return edits


def _is_norm(func: ast.expr, block: nn.Module) -> bool:
    """Whether ``self.name`` is a module of the block without a matrix."""
    if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)):
        return False
    module = getattr(block, func.attr, None)
    return isinstance(module, nn.Module) and all(p.ndim < 2 for p in module.parameters())


def _statements(place: SourcePlace) -> Iterator[ast.Assign | ast.Return]:
    nested = {
        id(n) for f in ast.walk(place.node) if isinstance(f, _Function) and f is not place.node for n in ast.walk(f)
    }
    for one in ast.walk(place.node):
        if id(one) in nested:
            continue
        if isinstance(one, ast.Return) or (isinstance(one, ast.Assign) and len(one.targets) == 1):
            yield one


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _names(node: ast.AST, name: str) -> bool:
    return any(_is_name(one, name) for one in ast.walk(node))


def fitting(edit: Callable[..., list[Edit]], place: SourcePlace | None, *given: Any) -> list[Edit]:
    """An edit of a line; nothing if the place is not known, or is written in another form."""
    try:
        return [] if place is None else edit(place, *given)
    except NotWrittenError:
        return []


def over_axis(place: SourcePlace, axis: int) -> list[Edit]:
    """The softmax on this line over another axis."""
    call = only(place.calls("softmax", "log_softmax"))
    return [Edit(place.text(call), place.text(call, {only(place.arguments(call, "dim")): str(axis)}))]


def without_call(place: SourcePlace, *names: str) -> list[Edit]:
    """The tensor itself instead of the call on this line; an assignment to itself is removed."""
    call = only(place.calls(*names))
    given, whole = only(place.arguments(call)), place.statement(call)
    alone = isinstance(whole, ast.Assign) and whole.value is call and len(whole.targets) == 1
    if isinstance(whole, ast.Assign) and alone and isinstance(given, ast.Name) and _is_name(whole.targets[0], given.id):
        return [Edit(place.text(whole), "")]
    return [Edit(place.text(call), place.text(given))]


_SIGNS: Mapping[str, type[ast.operator]] = {
    "mul": ast.Mult, "truediv": ast.Div, "div": ast.Div, "add": ast.Add, "sub": ast.Sub, "pow": ast.Pow
}  # fmt: skip


def operation(place: SourcePlace, name: str) -> ast.Call | ast.BinOp:
    """The only call of a function, or the only sign that calls it, on a line.

    Raises:
        NotWrittenError: there is not exactly one.
    """
    plain = name.strip("_")
    signs = {_SIGNS[one] for one in (plain, plain[1:]) if one in _SIGNS}
    found = [
        node
        for node in ast.walk(place.node)
        if isinstance(node, ast.BinOp)
        and type(node.op) in signs
        and node.lineno <= place.line <= (node.end_lineno or node.lineno)
    ]
    written: list[ast.Call | ast.BinOp] = [*place.calls(plain, f"{plain}_"), *found]
    return only(written)


def without_operation(place: SourcePlace, name: str, at: int) -> list[Edit]:
    """One of the tensors that an operation on this line takes instead of it; nothing if it is not known as written."""
    node = operation(place, name)
    if isinstance(node, ast.Call):
        return [] if at else without_call(place, name.strip("_"), f"{name.strip('_')}_")
    sides = [side for side in (node.left, node.right) if not _is_number(side)]
    return [Edit(place.text(node), place.text(sides[at]))] if at < len(sides) else []


def _is_number(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def causal(place: SourcePlace, masking: SourcePlace | None) -> list[Edit]:
    """A causal mask before the softmax on a line, or instead of the mask that is filled in on another."""
    here = masking or place
    call = only(here.calls("masked_fill" if masking else "softmax"))
    scores = only(here.arguments(call))
    if not isinstance(scores, ast.Name):
        return []
    hidden = f"torch.ones_like({scores.id}, dtype=torch.bool).triu(1)"
    new: dict[ast.AST, str] = (
        {only(here.arguments(call, "mask")): hidden}
        if masking
        else {scores: f"{scores.id}.masked_fill({hidden}, -torch.inf)"}
    )
    return [Edit(here.text(call), here.text(call, new))]


def masked_before(softmax: SourcePlace, masking: SourcePlace | None) -> list[Edit]:
    """The mask that is filled in after a softmax, filled in before it."""
    if masking is None or softmax.node is not masking.node:
        return []
    soft, fill = only(softmax.calls("softmax")), only(masking.calls("masked_fill"))
    scores, mask = only(softmax.arguments(soft)), only(masking.arguments(fill, "mask"))
    names = {n.id for n in ast.walk(mask) if isinstance(n, ast.Name)}
    later = (n for n in ast.walk(softmax.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    if any(n.id in names and n.lineno >= soft.lineno for n in later):
        return []
    before = softmax.text(soft, {scores: f"{softmax.text(scores)}.masked_fill({softmax.text(mask)}, -torch.inf)"})
    if only(masking.arguments(fill)) is soft:
        return [Edit(softmax.text(fill), before)]
    return [Edit(softmax.text(soft), before), *without_call(masking, "masked_fill")]


def kept_result(masking: SourcePlace) -> list[Edit]:
    """``scores = scores.masked_fill(...)`` for a call whose result is dropped."""
    call = only(masking.calls("masked_fill"))
    given = only(masking.arguments(call))
    if not isinstance(given, ast.Name) or not isinstance(masking.statement(call), ast.Expr):
        return []
    return [Edit(masking.text(call), f"{given.id} = {masking.text(call)}")]


def scaled_once(softmax: SourcePlace, width: int) -> list[Edit]:
    """The product of queries and keys before a softmax, divided once by the square root of the width of a head."""
    products: list[ast.expr] = [
        node
        for node in ast.walk(softmax.node)
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.Call) and _called(node) in ("matmul", "bmm", "einsum"))
    ]
    product = whole = only([node for node in products if (node.end_lineno or 0) <= softmax.line])
    for node in reversed(list(ast.walk(softmax.node))):  # the factors that scale it
        scales = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))
        if isinstance(node, ast.BinOp) and scales and (node.left is whole or node.right is whole):
            whole = node
    return [Edit(softmax.text(whole), f"{softmax.text(product)} / {width}**0.5")]


def reading(model: nn.Module, name: str) -> SourcePlace | None:
    """The first forward in a model that has an argument of that name."""
    places = (place_of(kind.forward) for kind in {type(module): None for module in model.modules()})
    return next((one for one in places if one and name in [given.arg for given in one.node.args.args]), None)


def with_argument(place: SourcePlace, names: Sequence[str], value: str) -> list[Edit]:
    """Another value for a keyword argument of a call."""
    given = [one for call in ast.walk(place.node) if isinstance(call, ast.Call) for one in call.keywords]
    return [Edit(place.text(one), f"{one.arg}={value}") for one in given if one.arg in names][:1]
