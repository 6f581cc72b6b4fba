"""``measure``: where does this model stand?"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from rankscope.errors import InputError
from rankscope.execution.findings import Findings, Finished
from rankscope.execution.passes import Execution, declared_or_offloaded, executing
from rankscope.execution.support import Parallel
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS, METRICS, MetricSpec, evaluate
from rankscope.models.inputs import InputPlan, Padding, Prepared, TokensPolicy, prepare_planned
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.options import renamed
from rankscope.runs.not_finite import CODE
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import DEFAULT_SITES, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.verbs.locating import where_it_breaks
from rankscope.verbs.measure import EXECUTION
from rankscope.verbs.measure.judge import notes_on_estimates
from rankscope.verbs.measure.similarity import SITE, SimilarityReader, labels_of
from rankscope.verbs.origin import about_inputs, floor_of, provenance_of, spec_of
from rankscope.verbs.reader import SiteReader, parse_attention_algorithm
from rankscope.verdicts import AxisFinding, across_axes, judge


def measure(
    model: str | Path | nn.Module,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    *,
    metrics: Sequence[str] | None = None,
    sites: Sequence[str] | None = None,
    sequences: int | None = None,
    tokens: int = 128,
    batch: int = 8,
    tokens_policy: TokensPolicy = "content",
    random_tokens: bool = False,
    tokenizer: Any = None,
    padding: Padding = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    null: bool = False,
    similarity: bool = False,
    blocks: str | Sequence[str] | None = None,
    attention_algorithm: str | None = None,
    parallel: Parallel | None = None,
    stream: Stream | str | bool | None = None,
    offload: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    byte_budget: int | str | None = None,
    progress: bool = False,
    attention: str | None = None,
) -> Run:
    """Run a model on some inputs and measure token uniformity and attention at its sites.

    The model runs in evaluation mode without gradients, and is left unchanged.

    Args:
        model: a spec (``"init:tiny-bert"``, a folder, a hub id) or your own module.
        inputs: texts, a text file (``Path``), tensors, or None for the built-in sample text.
        metrics: names from ``rankscope ls metrics``; None for the set of metrics that verdicts use.
        sites: words such as ``"block.out"`` or ``"block.in@0"``; None for the default sites.
        sequences: maximal number of sequences; None for all that are passed, or 8 from a file or the sample text.
        tokens: length to which texts are truncated.
        batch: sequences per forward pass.
        tokens_policy: ``"content"``, ``"no-first"`` or ``"no-special"``.
        random_tokens: use random ids instead of text.
        tokenizer: tokenizer for the texts, if the model comes without one: an object, a folder or a hub name.
        padding: which of your own tokens are padding: a tensor that is True there, or the model argument that marks
            them, as ``"NAME"`` or with the value that marks padding, ``"NAME=1"``; ``"none"`` for no padding. None
            looks for such an argument and tests on the model how it is interpreted.
        dtype: dtype of the weights, if the model is loaded here.
        seed: seed for a random initialisation and for random inputs.
        null: also measure Gaussian tokens of the same shape, as a baseline.
        similarity: also store the cosines between at most 64 tokens of the first sequence after each block.
        blocks: names or patterns of the block modules, if discovery needs help.
        attention_algorithm: ``"dense"`` keeps all probabilities of a block in memory, ``"blockwise"`` computes them
            tile by tile, ``"blockwise:20"`` with up to 20 walks per head for ``attention_contraction``; None chooses
            by size.
        parallel: share the work among the processes of an initialised group; all of them must make this call, and all
            get the same result. ``"data"`` distributes whole batches, ``"fsdp"`` and ``"tensor"`` shard the model.
            None for this process alone, or for the way in which your module is already sharded.
        stream: where the residual stream is, for a model that does not store it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        offload: read the weights block by block, for a model larger than memory or not on this machine: a local folder,
            ``hub:NAME``, ``hub:NAME@REVISION``, or the address of a folder (``https://``, ``s3://``, ``gs://``). The
            values are the same. The old spelling ``stream=True`` still works.
        memory: with ``offload``, a budget such as ``"3GiB"``; residual streams are moved to files to stay within it.
            Raises with an estimate if even one block at a time needs more. None for no limit.
        work: with ``offload``, folder for checkpoints, so that a killed run can resume after its last finished block.
        byte_budget: with ``offload`` and a remote model, the most to read from the server, such as ``"20GiB"``; the run
            stops with an error before it reads more. None for no limit.
        progress: show a progress bar.
        attention: old name of ``attention_algorithm``.

    Returns:
        Values per metric, site, layer and sequence, with verdict, float floor and provenance.

    Raises:
        Interrupted: a ``KeyboardInterrupt`` whose ``run`` contains the sequences that were finished.

    Example:
        >>> run = measure("init:tiny-bert", sequences=2, tokens=16)
        >>> run.curve("relative_residual", "block.out").layers.tolist()
        [0, 1, 2]
    """
    started = time.perf_counter()
    algorithm = renamed("measure", "attention", attention, "attention_algorithm", attention_algorithm)
    declared, offload = declared_or_offloaded(stream, offload)
    with executing(
        EXECUTION,
        model,
        seed=seed,
        dtype=dtype,
        offload=offload,
        memory=memory,
        work=work,
        byte_budget=byte_budget,
        parallel=parallel,
        progress=progress,
    ) as execution:
        loaded = execution.loaded
        specs = metrics_named(metrics)
        choice = BatteryChoice(specs, sites_for(specs, sites), tokens_policy, algorithm, similarity)
        plan = InputPlan(sequences, tokens, batch, tokens_policy, seed, random_tokens, tokenizer, padding)
        prepared = prepare_planned(loaded, inputs, plan)
        passes = MeasuringPasses(choice, execution, prepared)
        passes.run(blocks, declared)
    table = passes.table()
    random_values = gaussian_null(specs, passes.reader.shapes, seed=seed) if null else None
    floor = floor_of(passes.reader.dtypes)
    verdict = judge(
        table,
        random_values,
        floor_relative=floor["relative"],
        lengths=passes.reader.lengths,
        dim=min((width for _, width in passes.reader.shapes), default=None),
        model=spec_of(model),
    )
    findings: list[AxisFinding] = []
    verdict = across_axes(verdict, findings)
    lost = execution.is_in_memory and verdict.code == CODE
    broken = where_it_breaks(loaded.model, passes.prepared) if lost else []
    run = Run(
        kind="measure",
        provenance=provenance_of(loaded, passes.prepared, passes.reader, seed, time.perf_counter() - started, declared),
        floor=floor,
        **verdict.fields(),
        table=table,
        null=random_values,
        notes=(*loaded.notes, *prepared.notes, *notes_on_estimates(table), *passes.reader.notes(), *broken),
        extra={**passes.extra, **({"axes": verdict.axes} if verdict.axes else {}), **execution.described},
    )
    return passes.finished.checked(about_inputs(run, prepared))


class MeasuringPasses:
    """Measures the metrics on one model.

    Args:
        choice: the metrics, the sites and how to read them.
        execution: how the model is run.
        prepared: its inputs.

    Attributes:
        prepared: the inputs that were finished; all of them, unless there was an interrupt.
        reader: knows the dtypes, shapes and lengths seen.
        finished: counts the finished sequences.
    """

    def __init__(self, choice: BatteryChoice, execution: Execution, prepared: Prepared) -> None:
        self._choice, self._execution = choice, execution
        self._writer = RowWriter()
        self._view: ModelView | None = None
        self.prepared = prepared
        self.reader = choice.reader(self._writer)
        self._similarity: SimilarityReader | None = None
        if choice.similarity:
            labels = labels_of(prepared, prepared.tokenizer or execution.loaded.tokenizer)
            self._similarity = SimilarityReader(self.reader, labels)
        self.finished = Finished(self._writer, prepared.sequences, "sequences")

    def run(self, blocks: str | Sequence[str] | None, stream: Stream | None) -> None:
        """All batches."""
        execution, selection = self._execution, self._choice.selection
        self._view = execution.plan(self.prepared, self._choice.identity(), blocks=blocks, stream=stream)
        findings = Findings(self._writer, {"": self.reader}, rest=self._similar, learn_rest=self._learn_similar)
        with execution.stages(findings, final=selection.wants("final")) as stages:
            for stage in stages:
                watched = execution.watch(self._similarity or self.reader)
                kept = self.finished.kept(alone=execution.ends_batch_by_batch)
                with kept, trace(stage.view, selection, watched):
                    for part in execution.batches():
                        self.reader.start(part)
                        with stage.through(part):
                            part.run(stage.view.model)
                        self.finished.add(part.sequences)
        self.prepared = self.finished.sequences_of(self.prepared)
        execution.collect(findings)

    @property
    def extra(self) -> dict[str, Any]:
        """Further entries of the run, besides the rows."""
        return {} if self._similarity is None else {"similarity": self._similarity.stored()}

    def _similar(self) -> Any:
        return None if self._similarity is None else self._similarity.stored()

    def _learn_similar(self, stored: Any) -> None:
        if self._similarity is not None:
            self._similarity.learn(stored)

    def table(self) -> pa.Table:
        """The rows.

        Raises:
            InputError: there are none.
        """
        found = self._writer.table()
        if found.num_rows == 0:
            assert self._view is not None
            raise InputError(self._choice.nothing_measured(self._view))
        return found


@dataclass(frozen=True)
class BatteryChoice:
    """The arguments of ``measure`` that decide its values besides the model and the inputs.

    Attributes:
        specs: the metrics.
        selection: the sites.
        policy: which tokens count.
        attention: algorithm for the attention probabilities, as the user wrote it.
        similarity: whether cosines between tokens are stored.
    """

    specs: tuple[MetricSpec, ...]
    selection: SiteSelection
    policy: TokensPolicy
    attention: str | None
    similarity: bool

    def __post_init__(self) -> None:
        if self.similarity and not self.selection.wants(SITE):
            raise InputError(f"similarity is measured at {SITE}, which is not among the chosen sites: add it to sites.")

    def reader(self, writer: RowWriter) -> SiteReader:
        """A reader that writes the chosen metrics to ``writer``."""
        return SiteReader(self.specs, self.policy, writer, attention=parse_attention_algorithm(self.attention))

    def identity(self) -> tuple[Any, ...]:
        """Everything that decides the values besides the model and its inputs."""
        names = [spec.name for spec in self.specs]
        return (names, self.selection, self.policy, self.similarity, self.attention)

    def nothing_measured(self, view: ModelView) -> str:
        """Why a model of this structure gave no row."""
        asked = ", ".join(self.selection.layers)
        names = ", ".join(spec.name for spec in self.specs)
        skips = sorted({label for stack in view.stacks for plan in stack.plans for label in plan.skips})
        return (
            f"None of the metrics ({names}) could be measured at the chosen sites ({asked}). This model has "
            f"{view.depth} blocks with skip adds {', '.join(skips) or 'none'}; token metrics need stream sites, "
            "attention metrics need attention.probs."
        )


def metrics_named(names: Sequence[str] | None) -> tuple[MetricSpec, ...]:
    """The metrics of these names, without duplicates; by default those that verdicts use."""
    chosen = (*DEFAULT_TOKEN_METRICS, *DEFAULT_ATTENTION_METRICS) if names is None else tuple(names)
    return tuple(METRICS[name] for name in dict.fromkeys(chosen))


def sites_for(specs: Sequence[MetricSpec], words: Sequence[str] | None) -> SiteSelection:
    """The chosen sites; by default those that the metrics can read."""
    if words is not None:
        return SiteSelection.parse(words)
    sides = {spec.side for spec in specs}
    return SiteSelection.parse(
        word for word in DEFAULT_SITES if ("attention" if word.endswith(".probs") else "tokens") in sides
    )


DRAWS = 8


def gaussian_null(
    specs: Sequence[MetricSpec], shapes: Collection[tuple[int, int]], *, seed: int, draws: int = DRAWS
) -> dict[str, Any]:
    """Mean and spread of each token metric over ``draws`` matrices of independent N(0, 1) entries.

    **Estimate.** The shape is that of the largest stream seen. Metrics that depend on scale are left out: a
    Gaussian of unit variance says nothing about the scale of a model.
    """
    from rankscope.metrics import Invariance

    chosen = [spec for spec in specs if spec.side == "tokens" and Invariance.SCALE in spec.invariant_to]
    if not chosen or not shapes:
        return {}
    tokens, dim = max(shapes)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(draws, tokens, dim, generator=generator, dtype=torch.float64)
    values = evaluate(chosen, Tokens(x), float_floor(x.dtype)).values
    return {
        spec.name: {"mean": float(row.mean()), "sd": float(row.std()), "draws": draws}
        for spec, row in zip(chosen, values, strict=True)
    }
