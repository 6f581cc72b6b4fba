"""Decomposes one batch after another: sums by length while the model runs, marginals afterwards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rankscope.ext.paths.capture import Convention, run_frozen
from rankscope.ext.paths.census import census
from rankscope.ext.paths.lengths import LengthSums, theoretical_applications
from rankscope.ext.paths.marginals import Pick, composition, head_marginals, through
from rankscope.ext.paths.network import FrozenBlock, FrozenNetwork
from rankscope.ext.paths.reading import PathReader
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView


class PathTask:
    """Decomposes one batch after another, each block as soon as it has run."""

    def __init__(
        self,
        view: ModelView,
        config: Any,
        reader: PathReader,
        convention: Convention,
        marginals: frozenset[str],
        layers: Collection[int],
        origins: bool,
        chunk: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._view, self._config, self._reader = view, config, reader
        self._convention, self._marginals, self._layers = convention, marginals, frozenset(layers)
        self._origins, self._chunk, self._dtype = origins, chunk, dtype
        self._depth = {stack.name: stack.depth for stack in view.stacks}
        self._has_norm = {stack.name: stack.final_norm is not None for stack in view.stacks}
        self.applications = 0
        self.needed = 0
        self.counts: dict[str | None, tuple[int, ...]] = {}

    def run(self, batch: Batch) -> None:
        """Run the model on a batch and write its rows."""
        self._reader.batch = batch
        sums: dict[str | None, LengthSums] = {}
        kept: dict[str | None, FrozenNetwork] = {}
        heads: dict[str | None, list[tuple[int, bool]]] = {}

        def begin(stack: str | None, entry: Tensor) -> None:
            sums[stack] = LengthSums(self._depth[stack], self._origins, self._chunk)
            sums[stack].begin(entry)
            kept[stack] = FrozenNetwork(entry)
            heads[stack] = []

        def through_block(block: FrozenBlock) -> None:
            sums[block.stack].through(block)
            heads[block.stack] += [(s.heads.heads, s.skip is not None) for s in block.steps if s.heads is not None]
            if self._marginals:
                kept[block.stack].blocks.append(block)
            self._report(block, sums[block.stack])

        run_frozen(
            self._view, self._config, batch, begin, through_block, dtype=self._dtype, convention=self._convention
        )
        for stack, stack_sums in sums.items():
            self.applications += stack_sums.applications
            self.needed += theoretical_applications(stack_sums.reached) * len(stack_sums.sums)
            self.counts[stack] = census([n for n, _ in heads[stack]], [skip for _, skip in heads[stack]]).counts
            if self._marginals:
                self._read_marginals(stack, kept[stack])

    def _report(self, block: FrozenBlock, sums: LengthSums) -> None:
        last = block.is_final or (block.layer == self._depth[block.stack] - 1 and not self._has_norm[block.stack])
        if not last and block.layer not in self._layers:
            return
        place: dict[str, Any] = {"site": block.site, "stack": block.stack, "layer": block.layer}
        by_length = sums.by_length[: sums.reached + 1]
        self._reader.check(by_length, block.out)
        self._reader.read(by_length, block.out, at={"paths": "of a length"}, **place)
        if self._origins:
            for origin, parts in sums.sums.items():
                at = {"paths": "of a length", "origin": str(origin)}
                self._reader.read(parts[: sums.reached + 1], block.out, at=at, **place)

    def _read_marginals(self, stack: str | None, network: FrozenNetwork) -> None:
        site = network.blocks[-1].site
        if "heads" in self._marginals:
            for layer, each in head_marginals(network):
                at = {"paths": "through a head"}
                self._reader.read(
                    each, network.out, site=site, stack=stack, layer=layer, at=at, counted=None, head_axis=True
                )
        if "layers" in self._marginals:
            for layer, _ in network.attention:
                total = through(network, Pick(layer)).sum(dim=0)[None]
                at = {"paths": "through a layer"}
                self._reader.read(total, network.out, site=site, stack=stack, layer=layer, at=at, counted=None)
        if "pairs" in self._marginals:
            self._read_pairs(stack, network, site)

    def _read_pairs(self, stack: str | None, network: FrozenNetwork, site: str) -> None:
        assert self._reader.batch is not None
        shares = composition(network, self._reader.keep(network.out)).double().cpu().numpy()
        numbers = [layer for layer, _ in network.attention]
        for first in range(len(numbers)):
            for second in range(first + 1, len(numbers)):
                for head in range(shares.shape[-1]):
                    values = shares[:, first, :, second, head]
                    self._reader.writer.add(
                        metric="projection_share",
                        site=site,
                        stack=stack,
                        layer=numbers[first],
                        first_sequence=self._reader.batch.first_sequence,
                        values=values,
                        statuses=(values * 0).astype("int8"),
                        head_axis=True,
                        at={"paths": "through a pair", "then": f"{numbers[second]}.{head}"},
                    )
