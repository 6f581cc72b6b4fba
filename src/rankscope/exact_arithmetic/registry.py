"""The registry of rules, by ATen operation, and the refusal of operations without one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from rankscope.errors import UnsupportedArithmeticError

RuleFunction = TypeVar("RuleFunction", bound=Callable[..., Any])
RULES: dict[Any, Callable[..., Any]] = {}


def rule(*operations: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule of these ATen operations (``torch.ops.aten.mm``).

    Give an operation that not every torch version has by name (``"_grouped_mm"``), and one that another library
    registers, perhaps later, by namespace and name (``"transformers.grouped_mm_fallback"``). The function receives the
    arguments of the operation, at least one of which is a Deviation, and returns what the operation returns. The rule
    for ``add`` is also used for ``add_``.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for named in operations:
            is_atens = isinstance(named, str) and "." not in named
            operation = getattr(torch.ops.aten, named, None) if is_atens else named
            if operation in RULES:
                raise ValueError(f"{operation} has two rules.")
            if operation is not None:
                RULES[operation] = function
        return function

    return register


def refuse(operation: Any, why: str = "it has no rule") -> NoReturn:
    """Raise, naming the operation, the module that runs it, and what to do."""
    raise UnsupportedArithmeticError(str(operation), _running_module(), why)


def _running_module() -> str:
    """The innermost module whose forward is running, found on the Python stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return f"{type(owner).__module__}.{type(owner).__qualname__}"
        frame = frame.f_back
    return "no module"
