"""``ablate``: which component prevents collapse?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import pyarrow as pa
from torch import nn

from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.execution.findings import Findings
from rankscope.execution.passes import Execution, Stage, executing
from rankscope.masks import parse_mask
from rankscope.metrics import METRICS, NORM_METRICS, PAIR_METRICS
from rankscope.models.inputs import InputsLike, Prepared, TokensPolicy, as_inputs, prepare_planned
from rankscope.models.loading import LoadedModel, load_initialised_twin
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.model import Model, ModelLike, as_model
from rankscope.models.wrapping import spread_of
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import known_view, undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.surgery.refusals import check_operable
from rankscope.surgery.surgery import SurgeryLike
from rankscope.verbs.ablate import ABLATE, EXECUTION, OWN
from rankscope.verbs.ablate.judge import judge_ablation, lost_networks
from rankscope.verbs.ablate.variants import DEFAULT_VARIANTS, variant_named
from rankscope.verbs.calling import checked
from rankscope.verbs.locating import where_it_breaks
from rankscope.verbs.origin import floor_of, in_context, provenance_of
from rankscope.verbs.reader import SiteReader

DEFAULT_METRICS = (*NORM_METRICS, *PAIR_METRICS, "stable_rank")


@checked(*OWN)
def ablate(
    model: ModelLike,
    inputs: InputsLike = None,
    surgery: SurgeryLike = None,
    *,
    variants: Sequence[str] | str | None = None,
    masks: Sequence[str] | str | None = None,
    metrics: Sequence[str] | str | None = None,
    weights: Weights = "given",
    progress: bool = False,
) -> Run:
    """Run variants of a model with components removed, and measure every block of each.

    Args:
        model: a :class:`rankscope.Model`, a spec or your own module, which is left unchanged.
        inputs: :class:`rankscope.Inputs`, or what is accepted in their place; see ``measure``.
        surgery: :class:`rankscope.Surgery` under which the model runs, or a dictionary of its fields; None for none.
            Each variant removes what it removes from the model so changed.
        variants: names from ``rankscope ls variants``; None for the grid of norms, skips and MLPs.
        masks: ``"own"`` for the model's own mask, or mask expressions such as ``"causal"`` or ``"window(1)"``.
        metrics: token metrics; None for the norm and pair metrics and the stable rank.
        weights: ``"given"``, ``"init"`` (a random initialisation of the same architecture) or ``"both"``.
        progress: show a progress bar.

    Returns:
        Rows as in ``measure``, with the further columns ``variant``, ``mask`` and ``weights``. What a model cannot
        undergo is left out, and the notes say so.

    Example:
        >>> from rankscope import Inputs
        >>> run = ablate("init:tiny-bert", Inputs(sequences=2, tokens=16), variants=["pure", "full"])
        >>> run.table.column_names[-3:]
        ['variant', 'mask', 'weights']
    """
    started = time.perf_counter()
    subject, given = as_model(model), as_inputs(inputs)
    plan = given.plan(**ABLATE.inputs_defaults, seed=subject.seed)
    if subject.offload and weights != "given":
        raise InputError(
            f"weights={weights!r}: offload reads the given weights; a random copy would be in memory as a whole."
        )
    arms = list(arms_of(variants or DEFAULT_VARIANTS, masks or (OWN_MASK,)))
    with executing(EXECUTION, subject, surgery, progress=progress) as execution:
        loaded = execution.loaded
        prepared = prepare_planned(loaded, given.data, plan)
        grid = Grid(arms, metrics or DEFAULT_METRICS, plan.policy, prepared, subject)
        grid.run(models_of(loaded, weights, subject.seed), execution)
        table = grid.table()
        floor = floor_of(grid.reader.dtypes)
        verdict = judge_ablation(
            table,
            floor["relative"],
            lengths=grid.reader.lengths,
            dim=min((width for _, width in grid.reader.shapes), default=None),
            model=subject.spec,
            pure="pure attention" if _attends(loaded.model) else "token mixing alone",
        )
        seconds = time.perf_counter() - started
        run = Run(
            kind="ablate",
            provenance=provenance_of(loaded, prepared, grid.reader, subject.seed, seconds, subject.declared_stream),
            floor=floor,
            **verdict.fields(),
            table=table,
            notes=(*loaded.notes, *prepared.notes, *grid.refused, *grid.where_it_breaks(table)),
            extra=execution.described,
        )
        return in_context(run, prepared)


def _attends(model: nn.Module | None) -> bool:
    """Whether attention was seen in any block; without a model in memory, nobody looked."""
    view = None if model is None else known_view(model)
    return view is None or any("attention" in (*p.skips, *p.attention) or "both" in p.skips
                               for stack in view.stacks for p in stack.plans)  # fmt: skip


OWN_MASK = "own"
GridCell = tuple[str, str, Operation]
"""Variant, mask, and the operation that combines them."""
SITES = SiteSelection.parse(("block.in@0", "block.out"))
Weights = Literal["given", "init", "both"]


def arms_of(variants: Sequence[str], masks: Sequence[str]) -> Iterator[GridCell]:
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
    """The model, a randomly initialised copy, or both, by the kind of their weights."""
    given = "init" if loaded.origin == "init" else "given"
    if weights == "given" or loaded.origin == "init":
        return {given: loaded.model}
    if spread_of(loaded.model) is not None:
        raise InputError(f"weights={weights!r}: the random copy of a sharded model would not be sharded.")
    twin = load_initialised_twin(loaded, seed=seed).model
    return {"init": twin} if weights == "init" else {"given": loaded.model, "init": twin}


class Grid:
    """Measures all networks into one table.

    Args:
        arms: the variants.
        metrics: names of token metrics.
        policy: which tokens count.
        prepared: the inputs.
        model: the model as the user wants it to be run.

    Attributes:
        reader: knows the dtypes and lengths seen in the last network that could be run.
    """

    def __init__(
        self,
        arms: Sequence[GridCell],
        metrics: Sequence[str],
        policy: TokensPolicy,
        prepared: Prepared,
        model: Model,
    ) -> None:
        self._arms = list(arms)
        self._policy, self._prepared, self._model = policy, prepared, model
        self._specs = [METRICS[name] for name in dict.fromkeys(metrics)]
        self._writer = RowWriter(coordinates=("variant", "mask", "weights"))
        self._models: Mapping[str, nn.Module] = {}
        self._networks: dict[str, tuple[str, tuple[str, str, str], Operation]] = {}
        self._readers: dict[str, SiteReader] = {}
        self._passed: set[str] = set()
        self._reasons: dict[str, str] = {}

    @property
    def reader(self) -> SiteReader:
        """The reader of the last network that ran to completion."""
        possible = [key for key in self._readers if key not in self._reasons]
        ran = [key for key in possible if key in self._passed] or possible
        return self._readers[ran[-1]] if ran else SiteReader(self._specs, self._policy, self._writer)

    @property
    def refused(self) -> list[str]:
        """What was left out, and why."""
        every = [(name, self._reasons.get(key)) for key, (name, *_) in self._networks.items()]
        return list(dict.fromkeys(f"{name} was left out: {reason}" for name, reason in every if reason is not None))

    def run(self, models: Mapping[str, nn.Module], execution: Execution) -> None:
        """All networks; ``models`` by the kind of their weights."""
        self._models = models if execution.is_in_memory else {}
        for weights in models:
            for variant, mask, operation in self._arms:
                name, at = f"{variant} under the mask {mask}", {"variant": variant, "mask": mask, "weights": weights}
                key = f"{name}, {weights}"
                self._networks[key] = name, (variant, mask, weights), operation
                self._readers[key] = SiteReader(self._specs, self._policy, self._writer, at)
        place: dict[tuple[str | int | None, ...], int] = {}
        for number, (_, coordinates, _) in enumerate(self._networks.values()):
            place[coordinates] = number
        findings = Findings(self._writer, self._readers, rest=lambda: self._reasons, learn_rest=self._reasons.update)
        for weights, model in models.items():
            self._run(weights, model, execution)
        execution.collect(findings, lambda piece: (place[piece.coordinates], piece.first_sequence))
        # Drop the rows of a network that failed half-way, perhaps on another rank.
        refused = {self._networks[key][1] for key in self._reasons}
        self._writer.replace(piece for piece in self._writer.pieces if piece.coordinates not in refused)

    def _run(self, weights: str, model: nn.Module, execution: Execution) -> None:
        own = {key: network[2] for key, network in self._networks.items() if network[1][2] == weights}
        view = execution.plan(self._prepared, model=model, variants=len(own))
        for key, operation in own.items():
            with self._refusing(key):
                check_operable(operation, view)
        with execution.stages(passes=len(own)) as stages:
            for stage in stages:
                for key, operation in own.items():
                    if key not in self._reasons:
                        with self._refusing(key):
                            self._pass(stage, execution, key, operation)

    def _pass(self, stage: Stage, execution: Execution, key: str, operation: Operation) -> None:
        model, reader = stage.view.model, self._readers[key]
        observe = execution.watch(reader)
        # Every network starts from the same random state, in case the model draws random numbers.
        with undisturbed(model), operating(model, operation, view=stage.view), trace(stage.view, SITES, observe):
            for part in execution.batches():
                reader.start(part)
                with stage.through(part, key):
                    part.run(model)
        self._passed.add(key)

    @contextmanager
    def _refusing(self, key: str) -> Iterator[None]:
        """Skip a network that the model does not support, and measure the others."""
        try:
            yield
        except UnsupportedOperationError as error:
            self._reasons[key] = str(error)

    def table(self) -> pa.Table:
        """The rows.

        Raises:
            InputError: there are none.
        """
        table = self._writer.table()
        if table.num_rows == 0:
            raise InputError("None of the variants could be run. " + " ".join(self.refused))
        return table

    def where_it_breaks(self, table: pa.Table) -> list[str]:
        """The first module that returns NaN or infinity, in the first such network; found with one more pass."""
        lost = next(iter(lost_networks(table)), None)
        model = None if lost is None else self._models.get(lost.weights)
        if lost is None or model is None:
            return []
        operation = next(operation for *names, operation in self._arms if names == [lost.variant, lost.mask])
        view = view_of(model, self._prepared[0], blocks=self._model.blocks, stream=self._model.declared_stream)
        with operating(model, operation, view=view), quiet_transformers():
            places = where_it_breaks(model, self._prepared)
        return [f"In {lost.name}: {sentence[:1].lower()}{sentence[1:]}" for sentence in places]
