"""Decomposes one batch after another: sums by length while the model runs, marginals afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rankscope.ext.paths.capture import run_frozen
from rankscope.ext.paths.census import census
from rankscope.ext.paths.lengths import LengthSums
from rankscope.ext.paths.marginals import Pick, head_marginals, through
from rankscope.ext.paths.network import FrozenBlock, FrozenNetwork
from rankscope.ext.paths.reading import PathReader
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView


@dataclass
class PathTask:
    """Decomposes one batch after another, each block as soon as it has run.

    What it records in addition to rows is given by :meth:`seen` and merged by :meth:`learn`, for several ranks.

    Attributes:
        view: the model.
        config: its configuration.
        reader: writes the rows.
        marginals: ``"heads"``, ``"layers"``.
        layers: blocks after which the lengths are reported as well.
        origins: report embedding, MLPs and biases separately.
    """

    view: ModelView
    config: Any
    reader: PathReader
    marginals: frozenset[str]
    layers: Collection[int]
    origins: bool
    _counts: dict[str, list[str]] = field(default_factory=dict)

    def run(self, batch: Batch) -> None:
        """Run the model on a batch and write its rows."""
        self.reader.batch = batch
        depth = {stack.name: stack.depth for stack in self.view.stacks}
        sums: dict[str | None, LengthSums] = {}
        kept: dict[str | None, FrozenNetwork] = {}
        heads: dict[str | None, list[tuple[int, bool]]] = {}

        def begin(stack: str | None, entry: Tensor) -> None:
            sums[stack] = LengthSums(depth[stack], self.origins)
            sums[stack].begin(entry)
            kept[stack] = FrozenNetwork(entry)
            heads[stack] = []

        def through_block(block: FrozenBlock) -> None:
            sums[block.stack].through(block)
            heads[block.stack] += [(s.heads.heads, s.skip is not None) for s in block.steps if s.heads is not None]
            if self.marginals:
                kept[block.stack].blocks.append(block)
            self._report(block, sums[block.stack])

        run_frozen(self.view, self.config, batch, begin, through_block)
        for stack, network in kept.items():
            counts = census([n for n, _ in heads[stack]], [skip for _, skip in heads[stack]]).counts
            self._counts[str(stack or "")] = [str(n) for n in counts]
            if self.marginals:
                self._read_marginals(stack, network)

    def seen(self) -> dict[str, Any]:
        """What was recorded in addition to the rows, as JSON."""
        lengths = [[stack, *item] for stack, own in self.reader.lengths.items() for item in own.items()]
        return {
            "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in self.reader.dtypes),
            "lengths": lengths,
            "sum_error": self.reader.sum_error,
            "counts": self._counts,
        }

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Add what another rank has seen."""
        self.reader.dtypes |= {getattr(torch, name) for name in seen["dtypes"]}
        for stack, sequence, count in seen["lengths"]:
            self.reader.lengths.setdefault(stack, {})[sequence] = count
        self.reader.sum_error = max(self.reader.sum_error, seen["sum_error"])
        self._counts |= seen["counts"]

    @property
    def described(self) -> dict[str, Any]:
        """What a run says in addition to its rows."""
        return {"sum_error": self.reader.sum_error, "path_counts": self._counts}

    def _report(self, block: FrozenBlock, sums: LengthSums) -> None:
        stack = next(stack for stack in self.view.stacks if stack.name == block.stack)
        is_last = block.is_final or (block.layer == stack.depth - 1 and stack.final_norm is None)
        if not is_last and block.layer not in self.layers:
            return
        place: dict[str, Any] = {"site": block.site, "stack": block.stack, "layer": block.layer}
        by_length = sums.by_length[: sums.reached + 1]
        self.reader.check(by_length, block.out)
        self.reader.read(by_length, block.out, at={"paths": "of a length"}, **place)
        if self.origins:
            for origin, parts in sums.sums.items():
                at = {"paths": "of a length", "origin": str(origin)}
                self.reader.read(parts[: sums.reached + 1], block.out, at=at, **place)

    def _read_marginals(self, stack: str | None, network: FrozenNetwork) -> None:
        site = network.blocks[-1].site
        if "heads" in self.marginals:
            for layer, each in head_marginals(network):
                at = {"paths": "through a head"}
                self.reader.read(
                    each, network.out, site=site, stack=stack, layer=layer, at=at, counted=None, head_axis=True
                )
        if "layers" in self.marginals:
            for layer, _ in network.attention:
                total = through(network, Pick(layer)).sum(dim=0)[None]
                at = {"paths": "through a layer"}
                self.reader.read(total, network.out, site=site, stack=stack, layer=layer, at=at, counted=None)
