"""``measure``: where does this model stand?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rankscope.errors import InputError
from rankscope.execution.passes import executing
from rankscope.linalg.tokens import Spectra
from rankscope.models.inputs import Batch, InputsLike, Prepared, as_inputs, prepare_planned
from rankscope.models.model import ModelLike, as_model
from rankscope.models.stream import Stream
from rankscope.runs.not_finite import CODE
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import DEFAULT_SITES
from rankscope.surgery.surgery import SurgeryLike
from rankscope.verbs.calling import call_flat, checked
from rankscope.verbs.locating import where_it_breaks
from rankscope.verbs.measure import EXECUTION, JUDGE, MEASURE, OWN
from rankscope.verbs.measure.choosing import (
    BatteryChoice,
    about_comparison,
    gaussian_null,
    metrics_named,
    sites_for,
    token_metrics_named,
)
from rankscope.verbs.measure.judge import notes_on_estimates, spectra_in
from rankscope.verbs.measure.passes import MeasuringPasses, Observers
from rankscope.verbs.measure.states import (
    HeldStates,
    StatePasses,
    judge_arguments,
    refuse_fields,
    without_inputs_hash,
)
from rankscope.verbs.origin import floor_of, in_context, provenance_of
from rankscope.verdicts import AxisFinding, across_axes, inputs_findings, judge_rows
from rankscope.verdicts.attention import attention_findings
from rankscope.verdicts.depth import depth_findings
from rankscope.verdicts.experts import experts_findings
from rankscope.verdicts.streams import streams_findings


@checked(*OWN)
def measure(
    model: ModelLike,
    inputs: InputsLike = None,
    surgery: SurgeryLike = None,
    *,
    metrics: Sequence[str] | str | None = None,
    sites: Sequence[str] | str | None = None,
    null: bool = False,
    similarity: bool = False,
    between_inputs: str | Sequence[str] | None = None,
    attention_algorithm: str | None = None,
    spectra: Spectra | None = None,
    progress: bool = False,
) -> Run:
    """Run a model on some inputs and measure token uniformity and attention at its sites.

    The model runs in evaluation mode without gradients, and is left unchanged.

    Args:
        model: a :class:`rankscope.Model`, a spec (``"init:tiny-bert"``, a folder, a hub id) or your own module.
        inputs: :class:`rankscope.Inputs`, or texts, a text file (``Path``), tensors, or None for the sample text.
        surgery: :class:`rankscope.Surgery` under which the model runs, or a dictionary of its fields; None for none.
        metrics: names from ``rankscope ls metrics``; None for the set of metrics that verdicts use.
        sites: words such as ``"block.out"`` or ``"block.in@0"``; None for the default sites.
        null: also measure Gaussian tokens of the same shape, as a baseline.
        similarity: also store the cosines between at most 64 tokens of the first sequence after each block.
        between_inputs: also compare the inputs with each other, each pooled to one vector after every block: ``"mean"``
            over the tokens that count, the ``"first"`` or ``"last"`` of them, or several of these. None for
            ``"mean"`` if there are several inputs and ``block.out`` is measured; ``"none"`` to leave it out.
        attention_algorithm: ``"dense"`` keeps all probabilities of a block in memory, ``"blockwise"`` computes them
            a few rows at a time; None chooses by size.
        spectra: ``"exact"`` computes ranks from all singular values; ``"estimated"`` from those of 1,024
            evenly spaced tokens of longer sequences. None chooses by size: exact up to min(tokens, width) = 1024.
        progress: show a progress bar.

    Returns:
        Values per metric, site, layer and sequence, with verdict, float floor and provenance.

    Example:
        >>> from rankscope import Inputs
        >>> run = measure("init:tiny-bert", Inputs(sequences=2, tokens=16))
        >>> run.curve("relative_residual", "block.out").layers.tolist()
        [0, 1, 2]
    """
    started = time.perf_counter()
    subject, given = as_model(model), as_inputs(inputs)
    plan = given.plan(**MEASURE.inputs_defaults, seed=subject.seed)
    specs = metrics_named(metrics)
    choice = BatteryChoice(
        specs, sites_for(specs, sites, DEFAULT_SITES), plan.policy, attention_algorithm, similarity, spectra=spectra
    )
    with executing(EXECUTION, subject, surgery, progress=progress) as execution:
        prepared = prepare_planned(execution.loaded, given.data, plan)
        choice = choice.comparing(between_inputs, prepared, default=metrics is None, labels=given.labels)
        passes = MeasuringPasses(choice, execution, prepared)
        passes.run()
        about = AboutRun(
            execution.loaded,
            prepared,
            execution.described,
            subject.spec,
            subject.declared_stream,
            broken=where_it_breaks if execution.is_in_memory else None,
            mixing=passes.stream_mixing(),
            asks_for_inputs=between_inputs is not None,
        )
        return concluded(passes, about, choice, null=null, seed=plan.seed, started=started)


@checked(*JUDGE)
def judge(
    states: Any,
    inputs: InputsLike = None,
    *,
    layout: str | None = None,
    at: Sequence[str] | str | None = None,
    computed_in: torch.dtype | str | None = None,
    metrics: Sequence[str] | str | None = None,
    null: bool = False,
    similarity: bool = False,
    between_inputs: str | Sequence[str] | None = None,
    spectra: Spectra | None = None,
    progress: bool = False,
) -> Run:
    """Measure hidden states that were computed elsewhere, and give a verdict.

    The values are those that :func:`rankscope.measure` gives for the same states. Files are read one at a time.

    Args:
        states: a ``.safetensors`` or ``.npz`` file, a folder of them (one per request, in order of their names), a
            dictionary of arrays, one array, or a list of these for several sequences. Arrays may be of torch, numpy,
            or any library that speaks DLPack, such as JAX. A file or dictionary holds either one array per layer,
            ``tokens dim`` or ``batch tokens dim``, named after its site (``"block.in@0"``) or numbered
            (``"layers.0"``), or one array with all layers, as vLLM writes it. ``token_ids`` and ``attention_mask`` may
            be among them.
        inputs: :class:`rankscope.Inputs` without data: ``sequences`` to measure (None for all), ``tokens_policy``
            (``"content"`` or ``"no-first"``) and the ``seed`` of the random baseline.
        layout: the order of the axes, out of ``batch``, ``layers``, ``tokens`` and ``dim``, e.g.
            ``"tokens layers dim"``. Needed for an array with all layers, unless ``token_ids`` leave only one reading,
            and for a single matrix: ``"tokens dim"`` for the tokens of one sequence, ``"batch dim"``
            for inputs of one vector each, such as embeddings.
        at: the site of each layer, in order, e.g. ``["block.in@0", "block.out@0-10", "final@11"]``; by default
            ``block.out`` with the numbers in the names, or from 0.
        computed_in: the format the model ran in, if the states are stored in a finer one; it sets the float floor. None
            looks whether all values are representable in a coarser format.
        metrics: names of token metrics; None for those that verdicts use.
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
    given = as_inputs(inputs)
    refuse_fields(given)
    plan = given.plan()
    specs = token_metrics_named(metrics)
    held = HeldStates.of(states, layout=layout, at=at, dtype=computed_in, policy=plan.policy, sequences=plan.sequences)
    choice = BatteryChoice(specs, held.selection, plan.policy, None, similarity, spectra=spectra)
    choice = choice.comparing(between_inputs, held.prepared, default=metrics is None, labels=given.labels)
    writer = RowWriter()
    reader = choice.reader(writer, held.computed_in)
    passes = StatePasses(held, reader, writer, Observers(choice, reader, writer, []))
    passes.run(progress=progress)
    about = AboutRun(held.described, held.prepared, asks_for_inputs=between_inputs is not None)
    run = concluded(passes, about, choice, null=null, seed=plan.seed, started=started)
    return run if held.has_ids else without_inputs_hash(run)


def from_options(api: Any, values: Mapping[str, Any]) -> Run:
    """``measure`` on the command line: a model, or hidden states.

    Args:
        api: the package, whose functions are called.
        values: the values of all options.

    Raises:
        InputError: options that do not go together, or nothing to measure.
    """
    values = dict(values)
    states, at = (values.pop(name) for name in ("states", "at"))
    if states:
        judged: Run = api.judge(states, at=at, **judge_arguments(values))
        return judged
    if values["model"] is None:
        raise InputError("Nothing to measure: there is no model. Name one (SPEC), or hidden states (--states FILE).")
    if at is not None:
        raise InputError("--at says where --states were taken. To choose sites of a model, pass --sites.")
    run: Run = call_flat(MEASURE, api.measure, values)
    return run


@dataclass(frozen=True)
class AboutRun:
    """What a run records about the model and the inputs, in addition to the values.

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

    loaded: Any
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
        classes = passes.classes()
        entries["between_inputs"] |= {"classes": classes} if classes else {}
        findings += inputs_findings(table, entries["between_inputs"], **known, asked=about.asks_for_inputs)
    findings += streams_findings(table, about.mixing)
    findings += experts_findings(table, reader.routers)
    findings += attention_findings(table, reader.lengths)
    findings += depth_findings(table)
    verdict = across_axes(judge_rows(table, random_values, dim=dim, **known), findings)
    broken: list[str] = []
    if about.broken is not None and loaded.model is not None and verdict.code == CODE:
        broken = about.broken(loaded.model, passes.prepared)
    entries["axes"] = verdict.axes
    entries["verdict_details"] = verdict.details
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
    return in_context(run, prepared)
