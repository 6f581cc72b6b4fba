"""Modules that run more than once, whole blocks or parts of them."""

from __future__ import annotations

from functools import partial

from torch import nn

from tests.hostile.case import case
from tests.hostile.parts import Attention, Block, Mlp, Net
from tests.hostile.skips import Alpha, PostNorm

CORE = {"measure", "skip0", "one_block", "mlp", "norm", "uniform", "exact"}
put = partial(case, core=CORE)


class OneBlock(Net):
    """One block called three times."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__(block, depth=1)

    def calls(self) -> list[Block]:
        return [self.blocks[0]] * 3


class Alternating(Net):
    def __init__(self) -> None:
        super().__init__(Block, depth=2)

    def calls(self) -> list[Block]:
        return [*self.blocks, *self.blocks]


class OutOfOrder(Net):
    """The list is not walked from its first entry to its last, and one entry is never called."""

    def __init__(self) -> None:
        super().__init__(Block, depth=4)

    def calls(self) -> list[Block]:
        return [self.blocks[number] for number in (2, 0, 3, 0)]


class SharedPart(Net):
    """The blocks differ, and have one part in common."""

    def __init__(self, part: str, shared: type[nn.Module]) -> None:
        super().__init__()
        one = shared()
        for block in self.blocks:
            setattr(block, part, one)


class TiedNorms(Net):
    """One norm everywhere, the last one included."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm1 = block.norm2 = self.norm


put("one_block", OneBlock)
put("one_block_alpha", lambda: OneBlock(Alpha))
put("one_block_post_norm", lambda: OneBlock(PostNorm))
put("alternating", Alternating)
put("out_of_order", OutOfOrder)
put("shared_attention", lambda: SharedPart("attention", Attention))
put("shared_mlp", lambda: SharedPart("mlp", Mlp))
put("tied_norms", TiedNorms)
