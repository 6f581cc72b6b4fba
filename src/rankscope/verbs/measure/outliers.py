"""Massive activations: single entries of the stream that are thousands of times larger than the others.

An entry is an outlier if its absolute value is more than :data:`TIMES_MEDIAN` times the median absolute value of its
sequence after the same block (Sun et al. 2024 also ask for more than 100, which depends on the scale of a model and is
left out). The table says at which token and channel it sits, after which block it first appears and after which last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rankscope.stream.sites import SiteRef
from rankscope.verbs.reader import SiteReader

SITE = "block.out"
TIMES_MEDIAN = 1000.0
MOST_PER_BLOCK = 8
MOST_ROWS = 8
_SAMPLE = 4096
DEVICE_SAMPLE = 1 << 16
"""On an accelerator the median is that of about this many evenly spaced entries: the host does not wait to learn where
the exact one is needed, and it costs more than the block. For Gaussian entries its standard error is half a percent."""

Place = tuple[str | None, int, int, int]
"""Stack, sequence, token and channel."""


@dataclass
class Life:
    """The blocks after which an entry was an outlier, and its largest value.

    Attributes:
        born: the first of these blocks.
        last: the last of them.
        value: the value with the largest absolute value.
        block: the block after which it had that value.
        times: that value over the median absolute value there.
    """

    born: int
    last: int
    value: float
    block: int
    times: float

    def extend(self, other: Life) -> None:
        """Merge what was seen of the same entry after other blocks."""
        self.born, self.last = min(self.born, other.born), max(self.last, other.last)
        if abs(other.value) > abs(self.value):
            self.value, self.block, self.times = other.value, other.block, other.times


class OutlierReader:
    """Records the outliers after each block.

    Args:
        reader: knows the batch and which tokens count.
    """

    def __init__(self, reader: SiteReader) -> None:
        self._reader = reader
        self._lives: dict[Place, Life] = {}
        self._last: dict[str | None, int] = {}

    def __call__(self, ref: SiteRef, seen: Tensor) -> None:
        """Look for outliers in the stream after a block."""
        if ref.site == SITE:
            self._look(ref, seen)

    def rows(self, sequences: int, labels: list[str]) -> list[dict[str, Any]]:
        """Entries of the run: the largest outliers, those of the same token and channel of all sequences together.

        Args:
            sequences: number of sequences that were finished; others are left out.
            labels: the tokens of sequence 0, or empty.
        """
        groups: dict[tuple[str | None, int, int], tuple[Life, set[int]]] = {}
        for (stack, sequence, token, channel), life in self._lives.items():
            if sequence < sequences:
                known, members = groups.setdefault((stack, token, channel), (replace(life), set()))
                known.extend(life)
                members.add(sequence)
        ranked = sorted(groups.items(), key=lambda item: -abs(item[1][0].value))
        return [
            {
                "stack": stack,
                "token": token,
                "text": labels[token] if 0 in members and token < len(labels) else None,
                "channel": channel,
                **asdict(life),
                "to_the_end": life.last == self._last[stack],
                "sequences": len(members),
                "of_sequences": sequences,
            }
            for (stack, token, channel), (life, members) in ranked[:MOST_ROWS]
        ]

    def seen(self) -> dict[str, Any]:
        """What was found, as JSON."""
        return {
            "lives": [[list(place), asdict(life)] for place, life in self._lives.items()],
            "last": [[stack, layer] for stack, layer in self._last.items()],
        }

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Merge what another reader found."""
        for (stack, sequence, token, channel), life in seen["lives"]:
            self._add((stack, sequence, token, channel), Life(**life))
        for stack, layer in seen["last"]:
            self._last[stack] = max(layer, self._last.get(stack, 0))

    def _add(self, place: Place, life: Life) -> None:
        self._lives.setdefault(place, life).extend(life)

    def _look(self, ref: SiteRef, x: Tensor) -> None:
        self._last[ref.stack] = max(ref.layer, self._last.get(ref.stack, 0))
        if x.shape[1] == 0:
            return
        keep = self._reader.valid(x)
        size = x.detach().abs()
        if keep is not None:
            size = size.masked_fill(~keep.unsqueeze(-1), 0.0)
        if x.device.type != "cpu":
            self._look_later(ref, x.detach(), size, keep)
            return
        # The median over all entries costs more than the metrics. Take it only if a sample suggests an outlier.
        entries = size.flatten(1)
        step = max(1, entries.shape[1] // _SAMPLE)
        some = (
            entries[:, ::step] if keep is None else entries[:, ::step].masked_fill(entries[:, ::step] == 0, torch.nan)
        )
        suspicious = entries.amax(-1) > TIMES_MEDIAN / 4 * some.nanmedian(-1).values
        for row in suspicious.nonzero().flatten().tolist():
            counted = size[row] if keep is None else size[row][keep[row]]
            median = float(counted.median())
            if median > 0 and bool(counted.isfinite().all()):
                places = entries[row].topk(min(MOST_PER_BLOCK, entries.shape[1])).indices
                self._note(ref, self._reader.first_sequence + row, median, places, x[row].flatten()[places], x.shape[2])

    def _look_later(self, ref: SiteRef, x: Tensor, size: Tensor, keep: Tensor | None) -> None:
        """The largest entries of every sequence and a sampled median; judged after the pass, on the host."""
        entries, width, first = size.flatten(1), x.shape[2], self._reader.first_sequence
        step = max(1, entries.shape[1] // DEVICE_SAMPLE)
        while math.gcd(step, width) > 1:  # else only some of the channels would be sampled
            step += 1
        counted = entries if keep is None else size.masked_fill(~keep.unsqueeze(-1), torch.nan).flatten(1)
        medians = counted[:, ::step].nanmedian(-1).values
        places = entries.topk(min(MOST_PER_BLOCK, entries.shape[1])).indices  # NaN counts as largest

        def judge(medians: Tensor, places: Tensor, entries: Tensor) -> None:
            for row, median in enumerate(medians.tolist()):
                if median > 0 and bool(entries[row].isfinite().all()):
                    self._note(ref, first + row, median, places[row], entries[row], width)

        self._reader.later((medians, places, x.flatten(1).gather(1, places)), judge)

    def _note(self, ref: SiteRef, sequence: int, median: float, places: Tensor, entries: Tensor, width: int) -> None:
        for place, entry in zip(places.tolist(), entries.tolist(), strict=True):
            if abs(entry) > TIMES_MEDIAN * median:
                life = Life(ref.layer, ref.layer, entry, ref.layer, abs(entry) / median)
                self._add((ref.stack, sequence, *divmod(place, width)), life)
