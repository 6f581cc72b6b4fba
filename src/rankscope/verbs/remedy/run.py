"""``remedy``: what would each known remedy do to the tokens of this model, and at what cost?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rankscope.errors import InputError
from rankscope.execution.passes import HowToRun, executing
from rankscope.execution.support import Parallel
from rankscope.models.inputs import InputPlan, Padding, TokensPolicy, prepare_planned
from rankscope.models.loading import load_initialised_twin
from rankscope.models.stream import Stream, stream_of
from rankscope.models.view import ModelView
from rankscope.remedies import REMEDIES, Arrangement, arrangement_of, evidence_for
from rankscope.runs.run import Run
from rankscope.stream.viewing import need_plain_stream
from rankscope.surgery.operation import Operation
from rankscope.surgery.session import operations_on
from rankscope.verbs.ablate.variants import variant_named
from rankscope.verbs.origin import floor_of, in_context, provenance_of
from rankscope.verbs.remedy import EXECUTION, REMEDY
from rankscope.verbs.remedy.judge import NONE, judge_remedies, ranked
from rankscope.verbs.remedy.trial import Trial, parsed_remedy


def remedy(
    model: str | Path | nn.Module,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    *,
    remedies: Sequence[str] | None = None,
    variant: str = "full",
    weights: Literal["given", "init"] = "given",
    gradients: bool = True,
    repeats: int = 3,
    sequences: int | None = None,
    tokens: int = 64,
    batch: int = 8,
    tokens_policy: TokensPolicy = "content",
    random_tokens: bool = False,
    tokenizer: Any = None,
    padding: Padding = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
    offload: bool = False,
    parallel: Parallel | None = None,
    progress: bool = False,
) -> Run:
    """Apply each remedy to a model in turn, measure every block, and rank the remedies.

    Remedies that rescued trainings of small networks with such norms and skips come first; those that were tried and
    rescued none come last. Within each group they are ranked by the relative residual after the last block: how far
    tokens stay apart on these weights. This model is not trained.

    Args:
        model: a spec or your own module, which is left unchanged.
        inputs: as for ``measure``.
        remedies: names from ``rankscope ls remedies``, each as ``NAME`` or ``NAME=STRENGTH``; None for all.
        variant: the network to which remedies are applied: ``"full"``, or one with parts removed (``"+norm+mlp"``: no
            skips).
        weights: ``"given"``, or ``"init"`` for a random initialisation of the same architecture.
        gradients: also compare the gradients of query and key weights with those of value weights.
        repeats: timed forward passes per remedy; 0 to skip timing.
        sequences: maximal number of sequences; None for all that are passed, or 4 from a file or the sample text.
        tokens: length to which texts are truncated.
        batch: sequences per forward pass.
        tokens_policy: which tokens to measure; see ``measure``.
        random_tokens: use random ids instead of text.
        tokenizer: tokenizer for the texts, if the model comes without one; see ``measure``.
        padding: which of your own tokens are padding; see ``measure``.
        dtype: dtype of the weights, if the model is loaded here.
        device: device to run on, such as ``"cuda"``, if the model is loaded here; None for the CPU.
        seed: seed for a random initialisation and for random inputs.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: where the residual stream is, for a model that does not store it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        offload: not supported, because gradients and timing need whole forward passes.
        parallel: ``"data"`` shares the batches among the processes of an initialised group; see ``measure``. Only
            the first process measures gradients and time.
        progress: show a progress bar.

    Returns:
        Rows as in ``measure`` with the further column ``remedy`` (``none`` among them), and in ``extra["remedies"]``
        one entry per remedy, best first. Remedies that the model does not support are left out and listed in the notes.

    Example:
        >>> run = remedy("init:tiny-bert", remedies=["residual_scale"], sequences=2, tokens=16, repeats=0)
        >>> sorted(entry["name"] for entry in run.extra["remedies"])
        ['none', 'residual_scale']
    """
    started = time.perf_counter()
    declared = stream_of(stream)
    plan = InputPlan(
        sequences, tokens, batch, tokens_policy, seed, random_tokens, tokenizer, padding, REMEDY.default("sequences")
    )
    how = HowToRun(seed, dtype, device, parallel, progress, offload)
    with executing(EXECUTION, model, how) as execution:
        loaded = execution.loaded
        if weights == "init" and loaded.origin != "init":
            loaded = load_initialised_twin(loaded, seed=seed)
        wanted = [parsed_remedy(word) for word in remedies or REMEDIES]
        prepared = prepare_planned(loaded, inputs, plan)
        view = execution.plan(prepared, blocks=blocks, stream=declared, model=loaded.model, reads_weights=True)
        need_plain_stream(view, "remedy")
        arrangement = _arrangement(view, variant_named(variant).operation)
        trial = Trial(loaded, view, prepared, variant_named(variant), tokens_policy, seed)
        arms = trial.arms(wanted)
        trial.run(arms, execution)
        trial.assess(arms, execution, gradients=gradients, repeats=repeats)
    done = [arm for arm in arms if not arm.refused]
    if not any(arm.name != NONE for arm in done):
        raise InputError("None of the remedies could be applied. " + " ".join(trial.notes))
    table = trial.writer.table()
    seen = evidence_for(arrangement, ["token_collapse"])
    entries = ranked(table, [arm.facts(seen) for arm in done])
    floor = floor_of(trial.reader.dtypes)
    verdict = judge_remedies(entries, floor["relative"], prepared.sequences, is_random=loaded.origin == "init")
    run = Run(
        kind="remedy",
        provenance=provenance_of(loaded, prepared, trial.reader, seed, time.perf_counter() - started, declared),
        floor=floor,
        **verdict.fields(),
        table=table,
        notes=(*loaded.notes, *prepared.notes, *trial.notes),
        extra={"variant": variant, "remedies": entries, **execution.described},
    )
    return in_context(run, prepared)


def _arrangement(view: ModelView, operation: Operation) -> Arrangement | None:
    """How norms and skips are arranged in the network that is treated; None where that is not known."""
    if operations_on(view.model):
        return None
    if operation == Operation(attention_skip=0.0, mlp_skip=0.0):
        return "no skips"
    return arrangement_of(view) if operation == Operation() else None
