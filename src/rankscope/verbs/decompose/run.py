"""``decompose``: which paths carry the signal?"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rankscope.errors import InputError, UnknownNameError
from rankscope.execution.findings import Findings
from rankscope.execution.offload.budget import parse_size
from rankscope.execution.passes import HowToRun, executing
from rankscope.execution.support import Parallel
from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch, InputPlan, Padding, Prepared, TokensPolicy, prepare_planned
from rankscope.models.linear_maps import linear_map
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.dtypes import parse_dtype
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream, stream_of
from rankscope.models.view import ModelView
from rankscope.options import renamed
from rankscope.paths.capture import CONVENTIONS, Convention
from rankscope.paths.lengths import ORIGINS, MemoryPlan, plan_memory
from rankscope.paths.reading import COORDINATES, PathReader
from rankscope.paths.task import PathTask
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, trace
from rankscope.stream.viewing import need_plain_stream, undisturbed
from rankscope.surgery.refusals import check_carries
from rankscope.verbs.decompose import EXECUTION
from rankscope.verbs.decompose.judge import judge_decomposition
from rankscope.verbs.origin import floor_of, in_context, provenance_of

DEFAULT_METRICS = ("relative_residual", "stable_rank")
Marginal = Literal["heads", "layers", "pairs"]


def decompose(
    model: str | Path | nn.Module,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    *,
    convention: Convention = "sources",
    marginals: Collection[Marginal] = (),
    at_layers: Collection[int] = (),
    origins: bool = False,
    token: int | None = None,
    metrics: Sequence[str] | None = None,
    memory: int | str | float | None = None,
    arithmetic: torch.dtype | str | None = None,
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
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
    offload: bool = False,
    parallel: Parallel | None = None,
    progress: bool = False,
    layers: Collection[int] | None = None,
) -> Run:
    r"""Split the residual stream into the sums of all paths of each length, exactly and in polynomial time.

    Attention and norm scales are fixed to their values in the model's own forward pass; the stream is then linear,
    and the sum over paths of length k obeys :math:`S_k \leftarrow S_k + \sum_h P_h S_{k-1} W_h`.

    Args:
        model: a spec or a module with a family description of its heads; active surgery is part of the network.
        inputs: as for ``measure``.
        convention: ``"sources"``: the outputs of MLPs and biases start new paths of length 0. ``"linearised"``: MLPs
            are replaced by their Jacobian at each token, and only the remainder is a source.
        marginals: ``"heads"``, ``"layers"``: all paths through each; ``"pairs"``: share of each pair of heads.
        at_layers: blocks after which the lengths are reported as well.
        origins: report embedding, MLPs and biases separately.
        token: token id whose logit at the last position is decomposed too; the model needs an unembedding.
        metrics: token metrics of each sum; None for the relative residual and the stable rank.
        memory: memory budget in addition to the model, such as ``"3GiB"`` or a number of bytes; None for no
            bound. A bare number below 1024 is read as GiB, the earlier meaning, with a warning.
        arithmetic: ``"float64"`` computes sums in float64; None in the dtype of the model (at least float32).
        sequences: maximal number of sequences; None for all that are passed, or 8 from a file or the sample text.
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
        offload: not supported, because the sums of all lengths would have to be stored between blocks.
        parallel: ``"data"`` shares the batches among the processes of an initialised group; see ``measure``.
        progress: show a progress bar.
        layers: old name of ``at_layers``.

    Returns:
        Rows with the columns ``length``, ``paths`` (which paths), ``origin`` and ``then`` (the later head of a pair);
        ``extra["sum_error"]`` is the worst relative distance between the sum over lengths and the forward pass.

    Raises:
        UnsupportedConfigError: a model without head weights, or with a branch its heads do not make up.
        UnsupportedOperationError: the stream gets around blocks beside their skips, so that paths would be missing.

    Example:
        >>> run = decompose("init:tiny-gpt2", sequences=2, tokens=16)
        >>> run.extra["sum_error"] < 1e-6
        True
    """
    started = time.perf_counter()
    declared = stream_of(stream)
    at_layers = renamed("decompose", "layers", layers, "at_layers", at_layers or None) or ()
    budget = None if memory is None else bytes_in(memory)
    _check_names(convention, marginals)
    specs = [METRICS[name] for name in dict.fromkeys(DEFAULT_METRICS if metrics is None else metrics)]
    how = HowToRun(seed, dtype, device, parallel, progress, offload)
    with executing(EXECUTION, model, how) as execution:
        loaded = execution.loaded
        # With a budget, inspect the model with one sequence first, and then choose the sequences per pass.
        looked_at = batch if budget is None else 1
        plan = InputPlan(sequences, tokens, looked_at, tokens_policy, seed, random_tokens, tokenizer, padding)
        prepared = prepare_planned(loaded, inputs, plan)
        unembedding, direction = (None, None) if token is None else unembedding_of(loaded, token)
        reader = PathReader(specs, tokens_policy, RowWriter(coordinates=COORDINATES), direction)
        view = execution.plan(prepared, blocks=blocks, stream=declared, reads_weights=True)
        need_plain_stream(view, "decompose")
        _check_layers(at_layers, view)
        check_carries(view, "a sum over the paths through the blocks")
        wanted = parse_dtype(arithmetic)
        fitting = MemoryPlan(batch, max(stack.depth for stack in view.stacks) + 1)
        with undisturbed(loaded.model), quiet_transformers():
            if unembedding is not None:
                check_reads_the_stream(unembedding, view, prepared[0])
            if budget is not None:
                kept, rerun = bool(marginals), convention == "linearised"
                fitting = planned_memory(
                    view, prepared, budget, wanted, batch=batch, origins=origins, kept=kept, rerun=rerun
                )
                prepared = prepare_planned(loaded, inputs, replace(plan, batch=fitting.sequences))
                execution.prepared = prepared
        kinds = frozenset(marginals)
        task = PathTask(view, loaded.config, reader, convention, kinds, at_layers, origins, fitting.chunk, wanted)
        tally = PathTally(task, reader)
        findings = Findings(reader.writer, {"": tally})
        with execution.stages(findings) as stages:
            for _ in stages:
                for part in execution.batches():
                    tally.run(part)
        execution.collect(findings)
    table = reader.writer.table()
    verdict = judge_decomposition(table, reader.sum_error)
    run = Run(
        kind="decompose",
        provenance=provenance_of(loaded, prepared, reader, seed, time.perf_counter() - started, declared),
        floor=floor_of(reader.dtypes),
        **verdict.fields(),
        table=table,
        notes=(*loaded.notes, *prepared.notes),
        extra={**tally.described, "convention": convention, **execution.described},
    )
    return in_context(run, prepared)


class PathTally:
    """What a decomposition records besides its rows, per batch, so that the records of several ranks can be merged.

    Args:
        task: decomposes a batch.
        reader: writes the rows of the task.
    """

    def __init__(self, task: PathTask, reader: PathReader) -> None:
        self._task, self._reader = task, reader
        self._applications: dict[int, tuple[int, int]] = {}
        self._counts: dict[str, list[str]] = {}

    def run(self, part: Batch) -> None:
        """Decompose a batch."""
        done, needed = self._task.applications, self._task.needed
        self._task.run(part)
        self._applications[part.first_sequence] = self._task.applications - done, self._task.needed - needed
        self._counts = {str(stack or ""): [str(n) for n in counts] for stack, counts in self._task.counts.items()}

    def seen(self) -> dict[str, Any]:
        """All of it as JSON."""
        lengths = [[stack, *item] for stack, own in self._reader.lengths.items() for item in own.items()]
        return {
            "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in self._reader.dtypes),
            "lengths": lengths,
            "sum_error": self._reader.sum_error,
            "applications": [[first, *counts] for first, counts in self._applications.items()],
            "counts": self._counts,
        }

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Add what another rank has seen."""
        self._reader.dtypes |= {getattr(torch, name) for name in seen["dtypes"]}
        for stack, sequence, count in seen["lengths"]:
            self._reader.lengths.setdefault(stack, {})[sequence] = count
        self._reader.sum_error = max(self._reader.sum_error, seen["sum_error"])
        self._applications |= {first: (done, needed) for first, done, needed in seen["applications"]}
        self._counts |= seen["counts"]

    @property
    def described(self) -> dict[str, Any]:
        """What a run says besides its rows."""
        return {
            "sum_error": self._reader.sum_error,
            "applications": sum(done for done, _ in self._applications.values()),
            "needed_applications": sum(needed for _, needed in self._applications.values()),
            "path_counts": self._counts,
        }


def _check_names(convention: str, marginals: Collection[str]) -> None:
    if convention not in CONVENTIONS:
        raise UnknownNameError("convention", convention, CONVENTIONS)
    for name in marginals:
        if name not in get_args(Marginal):
            raise UnknownNameError("marginal", name, get_args(Marginal))


def _check_layers(layers: Collection[int], view: ModelView) -> None:
    deepest = max(stack.depth for stack in view.stacks)
    beyond = sorted(layer for layer in layers if not 0 <= layer < deepest)
    if beyond:
        raise InputError(f"at_layers={beyond}: this model has blocks 0 to {deepest - 1}.")


GIB = 2**30
SMALLEST_SIZE = 1024
"""A bare number below this was probably meant in GiB."""


def bytes_in(memory: int | str | float) -> int:
    """A budget in bytes, from ``"3GiB"`` or a number of bytes.

    Example:
        >>> bytes_in("1.5 MiB")
        1572864
    """
    try:
        bare = float(memory)
    except ValueError:
        return parse_size(str(memory))
    if bare >= SMALLEST_SIZE:
        return int(bare)
    told = f"decompose(memory={memory}) is read as GiB, as before; write memory='{memory}GiB' instead."
    warnings.warn(told, DeprecationWarning, stacklevel=3)
    return max(1, int(bare * GIB))


def planned_memory(
    view: ModelView,
    prepared: Prepared,
    memory: int,
    dtype: torch.dtype | None,
    *,
    batch: int,
    origins: bool,
    kept: bool,
    rerun: bool,
) -> MemoryPlan:
    """Determine the sizes of the residual stream in one pass, and choose the batch size that fits the budget.

    Args:
        view: the model.
        prepared: inputs of one sequence each.
        memory: the budget in bytes.
        dtype: of the sums; None for the model's own, at least float32.
        batch: the requested number of sequences per pass.
        origins: whether embedding, MLPs and biases are kept separate.
        kept: whether the sums before each block are stored for marginals.
        rerun: whether blocks are rerun for Jacobians.
    """
    sizes: dict[str, torch.Size] = {}
    itemsize = 4

    def observe(ref: SiteRef, seen: Observed) -> None:
        nonlocal itemsize
        if isinstance(seen, Tensor):
            itemsize = max(4, seen.element_size()) if dtype is None else dtype.itemsize
            sizes.setdefault("stream", seen.shape)
            return
        assert isinstance(seen, AttentionCall)
        heads = seen.query if seen.weights is None else seen.weights
        if heads is not None:
            sizes.setdefault("heads", heads.shape)

    with trace(view, SiteSelection.parse(["block.in@0", "attention.probs@0"]), observe):
        prepared[0].run(view.model)
    _, tokens, dim = sizes["stream"]
    heads = sizes["heads"][1] if "heads" in sizes else 1
    depth = max(stack.depth for stack in view.stacks)
    most = min(batch, sum(part.sequences for part in prepared))
    return plan_memory(
        memory,
        sequences=most,
        tokens=tokens,
        dim=dim,
        depth=depth,
        heads=heads,
        itemsize=itemsize,
        origins=len(ORIGINS) if origins else 1,
        kept=kept,
        rerun=rerun,
    )


def unembedding_of(loaded: LoadedModel, token: int) -> tuple[nn.Module, Tensor]:
    """The module that computes logits, and its row for a token.

    Raises:
        InputError: the model has none, or not for this token.
    """
    from transformers import PreTrainedModel

    owner = loaded.model.get_output_embeddings() if isinstance(loaded.model, PreTrainedModel) else None
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
