"""The networks of ``ablate``, and one table of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pyarrow as pa
from torch import nn
from tqdm.auto import tqdm

from rankscope._errors import InputError, UnsupportedOperationError
from rankscope.execution.interrupting import Finished
from rankscope.execution.passes import Streaming
from rankscope.execution.ranks import Share
from rankscope.masks import parse_mask
from rankscope.metrics import METRICS
from rankscope.models.inputs import Prepared, TokensPolicy
from rankscope.models.loading import LoadedModel, load_initialised_twin
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.spread import spread_of
from rankscope.models.stream import Stream
from rankscope.runs.ablation import lost_networks
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.verbs.ablating_by_blocks import Arm, BlockGrid
from rankscope.verbs.locating import where_it_breaks
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.variants import variant_named

OWN_MASK = "own"
Weights = Literal["given", "init", "both"]


def arms_of(variants: Sequence[str], masks: Sequence[str]) -> Iterator[Arm]:
    """Every variant under every mask."""
    for name in variants:
        variant = variant_named(name)
        for mask in masks:
            if mask == OWN_MASK:
                yield name, mask, variant.operation
            else:
                parsed = parse_mask(mask)
                yield name, str(parsed), replace(variant.operation, mask=parsed)


def models_of(loaded: LoadedModel, weights: Weights, seed: int) -> dict[str, nn.Module]:
    """The model, its random twin, or both, by the kind of their weights."""
    given = "init" if loaded.origin == "init" else "given"
    if weights == "given" or loaded.origin == "init":
        return {given: loaded.model}
    if spread_of(loaded.model) is not None:
        raise InputError(f"weights={weights!r}: the random twin of a model spread over processes would be whole.")
    twin = load_initialised_twin(loaded, seed=seed).model
    return {"init": twin} if weights == "init" else {"given": loaded.model, "init": twin}


class Grid:
    """Measures all networks into one table.

    Args:
        arms: the variants.
        metrics: names of token metrics.
        policy: which tokens count.
        prepared: the inputs.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, where it was declared.
        shown: whether there is a progress bar.

    Attributes:
        reader: has seen formats and lengths in the last network that could be run.
        refused: what was left out, and why.
        finished: counts networks.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        metrics: Sequence[str],
        policy: TokensPolicy,
        prepared: Prepared,
        blocks: str | Sequence[str] | None,
        stream: Stream | None,
        *,
        shown: bool,
    ) -> None:
        self._arms, self._policy, self._prepared = arms, policy, prepared
        self._blocks, self._stream, self._shown = blocks, stream, shown
        self._specs = [METRICS[name] for name in dict.fromkeys(metrics)]
        self._selection = SiteSelection.parse(("block.in@0", "block.out"))
        self._writer = RowWriter(coordinates=("variant", "mask", "weights"))
        self._models: Mapping[str, nn.Module] = {}
        self.reader = SiteReader(self._specs, policy, self._writer)
        self.refused: list[str] = []
        self.finished = Finished(self._writer, 0, "networks")

    def in_memory(self, models: Mapping[str, nn.Module], loaded: LoadedModel, share: Share) -> None:
        """One network after the other, the batches dealt out to the processes; then the rows of all of these."""
        self._models = models
        order = [(variant, mask, weights) for weights in models for variant, mask, _ in self._arms]
        self.finished = Finished(self._writer, len(order), "networks")
        bar = tqdm(total=len(order), desc="ablate", unit="network", disable=not self._shown)
        with bar, self.finished.kept(alone=share.is_alone):
            for weights, model in models.items():
                for arm in self._arms:
                    self._run(model, arm, weights, share)
                    self.finished.add()
                    bar.update()
        own = {"refused": self.refused}
        told = share.collect(self._writer, self.reader, loaded, own, order=order)
        self.refused = list(dict.fromkeys(sentence for remarks in told for sentence in remarks["refused"]))

    def by_blocks(self, streaming: Streaming) -> None:
        """All networks through a block before the next one's weights are read."""
        identity = ("ablate", [spec.name for spec in self._specs], self._policy, self._arms)
        walk = streaming.walk(self._prepared, identity, blocks=self._blocks, stream=self._stream, lanes=len(self._arms))
        grid = BlockGrid(self._arms, self._specs, self._policy, self._writer, self._selection)
        grid.run(walk, shown=self._shown)
        self.reader = grid.reader
        self.refused += grid.refused

    def table(self) -> pa.Table:
        """The rows.

        Raises:
            InputError: there are none.
        """
        found = self._writer.table()
        if found.num_rows == 0:
            raise InputError("None of the variants could be run. " + " ".join(self.refused))
        return found

    def where_it_breaks(self, table: pa.Table) -> list[str]:
        """Which module gives out NaN or infinity first, in the first network that does; looked for in one more pass."""
        lost = next(iter(lost_networks(table)), None)
        model = None if lost is None else self._models.get(lost.weights)
        if lost is None or model is None:
            return []
        operation = next(operation for *names, operation in self._arms if names == [lost.variant, lost.mask])
        view = view_of(model, self._prepared[0], blocks=self._blocks, stream=self._stream)
        with operating(model, operation, view=view), quiet_transformers():
            found = where_it_breaks(model, self._prepared)
        return [f"In {lost.name}: {sentence[:1].lower()}{sentence[1:]}" for sentence in found]

    def _run(self, model: nn.Module, arm: Arm, weights: str, share: Share) -> None:
        variant, mask, operation = arm
        at = {"variant": variant, "mask": mask, "weights": weights}
        reader = SiteReader(self._specs, self._policy, self._writer, at)
        with undisturbed(model), quiet_transformers():
            view = share.view(model, self._prepared, self._blocks, self._stream)
            try:
                observe = share.watch(reader)
                with operating(model, operation, view=view), trace(view, self._selection, observe):
                    for part in share.parts(self._prepared, model):
                        reader.start(part)
                        part.run(model)
            except UnsupportedOperationError as error:
                self.refused.append(f"{variant} under the mask {mask} was left out: {error}")
                return
        self.reader = reader
