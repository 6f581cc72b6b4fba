"""Records a pass block by block: values are kept while a block runs, it is asked when it ends, and they are dropped."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from rankscope.models.view import Stack
from rankscope.models.wrapping import hidden
from rankscope.pass_graph.ir import Call
from rankscope.pass_graph.record import GraphRecorder


class BlockRecorder(GraphRecorder):  # type: ignore[no-untyped-call]
    """Never holds the values of more than one block.

    Args:
        stacks: the blocks.
    """

    def __init__(self, stacks: Iterable[Stack]) -> None:
        super().__init__()
        self._awaited = [
            (call.module_name, stack, number) for stack in stacks for number, call in enumerate(stack.calls)
        ]
        self._now: tuple[Call, Stack, int] | None = None

    def begun(self, call: Call, stack: Stack, number: int) -> None:
        """A block has begun."""

    def ended(self, call: Call, stack: Stack, number: int) -> None:
        """A block has ended, and its operations are those of the graph."""

    def enter(
        self, name: str, *, normalises: bool = False, number: int | None = None, taken: Tensor | None = None
    ) -> None:
        """Keep contents from here on, if a block begins."""
        block = None if self._now else next((one for one in self._awaited if one[0] == name), None)
        if block is not None:
            self.forget()
            self.keeps = True
        super().enter(name, normalises=normalises, number=number, taken=taken)
        if block is not None and self.call is not None:
            self._awaited.remove(block)
            self._now = self.call, *block[1:]
            self.begun(*self._now)

    def leave(self, returned: Tensor | None, product_of: Tensor | None = None, output: object = None) -> None:
        """Ask, and drop what was recorded, if a block ends."""
        call = self.call
        super().leave(returned, product_of)
        if self._now is not None and self._now[0] is call:
            with hidden():
                self.ended(*self._now)
                self.forget()
            self.keeps, self._now = False, None
