"""Running one block of a model's own forward pass.

The model's own code runs unchanged. Each block is called through a gate: the blocks before the requested one do not run
and return the state stored by the previous stage, and the pass ends after the requested one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import RankscopeError, UnsupportedConfigError
from rankscope.models.view import ModelView


class PassEnds(Exception):  # noqa: N818  (not an error: leaves a forward pass whose rest is not needed)
    """The requested block of this forward pass has run."""


class BlockGate:
    """Replaces the call of every block of a model with one stack.

    Args:
        view: the model and its structure.
    """

    def __init__(self, view: ModelView) -> None:
        modules = view.modules()
        self._model = view.model
        self._calls = view.stacks[0].calls
        self._blocks = list({id(module): module for module in (modules[c.module_name] for c in self._calls)}.values())
        self._wanted = 0
        self._arrived = 0
        self._state: Any = None
        self._blank: Any = None
        self.out: Any = None

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Install the gate; the blocks keep their names, hooks and attributes, and are restored afterwards."""
        with ExitStack() as stack:
            for block in self._blocks:
                stack.callback(block.register_forward_hook(self._keep).remove)
                stack.enter_context(_gated(block, self._arrive))
            stack.enter_context(_gated(self._model, self._run))
            yield

    def open_at(self, number: int, state: Any) -> None:
        """The next forward pass runs block call ``number``; ``state`` is the output of the call before it."""
        self._wanted, self._arrived, self._state, self.out = number, 0, state, None
        self._blank = map_tensors(state, _blank)

    def close(self) -> Any:
        """Release the tensors; returns the output of the block."""
        out, self.out, self._state, self._blank = self.out, None, None, None
        return out

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.out = output

    def _run(self, run: Callable[[], Any]) -> Any:
        """Run the model itself: a pass that ends early returns None.

        Raises:
            UnsupportedConfigError: the pass fails before it reaches the requested block.
        """
        try:
            return run()
        except PassEnds:
            return None
        except RankscopeError:
            raise
        except Exception as error:
            if self._arrived > self._wanted:  # the requested block ran: its own error, not one of skipping blocks
                raise
            raise UnsupportedConfigError(
                f"{type(self._model).__name__} cannot be run one block at a time: with the blocks before number "
                f"{self._wanted} skipped, {type(error).__name__}: {error}. Leave offload out; a model "
                "larger than memory can be loaded with device_map= of transformers, and passed."
            ) from error

    def _arrive(self, run: Callable[[], Any]) -> Any:
        number, self._arrived = self._arrived, self._arrived + 1
        if number == self._wanted:
            run()
            raise PassEnds
        # The block right before returns the stored state. Earlier ones return zeros of the same shapes, which
        # only serve the model's own code between the blocks.
        return self._state if number == self._wanted - 1 else self._blank


@contextmanager
def _gated(module: nn.Module, arrive: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Give this one object a subclass of its class with another ``__call__``.

    Replacing ``forward`` is not enough: a skipped block must not run its hooks either.
    """
    own = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return arrive(lambda: own.__call__(self, *args, **kwargs))

    facts = {"__call__": call, "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    module.__class__ = type(own.__name__, (own,), facts)
    try:
        yield
    finally:
        module.__class__ = own


def _blank(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same tuples, lists and dictionaries with each tensor replaced.

    Raises:
        UnsupportedConfigError: blocks return something that cannot be stored between stages.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if type(tree) in (tuple, list):
        return type(tree)(map_tensors(item, function) for item in tree)
    if type(tree) is dict:
        return {name: map_tensors(item, function) for name, item in tree.items()}
    raise UnsupportedConfigError(
        f"The blocks of this model pass a {type(tree).__name__} from one to the next, which cannot be stored "
        "between blocks. Measure it without offload, or load it with device_map= of transformers."
    )
