"""``measure``: where does this model stand?"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from rankscope.models.inputs import Batch, InputPlan, Padding, Prepared, TokensPolicy, prepare_planned, prepare_prefixes
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.options import renamed
from rankscope.runs.not_finite import CODE
from rankscope.runs.rows import RowWriter, only
from rankscope.runs.run import Run
from rankscope.stream.sites import DEFAULT_SITES, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.verbs.locating import where_it_breaks
from rankscope.verbs.measure import EXECUTION
from rankscope.verbs.measure.judge import notes_on_estimates
from rankscope.verbs.measure.pair import PairedPrompts, paired
from rankscope.verbs.measure.similarity import SITE, SimilarityReader, labels_of
from rankscope.verbs.measure.states.measuring import (
    HeldStates,
    StatePasses,
    needed_model,
    refuse_with_states,
    without_inputs_hash,
)
from rankscope.verbs.origin import Described, about_inputs, floor_of, provenance_of, spec_of
from rankscope.verbs.reader import SiteReader, parse_attention_algorithm
from rankscope.verdicts import AxisFinding, across_axes, judge_rows
from rankscope.verdicts.length import length_finding, length_slopes, lengths_in


def measure(
    model: str | Path | nn.Module | None = None,
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
    progress: bool = False,
    attention: str | None = None,
    states: Any = None,
    at: Sequence[str] | str | None = None,
    lengths: Sequence[int | str] | None = None,
    pair: Sequence[str] | None = None,
) -> Run:
    """Run a model on some inputs and measure token uniformity and attention at its sites.

    The model runs in evaluation mode without gradients, and is left unchanged.

    Args:
        model: a spec (``"init:tiny-bert"``, a folder, a hub id) or your own module; None with ``states``.
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
        offload: read the weights of a local folder block by block, for a model larger than memory; the values are the
            same. The old spelling ``stream=True`` still works.
        memory: with ``offload``, a budget such as ``"3GiB"``; residual streams are moved to files to stay within it.
            Raises with an estimate if even one block at a time needs more. None for no limit.
        work: with ``offload``, folder for checkpoints, so that a killed run can resume after its last finished block.
        progress: show a progress bar.
        attention: old name of ``attention_algorithm``.
        states: hidden states that were computed elsewhere, measured instead of a model; see :func:`rankscope.judge`.
            Then ``stream`` is the order of their axes and ``dtype`` the format the model ran in.
        at: with ``states``, the site of each layer, in order.
        lengths: measure prefixes of the same texts at each of these numbers of tokens, in place of ``tokens``. Rows
            have a column ``length``; curves and the verdict are those of the longest. ``extra["lengths"]`` has the
            slope of every metric on the length.
        pair: with ``lengths``, two prompts: finds how many shared tokens must follow both until their last tokens are
            the same float vector after the last block.

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
    if states is not None:
        refuse_with_states(measure, locals())
        return judge(
            states,
            layout=None if stream is None else str(stream),
            at=at,
            metrics=metrics,
            sites=sites,
            sequences=sequences,
            tokens_policy=tokens_policy,
            dtype=dtype,
            seed=seed,
            null=null,
            similarity=similarity,
            progress=progress,
        )
    model = needed_model(model, at)
    if pair is not None and lengths is None:
        raise InputError("pair needs lengths: the longest is how far it looks. Pass lengths=, as in [128, 512].")
    declared, offload = declared_or_offloaded(stream, offload)
    with executing(
        EXECUTION,
        model,
        seed=seed,
        dtype=dtype,
        offload=offload,
        memory=memory,
        work=work,
        parallel=parallel,
        progress=progress,
    ) as execution:
        loaded = execution.loaded
        specs = metrics_named(metrics) if lengths is None else length_metrics(metrics)
        words = sites if lengths is None or sites is not None else LENGTH_SITES
        choice = BatteryChoice(specs, sites_for(specs, words), tokens_policy, algorithm, similarity)
        plan = InputPlan(sequences, tokens, batch, tokens_policy, seed, random_tokens, tokenizer, padding)
        if lengths is None:
            prepared = prepare_planned(loaded, inputs, plan)
            passes = MeasuringPasses(choice, execution, prepared)
            passes.run(blocks, declared)
        else:
            passes = measured_lengths(choice, execution, inputs, plan, whole_lengths(lengths), blocks, declared)
            prepared = passes.prepared
            if pair is not None:
                passes.pair = passes.compared(pair, inputs, tokenizer)
    broken = where_it_breaks if execution.is_in_memory else None
    about = Recorded(loaded, prepared, execution.described, spec_of(model), declared, broken)
    return concluded(passes, about, specs, null=null, seed=seed, started=started)


def judge(
    states: Any,
    *,
    layout: str | None = None,
    at: Sequence[str] | str | None = None,
    metrics: Sequence[str] | None = None,
    sites: Sequence[str] | None = None,
    sequences: int | None = None,
    tokens_policy: TokensPolicy = "content",
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    null: bool = False,
    similarity: bool = False,
    progress: bool = False,
) -> Run:
    """Measure hidden states that were computed elsewhere, and give a verdict.

    The values are those that :func:`rankscope.measure` gives for the same states. Files are read layer by layer.

    Args:
        states: a ``.safetensors`` or ``.npz`` file, a folder of them (one per request, in order of their names), a
            dictionary of arrays, one array, or a list of these for several sequences. Arrays may be of torch, numpy,
            or any library that speaks DLPack, such as JAX. A file or dictionary holds either one array per layer,
            ``tokens dim`` or ``batch tokens dim``, named after its site (``"block.in@0"``) or numbered
            (``"layers.0"``), or one array with all layers, as vLLM writes it. ``token_ids`` and ``attention_mask`` may
            be beside them.
        layout: the order of the axes, out of ``batch``, ``layers``, ``tokens`` and ``dim``, e.g.
            ``"tokens layers dim"``. Needed for an array with all layers, unless ``token_ids`` leave only one reading.
        at: the site of each layer, in order, e.g. ``["block.in@0", "block.out@0-10", "final@11"]``; by default
            ``block.out`` with the numbers in the names, or from 0.
        metrics: names of token metrics; None for those that verdicts use.
        sites: the sites to measure, out of those in ``states``; None for all.
        sequences: how many sequences to measure; None for all.
        tokens_policy: ``"content"`` excludes padding, ``"no-first"`` also the first token.
        dtype: the format the model ran in, if the states are stored in a finer one; it sets the float floor. None
            looks whether all values are representable in a coarser format.
        seed: seed of the random baseline.
        null: also measure Gaussian tokens of the same shape, as a baseline.
        similarity: also store the cosines between at most 64 tokens of the first sequence after each block.
        progress: show a progress bar.

    Returns:
        A run of ``measure``; report, compare, save and query take it like any other.

    Example:
        >>> x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
        >>> judge(x, layout="layers tokens dim").code
        'healthy'
    """
    started = time.perf_counter()
    specs = token_metrics_named(metrics)
    held = HeldStates.of(states, layout=layout, at=at, dtype=dtype, policy=tokens_policy, sequences=sequences)
    selection = held.selection if sites is None else SiteSelection.parse(sites)
    choice = BatteryChoice(specs, selection, tokens_policy, None, similarity)
    writer = RowWriter()
    passes = StatePasses(held, choice.reader(writer, held.computed_in), writer, selection, similarity=similarity)
    passes.run(progress=progress)
    run = concluded(passes, Recorded(held.described, held.prepared), specs, null=null, seed=seed, started=started)
    return run if held.has_ids else without_inputs_hash(run)


@dataclass(frozen=True)
class Recorded:
    """What a run records about the model and the inputs, besides the values.

    Attributes:
        loaded: the model, or what is known about it.
        prepared: its inputs.
        described: entries of the run about the execution.
        spec: the name of the model on the command line.
        stream: the declared stream.
        broken: finds the module that first returns NaN, if the model can be run again.
    """

    loaded: Described
    prepared: Prepared
    described: Mapping[str, Any] = field(default_factory=dict)
    spec: str | None = None
    stream: Stream | None = None
    broken: Callable[[nn.Module, Iterable[Batch]], list[str]] | None = None


def concluded(
    passes: MeasuringPasses | StatePasses,
    about: Recorded,
    specs: Sequence[MetricSpec],
    *,
    null: bool,
    seed: int,
    started: float,
) -> Run:
    """The run: its rows, baseline, floor, verdict and findings."""
    loaded, prepared = about.loaded, about.prepared
    table = passes.table()
    random_values = gaussian_null(specs, passes.reader.shapes, seed=seed) if null else None
    floor = floor_of(passes.reader.dtypes)
    verdict = judge_rows(
        table,
        random_values,
        floor_relative=floor["relative"],
        lengths=passes.reader.lengths,
        dim=min((width for _, width in passes.reader.shapes), default=None),
        model=about.spec,
    )
    findings: list[AxisFinding] = []
    by_length: dict[str, Any] = {}
    if "length" in table.column_names:
        by_length, finding = along_length(table, passes, floor["relative"], seed)
        findings.append(finding)
    verdict = across_axes(verdict, findings)
    broken: list[str] = []
    if about.broken is not None and loaded.model is not None and verdict.code == CODE:
        broken = about.broken(loaded.model, passes.prepared)
    run = Run(
        kind="measure",
        provenance=provenance_of(
            loaded, passes.prepared, passes.reader, seed, time.perf_counter() - started, about.stream
        ),
        floor=floor,
        **verdict.fields(),
        table=table,
        null=random_values,
        notes=(*loaded.notes, *prepared.notes, *notes_on_estimates(table), *passes.reader.notes(), *broken),
        extra={**passes.extra, **by_length, **({"axes": verdict.axes} if verdict.axes else {}), **about.described},
    )
    return passes.finished.checked(about_inputs(run, prepared))


class MeasuringPasses:
    """Measures the metrics on one model.

    Args:
        choice: the metrics, the sites and how to read them.
        execution: how the model is run.
        prepared: its inputs.
        writer: collects the rows, if several lengths share one.
        length: the length of these inputs, for the rows, if there are several.

    Attributes:
        prepared: the inputs that were finished; all of them, unless there was an interrupt.
        pair: what became of two prompts.
        reader: knows the dtypes, shapes and lengths seen.
        finished: counts the finished sequences.
    """

    def __init__(
        self,
        choice: BatteryChoice,
        execution: Execution,
        prepared: Prepared,
        writer: RowWriter | None = None,
        length: int | None = None,
    ) -> None:
        self._choice, self._execution = choice, execution
        self._writer = RowWriter() if writer is None else writer
        self._length = length
        self._view: ModelView | None = None
        self.pair: dict[str, Any] | None = None
        self.prepared = prepared
        self.reader = choice.reader(self._writer, at=None if length is None else {"length": length})
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
                # Rows of one length alone would pass for a whole run.
                kept = self.finished.kept(alone=execution.ends_batch_by_batch and self._length is None)
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

    def compared(self, pair: Sequence[str], inputs: Any, tokenizer: Any) -> dict[str, Any]:
        """From how many shared tokens on two prompts are the same vector."""
        assert self._view is not None
        assert self._length is not None
        loaded = self._execution.loaded
        prompts = PairedPrompts.of(loaded, pair, inputs, tokenizer, self._length)
        return paired(loaded, self._view, prompts, pair)

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


def measured_lengths(
    choice: BatteryChoice,
    execution: Execution,
    inputs: Any,
    plan: InputPlan,
    lengths: Sequence[int],
    blocks: str | Sequence[str] | None,
    stream: Stream | None,
) -> MeasuringPasses:
    """Measure prefixes of each length; the passes returned are those of the longest, with the rows of all."""
    if not execution.ends_batch_by_batch:
        raise InputError("lengths runs one model in memory in one process. Leave offload and parallel out.")
    writer = RowWriter(("length",))
    for length, prepared in prepare_prefixes(execution.loaded, inputs, plan, lengths).items():
        passes = MeasuringPasses(choice, execution, prepared, writer, length)
        passes.run(blocks, stream)
    return passes


def whole_lengths(lengths: Sequence[int | str]) -> list[int]:
    """The lengths as numbers.

    Raises:
        InputError: one is not a whole number.
    """
    if isinstance(lengths, str) or not all(str(length).isdecimal() for length in lengths):
        raise InputError(f"lengths={lengths!r}: expected numbers of tokens, as in [128, 512, 2048].")
    return [int(length) for length in lengths]


def length_metrics(names: Sequence[str] | None) -> tuple[MetricSpec, ...]:
    """The metrics of a run at several lengths: by default also ``residual``, for the variance of attention."""
    return metrics_named((*DEFAULT_TOKEN_METRICS, *DEFAULT_ATTENTION_METRICS, "residual") if names is None else names)


def along_length(
    table: pa.Table, passes: MeasuringPasses | StatePasses, floor: float | None, seed: int
) -> tuple[dict[str, Any], AxisFinding]:
    """The slopes on the length, for the run, and the finding."""
    lengths = lengths_in(table)
    hidden = lengths[-1] - max(passes.prepared.lengths, default=lengths[-1])
    slopes = length_slopes(table, {length: length - hidden for length in lengths}, seed=seed)
    codes = {end: judge_rows(only(table, length=end), floor_relative=floor).code for end in (lengths[0], lengths[-1])}
    pair = passes.pair if isinstance(passes, MeasuringPasses) else None
    entry: dict[str, Any] = {"lengths": {"lengths": lengths, "slopes": [one.to_json() for one in slopes]}}
    if pair is not None:
        entry["pair"] = pair
    return entry, length_finding(slopes, lengths, codes, pair)


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

    def reader(
        self, writer: RowWriter, computed_in: torch.dtype | None = None, at: Mapping[str, int] | None = None
    ) -> SiteReader:
        """A reader that writes the chosen metrics to ``writer``."""
        algorithm = parse_attention_algorithm(self.attention)
        return SiteReader(self.specs, self.policy, writer, at, attention=algorithm, computed_in=computed_in)

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


def token_metrics_named(names: Sequence[str] | None) -> tuple[MetricSpec, ...]:
    """The metrics of these names that need only tokens; by default those that verdicts use.

    Raises:
        InputError: one needs more than tokens.
    """
    found = metrics_named(DEFAULT_TOKEN_METRICS if names is None else names)
    for spec in found:
        if spec.side != "tokens":
            raise InputError(
                f"{spec.name} is measured on {spec.side}, and hidden states hold tokens only. Leave it out, or measure "
                "the model itself."
            )
    return found


def sites_for(specs: Sequence[MetricSpec], words: Sequence[str] | None) -> SiteSelection:
    """The chosen sites; by default those that the metrics can read."""
    if words is not None:
        return SiteSelection.parse(words)
    sides = {spec.side for spec in specs}
    return SiteSelection.parse(
        word for word in DEFAULT_SITES if ("attention" if word.endswith(".probs") else "tokens") in sides
    )


LENGTH_SITES = (*DEFAULT_SITES, "attention.out")
"""Sites of a run at several lengths: the variance of the attention output is read at the last."""
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
