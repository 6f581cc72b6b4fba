"""Attention within windows of an image: a window is no sequence, and stages differ in resolution and width.

The networks roll the image, cut it into windows and attend in each, as Swin does, or also over a grid of distant
tokens, as MaxViT does. The twins attend among all tokens at once, and hide those of other windows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tests.hostile import twin as plain
from tests.hostile.case import case
from tests.hostile.layouts import floats
from tests.hostile.parts import Attention, Block
from tests.hostile.twin import Cut, Twin

SIDE, WINDOW = 4, 2
put = partial(case, core={"measure", "skip0"}, equal=frozenset({"doctor", "measure"}))


class WindowAttention(Attention):
    """Attention in windows of two by two tokens, after a shift of the image by one token along both axes or none."""

    def __init__(self, dim: int, shift: int, *, grid: bool = False) -> None:
        super().__init__(dim)
        self.shift, self.grid = shift, grid

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        side = round(x.flatten(1, -2).shape[1] ** 0.5)
        image = x.reshape(x.shape[0], side, side, -1).roll((-self.shift, -self.shift), (1, 2))
        wrapped = torch.arange(side) >= side - self.shift
        regions = (wrapped[:, None].int() + 2 * wrapped[None, :].int())[None, ..., None]
        parts, labels = self._windows(image), self._windows(regions)[..., 0]
        apart = (labels[:, :, None] != labels[:, None, :])[:, None].repeat(x.shape[0], 1, 1, 1)
        mixed = super().forward(parts, apart if self.shift else None)
        return self._image(mixed, side).roll((self.shift, self.shift), (1, 2)).reshape(x.shape)

    def _windows(self, image: Tensor) -> Tensor:
        """(batch * windows, tokens of a window, channels)."""
        batch, side, _, channels = image.shape
        many = side // WINDOW
        if self.grid:
            cut = image.view(batch, WINDOW, many, WINDOW, many, channels).permute(0, 2, 4, 1, 3, 5)
        else:
            cut = image.view(batch, many, WINDOW, many, WINDOW, channels).permute(0, 1, 3, 2, 4, 5)
        return cut.reshape(-1, WINDOW * WINDOW, channels)

    def _image(self, windows: Tensor, side: int) -> Tensor:
        many = side // WINDOW
        cut = windows.view(-1, many, many, WINDOW, WINDOW, windows.shape[-1])
        order = (0, 3, 1, 4, 2, 5) if self.grid else (0, 1, 3, 2, 4, 5)
        return cut.permute(order).reshape(-1, side, side, windows.shape[-1])

    def by_hand(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        """All tokens at once; each sees those of its own window that the shift has not wrapped around."""
        side = round(x.shape[1] ** 0.5)
        places = []
        for row in range(side):
            for column in range(side):
                at = [(place - self.shift) % side for place in (row, column)]
                own = [place % (side // WINDOW) if self.grid else place // WINDOW for place in at]
                places.append((*own, row < self.shift, column < self.shift))
        apart = torch.tensor([[one != other for other in places] for one in places])
        return super().by_hand(x, cut, apart)


class _Narrow(Block):
    shift, grid = 0, False

    def make_attention(self) -> nn.Module:
        return WindowAttention(self.dim, self.shift, grid=self.grid)


class _NarrowShifted(_Narrow):
    shift = 1


class _NarrowGrid(_Narrow):
    grid = True


class _Wide(_Narrow):
    dim = 16


class _Stage(nn.Module):
    """Blocks, and a map in front that makes one token of four."""

    def __init__(self, blocks: list[type[Block]], *, merges: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * 8) if merges else None
        self.merge = nn.Linear(4 * 8, 16, bias=False) if merges else None
        self.blocks = nn.ModuleList(block() for block in blocks)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None and self.merge is not None:
            image = x.reshape(x.shape[0], SIDE, SIDE, -1)
            corners = [image[:, row::2, column::2] for row, column in ((0, 0), (1, 0), (0, 1), (1, 1))]
            merged = self.merge(self.norm(torch.cat(corners, -1)))
            x = merged if x.dim() == 4 else merged.flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


class Swin(nn.Module):
    """Two stages; the stream of a stage is (batch, tokens, channels)."""

    first: tuple[type[Block], ...] = (_Narrow, _NarrowShifted)
    flat = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.positions = nn.Parameter(torch.empty(SIDE * SIDE, 8))
        self.layers = nn.ModuleList([_Stage([*self.first], merges=False), _Stage([_Wide, _Wide], merges=True)])
        self.head = nn.Linear(16, 5, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.permute(0, 2, 3, 1).flatten(1, 2)) + self.positions
        x = x if self.flat else x.unflatten(1, (SIDE, SIDE))
        for stage in self.layers:
            x = stage(x)
        return self.head(x).flatten(1, -2)

    def twin(self, cut: Cut, images: Tensor) -> Twin:
        x = plain.linear(self.embed, images.permute(0, 2, 3, 1).flatten(1, 2)) + self.positions
        states: list[Tensor] = []
        for stage in self.layers:
            if stage.merge is not None:
                numbers = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
                corners = [numbers[row::2, column::2].flatten() for row, column in ((0, 0), (1, 0), (0, 1), (1, 1))]
                four = torch.cat([x[:, corner] for corner in corners], -1)
                x = plain.linear(stage.merge, plain.norm(stage.norm, four))
            for block in stage.blocks:
                x = block.twin(x, cut.at(len(states)))
                states.append(x)
        return Twin(plain.linear(self.head, x), states)


class SwinImages(Swin):
    """The stream of a stage is an image, (batch, height, width, channels)."""

    flat = False


class MaxVit(SwinImages):
    """Windows and grids in turn."""

    first = (_Narrow, _NarrowGrid)


put("swin", Swin, inputs=lambda: floats(2, 3, SIDE, SIDE))
put("swin_images", SwinImages, inputs=lambda: floats(2, 3, SIDE, SIDE))
put("swin_one_image", Swin, inputs=lambda: floats(1, 3, SIDE, SIDE))
put("max_vit", MaxVit, inputs=lambda: floats(3, 3, SIDE, SIDE))
