"""``measure``: where does this model stand?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from rankscope.errors import InputError
from rankscope.execution.passes import HowToRun, declared_or_offloaded, executing
from rankscope.execution.support import Parallel
from rankscope.linalg.tokens import Spectra
from rankscope.models.inputs import Batch, InputPlan, Padding, Prepared, TokensPolicy, prepare_planned
from rankscope.models.stream import Stream
from rankscope.options import renamed
from rankscope.runs.not_finite import CODE
from rankscope.runs.rows import RowWriter, only
from rankscope.runs.run import Run
from rankscope.stream.sites import DEFAULT_SITES, SiteSelection
from rankscope.verbs.locating import where_it_breaks
from rankscope.verbs.measure import EXECUTION
from rankscope.verbs.measure.choosing import (
    LENGTH_SITES,
    BatteryChoice,
    about_comparison,
    gaussian_null,
    length_metrics,
    metrics_named,
    sites_for,
    token_metrics_named,
    whole_lengths,
)
from rankscope.verbs.measure.judge import notes_on_estimates, spectra_in
from rankscope.verbs.measure.passes import MeasuringPasses, Observers, measured_lengths
from rankscope.verbs.measure.states.measuring import HeldStates, StatePasses, refuse_with_states, without_inputs_hash
from rankscope.verbs.origin import Described, floor_of, in_context, provenance_of, spec_of
from rankscope.verdicts import AxisFinding, across_axes, inputs_findings, judge_rows
from rankscope.verdicts.depth import depth_findings
from rankscope.verdicts.experts import experts_findings
from rankscope.verdicts.length import length_finding, length_slopes, lengths_in
from rankscope.verdicts.streams import streams_findings


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
    device: torch.device | str | None = None,
    seed: int = 0,
    null: bool = False,
    similarity: bool = False,
    between_inputs: str | Sequence[str] | None = None,
    blocks: str | Sequence[str] | None = None,
    attention_algorithm: str | None = None,
    spectra: Spectra | None = None,
    parallel: Parallel | None = None,
    stream: Stream | str | bool | None = None,
    offload: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    byte_budget: int | str | None = None,
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
        device: device to run on, such as ``"cuda"``, if the model is loaded here; None for the CPU.
        seed: seed for a random initialisation and for random inputs.
        null: also measure Gaussian tokens of the same shape, as a baseline.
        similarity: also store the cosines between at most 64 tokens of the first sequence after each block.
        between_inputs: also compare the inputs with each other, each pooled to one vector after every block: ``"mean"``
            over the tokens that count, the ``"first"`` or ``"last"`` of them, ``"at:5"``, or several of these. None for
            ``"mean"`` if there are several inputs and ``block.out`` is measured; ``"none"`` to leave it out.
        blocks: names or patterns of the block modules, if discovery needs help.
        attention_algorithm: ``"dense"`` keeps all probabilities of a block in memory, ``"blockwise"`` computes them
            tile by tile, ``"blockwise:20"`` with up to 20 walks per head for ``attention_contraction``; None chooses
            by size.
        spectra: ``"exact"`` computes ranks from all singular values; ``"estimated"`` from products with a few vectors,
            with an interval around each. None chooses by size: exact up to min(tokens, width) = 1024.
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
            between_inputs=between_inputs,
            spectra=spectra,
            progress=progress,
        )
    if model is None:
        raise InputError(
            "Nothing to measure: model is None. Pass one (SPEC), or hidden states as states= (--states FILE)."
        )
    if at is not None:
        raise InputError("at= says where states= were taken. To choose sites of a model, pass sites=.")
    if lengths is not None and between_inputs is not None:
        raise InputError("between_inputs compares inputs at one length: leave lengths out, or between_inputs.")
    if pair is not None and lengths is None:
        raise InputError("pair needs lengths: the longest is how far it looks. Pass lengths=, as in [128, 512].")
    declared, offload = declared_or_offloaded(stream, offload)
    how = HowToRun(seed, dtype, device, parallel, progress, offload, memory, work, byte_budget)
    with executing(EXECUTION, model, how) as execution:
        loaded = execution.loaded
        specs = metrics_named(metrics) if lengths is None else length_metrics(metrics)
        selection = sites_for(specs, sites, DEFAULT_SITES if lengths is None else LENGTH_SITES)
        choice = BatteryChoice(specs, selection, tokens_policy, algorithm, similarity, spectra=spectra)
        plan = InputPlan(sequences, tokens, batch, tokens_policy, seed, random_tokens, tokenizer, padding)
        if lengths is None:
            prepared = prepare_planned(loaded, inputs, plan)
            choice = choice.comparing(between_inputs, prepared, default=metrics is None)
            passes = MeasuringPasses(choice, execution, prepared)
            passes.run(blocks, declared)
        else:
            passes = measured_lengths(choice, execution, inputs, plan, whole_lengths(lengths), blocks, declared)
            prepared = passes.prepared
            if pair is not None:
                passes.pair = passes.compared(pair, inputs, tokenizer)
        mixing = passes.stream_mixing()
    about = AboutRun(
        loaded,
        prepared,
        execution.described,
        spec_of(model),
        declared,
        broken=where_it_breaks if execution.is_in_memory else None,
        mixing=mixing,
        asks_for_inputs=between_inputs is not None,
    )
    return concluded(passes, about, choice, null=null, seed=seed, started=started)


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
    between_inputs: str | Sequence[str] | None = None,
    spectra: Spectra | None = None,
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
        between_inputs: also compare the sequences with each other, as in :func:`rankscope.measure`.
        spectra: ``"exact"`` or ``"estimated"``, as in :func:`rankscope.measure`; None chooses by size.
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
    choice = BatteryChoice(specs, selection, tokens_policy, None, similarity, spectra=spectra)
    choice = choice.comparing(between_inputs, held.prepared, default=metrics is None)
    writer = RowWriter()
    reader = choice.reader(writer, held.computed_in)
    passes = StatePasses(held, reader, writer, selection, Observers(choice, reader, writer, []))
    passes.run(progress=progress)
    about = AboutRun(held.described, held.prepared, asks_for_inputs=between_inputs is not None)
    run = concluded(passes, about, choice, null=null, seed=seed, started=started)
    return run if held.has_ids else without_inputs_hash(run)


@dataclass(frozen=True)
class AboutRun:
    """What a run records about the model and the inputs, besides the values.

    Attributes:
        loaded: the model, or what is known about it.
        prepared: its inputs.
        described: entries of the run about the execution.
        spec: the name of the model on the command line.
        stream: the declared stream.
        broken: finds the module that first returns NaN, if the model can be run again.
        mixing: how each stack with several streams per token mixes them.
        asks_for_inputs: whether the user asked for the comparison between inputs.
    """

    loaded: Described
    prepared: Prepared
    described: Mapping[str, Any] = field(default_factory=dict)
    spec: str | None = None
    stream: Stream | None = None
    broken: Callable[[nn.Module, Iterable[Batch]], list[str]] | None = None
    mixing: Sequence[Mapping[str, Any]] = ()
    asks_for_inputs: bool = False


def concluded(
    passes: MeasuringPasses | StatePasses,
    about: AboutRun,
    choice: BatteryChoice,
    *,
    null: bool,
    seed: int,
    started: float,
) -> Run:
    """The run: its rows, baseline, floor, verdict and the findings along each axis."""
    loaded, prepared, reader = about.loaded, about.prepared, passes.reader
    table = passes.table()
    random_values = gaussian_null(choice.specs, reader.shapes, seed=seed, spectra=choice.spectra) if null else None
    floor = floor_of(reader.dtypes)
    dim = min((width for _, width in reader.shapes), default=None)
    known = {"lengths": reader.lengths, "floor_relative": floor["relative"], "model": about.spec}
    entries: dict[str, Any] = {"streams": list(about.mixing)}
    findings: list[AxisFinding] = []
    if choice.poolings:
        entries["between_inputs"] = about_comparison(passes.prepared, choice, dim, seed if null else None)
        findings += inputs_findings(table, entries["between_inputs"], **known, asked=about.asks_for_inputs)
    findings += streams_findings(table, about.mixing)
    findings += experts_findings(table, reader.routers)
    if "length" in table.column_names:
        by_length, finding = along_length(table, passes, floor["relative"], seed)
        entries |= by_length
        findings.append(finding)
    findings += depth_findings(table)
    verdict = across_axes(judge_rows(table, random_values, dim=dim, **known), findings)
    broken: list[str] = []
    if about.broken is not None and loaded.model is not None and verdict.code == CODE:
        broken = about.broken(loaded.model, passes.prepared)
    entries["axes"] = verdict.axes
    seconds = time.perf_counter() - started
    run = Run(
        kind="measure",
        provenance=replace(
            provenance_of(loaded, passes.prepared, reader, seed, seconds, about.stream), spectra=spectra_in(table)
        ),
        floor=floor,
        **verdict.fields(),
        table=table,
        null=random_values,
        notes=(*loaded.notes, *prepared.notes, *notes_on_estimates(table), *passes.notes(), *broken),
        extra={**passes.extra, **{name: entry for name, entry in entries.items() if entry}, **about.described},
    )
    return passes.finished.checked(in_context(run, prepared))


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
