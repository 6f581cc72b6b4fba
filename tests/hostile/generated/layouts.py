"""Orders and foldings of the axes of the stream, each with the way there from (batch, tokens, channels) and back.

Channels are all channels of a token: several streams lie side by side in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Way = Callable[[Tensor], Tensor]
Back = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Layout:
    """One layout.

    Args:
        name: as it is printed.
        fold: from (batch, tokens, channels).
        unfold: back, given the number of sequences.
        declared: what a user would write for ``rankscope.Stream``; None if no words describe it.
        axis: where the channels of one stream are.
        streams: how many streams the channels hold.
        windows: how many windows a sequence is cut into.
    """

    name: str
    fold: Way
    unfold: Back
    declared: str | None
    axis: int = -1
    streams: int = 1
    windows: int = 1


def _windows_minor(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).flatten(0, 1)


def _windows_major(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("batch tokens dim", lambda x: x, lambda x, n: x, "batch tokens dim"),
        Layout("tokens batch dim", lambda x: x.transpose(0, 1), lambda x, n: x.transpose(0, 1), "tokens batch dim"),
        Layout(
            "(batch tokens) dim", lambda x: x.flatten(0, 1), lambda x, n: x.unflatten(0, (n, -1)), "(batch tokens) dim"
        ),
        Layout(
            "(tokens batch) dim",
            lambda x: x.transpose(0, 1).flatten(0, 1),
            lambda x, n: x.unflatten(0, (-1, n)).transpose(0, 1),
            "(tokens batch) dim",
        ),
        Layout("batch dim tokens", lambda x: x.transpose(1, 2), lambda x, n: x.transpose(1, 2), "batch dim tokens", 1),
        Layout(
            "dim tokens batch", lambda x: x.permute(2, 1, 0), lambda x, n: x.permute(2, 1, 0), "dim tokens batch", 0
        ),
        Layout(
            "image, channels first",
            lambda x: x.transpose(1, 2).unflatten(2, (2, -1)),
            lambda x, n: x.flatten(2).transpose(1, 2),
            "batch dim tokens",
            1,
        ),
        Layout(
            "image, channels last", lambda x: x.unflatten(1, (2, -1)), lambda x, n: x.flatten(1, 2), "batch tokens dim"
        ),
        Layout(
            "windows of each sequence",
            _windows_minor,
            lambda x, n: x.unflatten(0, (n, -1)).flatten(1, 2),
            None,
            windows=2,
        ),
        Layout(
            "windows first",
            _windows_major,
            lambda x, n: x.unflatten(0, (-1, n)).transpose(0, 1).flatten(1, 2),
            None,
            windows=2,
        ),
        Layout(
            "batch tokens streams dim",
            lambda x: x.unflatten(2, (2, -1)),
            lambda x, n: x.flatten(2),
            "batch tokens streams dim",
            streams=2,
        ),
        Layout(
            "streams batch tokens dim",
            lambda x: x.unflatten(2, (2, -1)).permute(2, 0, 1, 3),
            lambda x, n: x.permute(1, 2, 0, 3).flatten(2),
            "streams batch tokens dim",
            streams=2,
        ),
        Layout(
            "(batch streams) tokens dim",
            lambda x: x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1),
            lambda x, n: x.unflatten(0, (n, -1)).transpose(1, 2).flatten(2),
            "(batch streams) tokens dim",
            streams=2,
        ),
        Layout(
            "batch heads tokens dim",
            lambda x: x.unflatten(2, (2, -1)).transpose(1, 2),
            lambda x, n: x.transpose(1, 2).flatten(2),
            "batch streams tokens dim",
        ),
        Layout("an idle axis", lambda x: x.unsqueeze(1), lambda x, n: x.squeeze(1), "batch streams tokens dim"),
    )
}
