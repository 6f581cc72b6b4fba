"""Which module runs while operations are seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode


class ModuleFollower(TorchFunctionMode):
    """Sees the operations of a pass and knows the innermost module that runs.

    Args:
        model: whose modules are named.

    Attributes:
        inside: names of the modules that run, the innermost last; None for those that are not part of the model. A list
            and no property, because the compiler traces the mode of a model that calls ``flex_attention``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self.inside: list[str | None] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow one pass."""
        begin = register_module_forward_pre_hook(lambda module, _: self.inside.append(self._names.get(module)))
        end = register_module_forward_hook(lambda *_: self._ended(), always_call=True)
        try:
            with self:
                yield
        finally:
            begin.remove()
            end.remove()

    def _ended(self) -> None:
        self.inside.pop()
