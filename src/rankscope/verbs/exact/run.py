"""``exact``: how fast does it really collapse? Computes residuals far below the float floor, with order and factor."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.exact_arithmetic.float64 import in_float64
from rankscope.execution.findings import Findings
from rankscope.execution.passes import Execution, HowToRun, Stage, declared_or_offloaded, executing
from rankscope.execution.support import Parallel
from rankscope.masks import Mask
from rankscope.models.inputs import InputPlan, Padding, Prepared, TokensPolicy, prepare_planned
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.runs.rows import Piece, RowWriter
from rankscope.runs.run import Run
from rankscope.stream.viewing import need_plain_stream, undisturbed
from rankscope.surgery.operating import operating, operation_of
from rankscope.surgery.operation import AttentionChoice, MaskChoice, MlpChoice, NormChoice, Operation
from rankscope.surgery.refusals import check_operable
from rankscope.verbs.exact import EXACT, EXECUTION
from rankscope.verbs.exact.judge import cross_checked, judge_exact
from rankscope.verbs.exact.readings import (
    Readings,
    is_pure,
    predict_blocks,
    read_exactly,
    read_in_float64,
    read_plainly,
    sees_everything,
)
from rankscope.verbs.origin import exact_floors, in_context, provenance_of, spec_of
from rankscope.verbs.reader import SiteReader


def exact(
    model: str | Path | nn.Module,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    *,
    skip: float | None = None,
    attention_skip: float | None = None,
    mlp_skip: float | None = None,
    mlp: MlpChoice = "keep",
    norm: NormChoice = "keep",
    mask: Mask | str | None = None,
    mask_mode: MaskChoice = "replace",
    attention: AttentionChoice = "keep",
    layers: int | Collection[int] | None = None,
    sequences: int | None = None,
    tokens: int = 128,
    tokens_policy: TokensPolicy = "content",
    random_tokens: bool = False,
    tokenizer: Any = None,
    padding: Padding = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    stability: bool = False,
    plain: bool = True,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | bool | None = None,
    offload: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    byte_budget: int | str | None = None,
    parallel: Parallel | None = None,
    progress: bool = False,
) -> Run:
    """Run a model in exact arithmetic and measure its residual at every block, however small.

    Surgery can be passed here (``skip=0.0``), or be active around the call (``with operate(...)``).

    Args:
        model: a spec or your own module; it runs in float64 and is restored afterwards.
        inputs: as for ``measure``.
        skip: gain on every skip; 0 removes it.
        attention_skip: gain on the skips around attention; overrides ``skip``.
        mlp_skip: gain on the skips around the MLPs; overrides ``skip``.
        mlp: ``"drop"`` removes the MLPs.
        norm: ``"identity"``, ``"scale"`` or ``"rms"`` replaces the norms of the blocks.
        mask: a mask or an expression such as ``"causal"``.
        mask_mode: how it is combined with the model's own mask.
        attention: ``"uniform"`` or ``"centred"``.
        layers: blocks to which the surgery applies; None for all.
        sequences: maximal number of sequences; None for all that are passed, or 4 from a file or the sample text.
        tokens: length to which texts are truncated.
        tokens_policy: which tokens to measure; see ``measure``.
        random_tokens: use random ids instead of text.
        tokenizer: tokenizer for the texts, if the model comes without one; see ``measure``.
        padding: which of your own tokens are padding; see ``measure``.
        dtype: dtype of the weights, if the model is loaded here.
        device: device to run on, such as ``"cuda"``, if the model is loaded here; None for the CPU.
        seed: seed for a random initialisation and for random inputs.
        stability: also compute each block's factor on an infinitesimal residual (``linear_factor``): above 1 the block
            pushes away from collapse, below 1 toward it.
        plain: also measure in float64 and in the model's own dtype.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: where the residual stream is, for a model that does not store it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        offload: read the weights block by block, for a model larger than memory; see ``measure``.
        memory: with ``offload``, a budget such as ``"3GiB"``; see ``measure``. Here a block is also kept in float64.
        work: with ``offload``, folder for checkpoints, so that a killed run can resume; see ``measure``.
        byte_budget: with ``offload``, the most to read from a server, such as ``"20GiB"``; see ``measure``.
        parallel: ``"data"`` shares the sequences among the processes of an initialised group; see ``measure``.
        progress: show a progress bar.

    Returns:
        Rows with the further column ``arithmetic``: ``exact``, ``law`` (the prediction of the cubic law from the
        weights, if it applies), ``float64`` and the model's own format.

    Raises:
        UnsupportedArithmeticError: the model uses an operation for which there is no exact rule yet.

    Example:
        >>> run = exact("init:tiny-bert", sequences=1, tokens=16, skip=0.0)
        >>> run.curve("order", "block.out").mean.round(2).tolist()
        [3.0, 3.0, 3.0]
    """
    started = time.perf_counter()
    declared, offload = declared_or_offloaded(stream, offload)
    operation = operation_of(
        skip=skip,
        attention_skip=attention_skip,
        mlp_skip=mlp_skip,
        mlp=mlp,
        norm=norm,
        mask=mask,
        mask_mode=mask_mode,
        attention=attention,
        layers=layers,
    )
    plan = InputPlan(
        sequences, tokens, 1, tokens_policy, seed, random_tokens, tokenizer, padding, EXACT.default("sequences")
    )
    how = HowToRun(seed, dtype, device, parallel, progress, offload, memory, work, byte_budget)
    with executing(EXECUTION, model, how) as execution:
        loaded = execution.loaded
        prepared = prepare_planned(loaded, inputs, plan)
        passes = ExactPasses(execution, prepared, operation, stability=stability, plain=plain)
        view = passes.run(blocks, declared)
    with undisturbed(loaded.model), quiet_transformers(), operating(loaded.model, operation, view=view):
        provenance = provenance_of(loaded, prepared, passes.counted, seed, time.perf_counter() - started, declared)
    table, contradictions = cross_checked(passes.writer.table())
    floor = exact_floors(loaded.dtype)
    verdict = judge_exact(table, floor["formats"], spec_of(model))
    run = Run(
        kind="exact",
        provenance=provenance,
        floor=floor,
        **verdict.fields(),
        table=table,
        notes=(*contradictions, *loaded.notes, *prepared.notes),
        extra=execution.described,
    )
    return in_context(run, prepared)


class ExactPasses:
    """Reads the residuals of one network.

    Args:
        execution: how the model is run.
        prepared: its inputs, one sequence in each batch.
        operation: the surgery.
        stability: also measure the linear factor.
        plain: also measure in float64 and in the model's own dtype.

    Attributes:
        writer: collects the rows.
        counted: knows the dtypes and lengths seen.
    """

    def __init__(
        self, execution: Execution, prepared: Prepared, operation: Operation, *, stability: bool, plain: bool
    ) -> None:
        self._execution, self._prepared, self._operation = execution, prepared, operation
        self._loaded = execution.loaded
        self._stability, self._plain = stability, plain
        self._masked: set[int] = set()
        self._stopped: set[int] = set()
        self.writer = RowWriter(coordinates=("arithmetic",))
        self.counted = SiteReader([], prepared.policy, self.writer)

    def run(self, blocks: str | Sequence[str] | None, stream: Stream | None) -> ModelView:
        """All sequences; returns the structure of the model."""
        execution = self._execution
        view = execution.plan(
            self._prepared,
            (self._operation, self._prepared.policy, self._stability, self._plain),
            blocks=blocks,
            stream=stream,
            variants=5 + 2 * self._stability + self._plain,
            reads_weights=True,
        )
        need_plain_stream(view, "exact")
        check_operable(self._operation, view)
        findings = Findings(self.writer, {"": self.counted}, rest=self._known, learn_rest=self._learn)
        with execution.stages(findings, passes=2) as stages:
            for stage in stages:
                with operating(view.model, self._operation, view=stage.view):
                    self._pass(stage)
        execution.collect(findings, self._order)
        # The law does not apply to a sequence in which any block hides a key, which is known only after the last block.
        self.writer.replace(
            piece
            for piece in self.writer.pieces
            if piece.coordinates != ("law",) or piece.first_sequence not in self._masked
        )
        return view

    def _pass(self, stage: Stage) -> None:
        """Run in the model's own dtype first, then convert the weights to float64 once for all sequences."""
        model = stage.view.model
        own = next((parameter.dtype for parameter in model.parameters()), torch.float64)
        pure = is_pure(self._loaded) and len(stage.view.stacks) == 1
        for part in self._execution.batches():
            if pure:
                with stage.through(part, "own", keep=not self._plain):
                    complete = sees_everything(stage.view, part)
                if not complete:
                    self._masked.add(part.first_sequence)
            if self._plain:
                readings = Readings(part.first_sequence, self.writer)
                read_plainly(stage.view, part, readings, self.counted, partial(stage.through, part))
        with in_float64(model):
            for part in self._execution.batches():
                readings, through = Readings(part.first_sequence, self.writer), partial(stage.through, part)
                states = read_exactly(stage.view, part, readings, stability=self._stability, through=through)
                reached = pure and part.first_sequence not in self._stopped | self._masked
                if reached and not predict_blocks(self._loaded, stage.view, states, readings):
                    self._stopped.add(part.first_sequence)
                if self._plain and own != torch.float64:
                    read_in_float64(stage.view, part, readings, self.counted, through)

    def _known(self) -> dict[str, Any]:
        return {"masked": sorted(self._masked), "stopped": sorted(self._stopped)}

    def _learn(self, known: Mapping[str, Any]) -> None:
        self._masked |= set(known["masked"])
        self._stopped |= set(known["stopped"])

    def _order(self, piece: Piece) -> tuple[int, int]:
        """Sequence by sequence; exact, the law, the model's own format, float64."""
        places = {"exact": 0, "law": 1, "float64": 3} | {self._loaded.dtype: 2}
        return piece.first_sequence, places.get(str(piece.coordinates[0]), 2)
