"""``bound``: what do the theorems say of these weights?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope._errors import InputError, UnsupportedConfigError
from rankscope.execution.passes import declared_or_offloaded, executing
from rankscope.execution.support import Parallel
from rankscope.models.inputs import InputPlan, Padding, prepare_planned
from rankscope.models.lazy_blocks import lazy_model
from rankscope.models.loading.config import config_hash
from rankscope.models.stream import Stream
from rankscope.runs.provenance import Provenance
from rankscope.runs.run import Run
from rankscope.theory.theorems import THEOREMS, Theorem
from rankscope.verbs.bound import BOUND, EXECUTION
from rankscope.verbs.bound.conclusion import concluded
from rankscope.verbs.bound.passes import BoundPasses
from rankscope.verbs.bound.weights import read_weights
from rankscope.verbs.origin import about_inputs, floor_of, provenance_of

_WITHOUT_ACTIVATIONS = ("nothing", "weights")
_ON_GAINS = ("contraction_interval", "skip_interval")


def bound(
    model: str | Path | nn.Module,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    *,
    theorems: Sequence[str] | None = None,
    weights_only: bool = False,
    lanczos: int = 60,
    sequences: int | None = None,
    tokens: int = 64,
    batch: int = 4,
    random_tokens: bool = False,
    tokenizer: Any = None,
    padding: Padding = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | bool | None = None,
    offload: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    parallel: Parallel | None = None,
    progress: bool = False,
) -> Run:
    """Evaluate theorems on a model's own weights and activations: hypotheses, bound, measured value, slack.

    Every statement is tested where it speaks: on what attention reads and gives in each layer, and over the depth.
    Padding is left out. Inside ``with rankscope.operate(model, ...)`` the cut network is what is bounded.

    Args:
        model: a spec or a module with a family description of its heads.
        inputs: as for ``measure``.
        theorems: names from ``rankscope ls theorems``; None for all.
        weights_only: read the safetensors of a local folder one tensor at a time, without building the model; only
            the theorems that need no more are evaluated.
        lanczos: steps per layer and sequence for the largest gain; 0 leaves it to the certified bounds.
        sequences: at most how many sequences; None takes all that are given, and 2 of a file or of the sample text.
        tokens: length at which texts are cut.
        batch: sequences per forward pass.
        random_tokens: random ids instead of text.
        tokenizer: reads the texts, where the model comes without one; see ``measure``.
        padding: which of your own tokens do not count; see ``measure``.
        dtype: of the weights, when the model is loaded here.
        seed: of a random initialisation and of random inputs.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        offload: read a local folder block by block, for a model larger than memory; same values.
        memory: with ``offload``, a budget such as ``"3GiB"``; see ``measure``.
        work: with ``offload``, a folder in which a run that is killed is kept; see ``measure``.
        parallel: ``"data"`` shares the batches among the processes of an initialised group; see ``measure``.
        progress: show a progress bar.

    Returns:
        Rows with the columns ``theorem``, ``scope`` (``layer``, ``depth`` or ``network``) and ``hypothesis``;
        metrics are ``log10_bound``, ``log10_lower_bound``, ``log10_measured``, ``log10_slack``, ``log10_factor``, and
        ``hypothesis_value`` and ``margin`` of each hypothesis. ``extra["sentences"]`` has one sentence per theorem.

    Raises:
        UnsupportedConfigError: a model without head weights.
        UnknownNameError: no theorem of that name.

    Example:
        >>> run = bound("init:tiny-bert", sequences=1, tokens=16, theorems=["contraction_interval"], lanczos=10)
        >>> run.extra["applies"]["contraction_interval"]
        True
    """
    started = time.perf_counter()
    chosen = [THEOREMS[name] for name in dict.fromkeys(THEOREMS if theorems is None else theorems)]
    declared, offload = declared_or_offloaded(stream, offload)
    if weights_only and (offload or memory is not None or work is not None or parallel is not None):
        raise InputError(
            "weights_only reads one tensor at a time already. Leave out offload, memory and work, and parallel."
        )
    if weights_only:
        return _of_weights(model, chosen, explicit=theorems is not None, started=started)
    plan = InputPlan(
        sequences, tokens, batch, "content", seed, random_tokens, tokenizer, padding, BOUND.default("sequences")
    )
    steps = lanczos if any(entry.name in _ON_GAINS for entry in chosen) else None
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
        if loaded.config is None:
            raise UnsupportedConfigError(
                f"Theorems need the weights of single heads, and {type(loaded.model).__name__} is no transformers "
                "model with a family description. measure and ablate work without."
            )
        prepared = prepare_planned(loaded, inputs, plan)
        passes = BoundPasses(execution, prepared, steps)
        measured = passes.run(blocks, declared)
    if not measured:
        raise InputError("No sequence has two tokens or more, and fewer have no residual. Pass longer inputs.")
    provenance = provenance_of(loaded, prepared, passes.counted, seed, time.perf_counter() - started, declared)
    notes = (*loaded.notes, *prepared.notes)
    run = concluded(chosen, measured, provenance, floor_of(passes.counted.dtypes), notes, execution.described)
    return about_inputs(run, prepared)


def _of_weights(model: str | Path | nn.Module, chosen: Sequence[Theorem], *, explicit: bool, started: float) -> Run:
    if isinstance(model, nn.Module):
        raise InputError("weights_only reads a local folder without building the model. Leave it out for a module.")
    beyond = [entry.name for entry in chosen if entry.needs not in _WITHOUT_ACTIVATIONS]
    if explicit and beyond:
        raise InputError(
            f"{', '.join(beyond)} cannot be evaluated on weights alone: attention or activations are needed. Leave "
            "weights_only out."
        )
    lazy = lazy_model(model)
    found = read_weights(lazy)
    provenance = Provenance(
        model=str(model),
        origin="folder",
        config_hash=config_hash(lazy.config),
        wall_seconds=round(time.perf_counter() - started, 3),
    )
    note = f"only weights were read; not evaluated: {', '.join(beyond)}" if beyond else "only weights were read"
    kept = [entry for entry in chosen if entry.needs in _WITHOUT_ACTIVATIONS]
    return concluded(kept, [found], provenance, floor_of(set()), (note,))
