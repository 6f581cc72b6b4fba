"""``decompose``: which paths carry the signal?"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankscope.errors import InputError
from rankscope.execution.findings import Findings
from rankscope.execution.passes import executing
from rankscope.ext.paths.decompose import DECOMPOSE, EXECUTION, OWN
from rankscope.ext.paths.decompose.judge import judge_decomposition
from rankscope.ext.paths.reading import COORDINATES, PathReader
from rankscope.ext.paths.task import PathTask
from rankscope.metrics import METRICS
from rankscope.models.hf import is_hf_model
from rankscope.models.inputs import Batch, InputsLike, as_inputs, prepare_planned
from rankscope.models.linear_maps import linear_map
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.model import ModelLike, as_model
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, trace
from rankscope.stream.viewing import need_plain_stream, undisturbed
from rankscope.surgery.refusals import check_carries
from rankscope.surgery.surgery import SurgeryLike
from rankscope.verbs.calling import checked
from rankscope.verbs.origin import floor_of, in_context, provenance_of

DEFAULT_METRICS = ("relative_residual", "stable_rank")
Marginal = Literal["heads", "layers"]


@checked(*OWN)
def decompose(
    model: ModelLike,
    inputs: InputsLike = None,
    surgery: SurgeryLike = None,
    *,
    marginals: Collection[Marginal] | Marginal = (),
    at_layers: Collection[int] | int = (),
    origins: bool = False,
    token: int | None = None,
    metrics: Sequence[str] | str | None = None,
    progress: bool = False,
) -> Run:
    r"""Split the residual stream into the sums of all paths of each length, exactly and in polynomial time.

    Attention and norm scales are fixed to their values in the model's own forward pass; the stream is then linear,
    and the sum over paths of length k obeys :math:`S_k \leftarrow S_k + \sum_h P_h S_{k-1} W_h`. The outputs of MLPs
    and biases start new paths of length 0. Sums are computed in the dtype of the model, at least float32.

    Args:
        model: a :class:`rankscope.Model`, a spec or a module with a family description of its heads.
        inputs: :class:`rankscope.Inputs`, or what is accepted in their place; see ``measure``.
        surgery: :class:`rankscope.Surgery` under which the model runs, or a dictionary of its fields; None for none. It
            is part of the network.
        marginals: ``"heads"``, ``"layers"``: all paths through each.
        at_layers: blocks after which the lengths are reported as well.
        origins: report embedding, MLPs and biases separately.
        token: token id whose logit at the last position is decomposed too; the model needs an unembedding.
        metrics: token metrics of each sum; None for the relative residual and the stable rank.
        progress: show a progress bar.

    Returns:
        Rows with the columns ``length``, ``paths`` (which paths) and ``origin``;
        ``extra["sum_error"]`` is the worst relative distance between the sum over lengths and the forward pass.

    Raises:
        UnsupportedConfigError: a model without head weights, or with a branch its heads do not make up.
        UnsupportedOperationError: paths around blocks other than their skips would be missing.

    Example:
        >>> from rankscope import Inputs
        >>> run = decompose("init:tiny-gpt2", Inputs(sequences=2, tokens=16))
        >>> run.extra["sum_error"] < 1e-6
        True
    """
    started = time.perf_counter()
    subject, given = as_model(model), as_inputs(inputs)
    plan = given.plan(**DECOMPOSE.inputs_defaults, seed=subject.seed)
    kinds, layers = frozenset(marginals), tuple(at_layers)  # type: ignore[arg-type]  # lists, once checked
    specs = [METRICS[name] for name in dict.fromkeys(DEFAULT_METRICS if metrics is None else metrics)]
    with executing(EXECUTION, subject, surgery, progress=progress) as execution:
        loaded = execution.loaded
        prepared = prepare_planned(loaded, given.data, plan)
        unembedding, direction = (None, None) if token is None else unembedding_of(loaded, token)
        reader = PathReader(specs, plan.policy, RowWriter(coordinates=COORDINATES), direction)
        view = execution.plan(prepared, reads_weights=True)
        need_plain_stream(view, "decompose")
        _check_layers(layers, view)
        check_carries(view, "a sum over the paths through the blocks")
        if unembedding is not None:
            with undisturbed(loaded.model), quiet_transformers():
                check_reads_the_stream(unembedding, view, prepared[0])
        task = PathTask(view, loaded.config, reader, kinds, layers, origins)
        findings = Findings(reader.writer, {"": task})
        with execution.stages() as stages:
            for _ in stages:
                for part in execution.batches():
                    task.run(part)
        execution.collect(findings)
        table = reader.writer.table()
        verdict = judge_decomposition(table, reader.sum_error)
        seconds = time.perf_counter() - started
        run = Run(
            kind="decompose",
            provenance=provenance_of(loaded, prepared, reader, subject.seed, seconds, subject.declared_stream),
            floor=floor_of(reader.dtypes),
            **verdict.fields(),
            table=table,
            notes=(*loaded.notes, *prepared.notes),
            extra={**task.described, **execution.described},
        )
        return in_context(run, prepared)


def _check_layers(layers: Collection[int], view: ModelView) -> None:
    deepest = max(stack.depth for stack in view.stacks)
    beyond = sorted(layer for layer in layers if not 0 <= layer < deepest)
    if beyond:
        raise InputError(f"at_layers={beyond}: this model has blocks 0 to {deepest - 1}.")


def unembedding_of(loaded: LoadedModel, token: int) -> tuple[nn.Module, Tensor]:
    """The module that computes logits, and its row for a token.

    Raises:
        InputError: the model has none, or not for this token.
    """
    model: Any = loaded.model
    owner = model.get_output_embeddings() if is_hf_model(model) else None
    if owner is None:
        raise InputError(
            f"token={token}: {type(loaded.model).__name__} has no unembedding. Load the model with its language head, "
            "e.g. rankscope.load(spec, model_class='AutoModelForCausalLM').model, and pass that."
        )
    weight = linear_map(owner, "the unembedding").weight
    if not 0 <= token < weight.shape[0]:
        raise InputError(f"token={token}: the vocabulary has {weight.shape[0]} entries.")
    return owner, weight[token]


def check_reads_the_stream(owner: nn.Module, view: ModelView, batch: Batch) -> None:
    """Run the model once and compare the input of the unembedding with the final stream, bit by bit.

    Raises:
        InputError: the two differ, so a share of the stream is not a share of the logit.
    """
    last: list[Tensor] = []
    read: list[Tensor] = []

    def observe(ref: SiteRef, seen: Observed) -> None:
        if isinstance(seen, Tensor):
            last.append(seen.detach().clone())

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        read.append(args[0].detach().clone())

    handle = owner.register_forward_pre_hook(keep)
    try:
        with trace(view, SiteSelection.parse(["block.out", "final"]), observe):
            batch.run(view.model)
    finally:
        handle.remove()
    if not any(_tail(given, last[-1]) for given in read):
        raise InputError(
            f"token=: the unembedding of {type(view.model).__name__} does not read the final stream (its head changes "
            "it first), so the logit is not a sum over paths. Leave token out."
        )


def _tail(given: Tensor, stream: Tensor) -> bool:
    """Whether the rows read are the last rows of the stream; some models compute logits for the last token only."""
    if given.dim() != stream.dim() or given.shape[1] > stream.shape[1]:
        return False
    return torch.equal(given, stream[:, stream.shape[1] - given.shape[1] :])
