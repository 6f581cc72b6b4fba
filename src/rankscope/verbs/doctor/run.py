"""``doctor``: what is wrong with this model, and can the numbers be trusted?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import (
    DiscoveryError,
    InputError,
    LayoutError,
    RankscopeError,
    SiteError,
    UnsupportedOperationError,
)
from rankscope.examination import ROWS, Examination, find
from rankscope.examination.outcomes import FAILS
from rankscope.examination.passes import Loss, in_training
from rankscope.linalg.precision import as_float64
from rankscope.models.inputs import Batch, InputsLike, as_inputs
from rankscope.models.inputs.record import passes_counted
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.model import ModelLike, as_model
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import same_buffers, without_fastpath
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.claims import claims_of
from rankscope.stream.frames import tensors_in
from rankscope.stream.sites import SITES, SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, Unreadable, trace
from rankscope.stream.viewing import (
    notes_on_hidden_attention,
    notes_on_second_streams,
    undisturbed,
    view_and_batches,
    with_proven_cuts,
)
from rankscope.surgery.operating import operating
from rankscope.surgery.session import operations_on
from rankscope.surgery.surgery import SurgeryLike, as_surgery
from rankscope.verbs.calling import checked
from rankscope.verbs.doctor import OWN
from rankscope.verbs.doctor.checks import Check, DoctorReport, StackFacts
from rankscope.verbs.doctor.reaching import MOST, batch_for, builder_of, loss_for, named_value, optimizer_for

_ROUNDINGS = 64


@checked(*OWN)
def doctor(
    model: ModelLike | Callable[[], nn.Module],
    inputs: InputsLike = None,
    surgery: SurgeryLike = None,
    *,
    loss: Loss | str | None = None,
    labels: Any = None,
    optimizer: Any = None,
    details: bool = False,
    progress: bool = False,
) -> DoctorReport:
    """Say what is wrong with a model and what to change, and whether rankscope's numbers can be trusted on it.

    Faults are looked for by experiments: a token, a sequence or a parameter is replaced, or a part of the model is
    changed inside a ``with`` block, and two numbers are compared. The model itself is not changed.

    Args:
        model: a :class:`rankscope.Model`, a spec or your own module; or a function that builds it, such as
            ``train.py:build``. With the weights that it begins with, what training did is told apart from what is
            wrong with the architecture.
        inputs: :class:`rankscope.Inputs`, or what is accepted in their place; see ``measure``. At most 16 sequences are
            used.
        surgery: :class:`rankscope.Surgery` under which the checks run, or a dictionary of its fields; None for none.
            Faults are only looked for without surgery.
        loss: a function of the model's output and ``labels`` (of the output and the inputs, or of the output alone,
            without labels); ``"own"`` for ``output.loss``. With it, gradients and the objective are examined.
        labels: targets of the loss, or the class of each sequence; the first axis counts sequences.
        optimizer: the optimizer of the training, or a function that makes it from the model.
        details: also print all checks and what is claimed about the structure.
        progress: show which cause is being looked for.

    Example:
        >>> doctor("init:tiny-gpt2").passed
        True

    Raises:
        InputError: the model does not run on the inputs, or the loss on what it returns.
    """
    build = builder_of(model)
    subject = as_model(model if build is None or build is not model else build())  # type: ignore[arg-type]
    given, cut = as_inputs(inputs), as_surgery(surgery)
    loaded = subject.loaded
    if operations_on(loaded.model):
        raise UnsupportedOperationError(
            "doctor examines a model as it is written: call it outside operate(), or pass surgery= to run its checks "
            "under surgery."
        )
    with passes_counted() as first:
        batch, told, unclear = batch_for(subject, given, named_value(labels) if labels is not None else given.labels)
    name = type(loaded.model).__name__
    why, view = "", None
    checks: tuple[Check, ...] = ()
    with undisturbed(loaded.model), quiet_transformers(), passes_counted() as count, ExitStack() as opened:
        try:
            view, (batch,) = view_and_batches(
                loaded.model, (batch,), blocks=subject.blocks, stream=subject.declared_stream
            )
            view = with_proven_cuts(view)
        except DiscoveryError as error:
            why = str(error)
            # Without blocks no number is wrong, because measure refuses; a layout can be declared, so it is asked for.
            has_axes = isinstance(error, LayoutError)
            checks = (Check("shape", "fail", why),) if has_axes else (Check("blocks", "refused", why),)
        except UnsupportedOperationError as error:  # an operator that cannot be followed, such as flex_attention
            why = str(error)
            checks = (Check("blocks", "refused", why),)
        structure = count.passes
        if view is not None:
            if not cut.changes_nothing:
                opened.enter_context(operating(loaded.model, cut.operation, view=view))
            small = batch.taken(0, 2) if batch.sequences > 2 else batch
            checks = (*_other_paths(view), *_examine(loaded, view, small), *check_heads(loaded, view))
    if unclear:
        checks = (*checks, Check("inputs", "fail", f"measure refuses them: {unclear}"))
    report = DoctorReport(
        subject.spec or name,
        name,
        () if view is None else tuple(map(_facts, view.stacks)),
        checks,
        () if view is None else claims_of(view),
        details=details,
    )
    if not cut.changes_nothing:
        return report
    labelled = told if isinstance(told, Tensor) else None
    examination = Examination(
        loaded.model, batch, view, why, loss_for(loss), labelled, optimizer_for(optimizer, loaded.model),
        targets=None if labelled is not None else told, build=build,
    )  # fmt: skip
    with quiet_transformers(), _telling(shown=progress) as tell:
        _check_loss(examination)
        diagnosis = find(examination, tell)
    shown = any(one.kind == "fault" and one.certainty == "shown" for one in diagnosis.findings)
    if shown and checks and checks[0].name == "shape" and view is None:
        # To declare another layout would hide the fault.
        unread = replace(checks[0], detail="The residual stream cannot be read with the fault that was found.")
        report = replace(report, checks=(unread, *checks[1:]))
    return replace(
        report,
        findings=diagnosis.findings,
        not_examined=diagnosis.not_examined,
        passes=(count.passes - structure + diagnosis.forward_passes, diagnosis.backward_passes),
        structure_passes=first.passes + structure,
    )


def _check_loss(x: Examination) -> None:
    """Refuse a loss that cannot be called on what the model returns, in evaluation mode or in training mode."""
    if x.loss is None:
        return
    with torch.random.fork_rng(devices=[]), same_buffers(x.model):
        try:
            output = x.returned
        except FAILS:
            return  # what needs the output is not examined, and says so
        try:
            x.loss_of(output)
        except FAILS as error:
            with suppress(*FAILS):
                x.once(in_training)
                return
            raised = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(".")
            shapes = [tuple(one.shape) for one in (x.result, x.labels) if one is not None]
            raise InputError(
                f"loss raises on what the model returns and the labels ({' and '.join(map(str, shapes))}): {raised}. "
                "Pass what your loop calls, such as lambda output, labels: cross_entropy(output.flatten(0, 1), "
                f"labels.flatten()); at most {MOST} sequences are examined, so it must read labels that it is given."
            ) from error


@contextmanager
def _telling(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar over the causes, on stderr."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(ROWS))
        yield lambda title: bar.update(task, advance=1, description=title)


def _facts(stack: Stack) -> StackFacts:
    return StackFacts(
        name=stack.name,
        depth=stack.depth,
        blocks=re.sub(r"\d+", "*", stack.calls[0].module_name) or "the model itself",
        skips=tuple(plan.skips for plan in stack.plans),
        attention=tuple(len(plan.attention) for plan in stack.plans),
        layout=stack.layout,
        final_norm=stack.final_norm,
    )


def _other_paths(view: ModelView) -> Iterator[Check]:
    """Skips around several blocks, and paths around blocks that cannot be removed; all else is among the claims."""
    for stack in view.stacks:
        if stack.long_skips:
            where = "; ".join(skip.where for skip in stack.long_skips[:4])
            yield Check("long skips", "pass", f"a gain on the skips scales them too: {where}")
        if uncut := [carry.where for carry in stack.carries if carry.calls_begun is None]:
            passes = f"the stream also passes through {'; '.join(uncut[:4])}"
            yield Check("uncut skips", "refused", f"gains on skips are refused: {passes}")


class _Witness:
    """Records the sums of attention rows, and values that are not finite."""

    def __init__(self) -> None:
        self.not_finite: SiteRef | None = None
        self.row_sums: list[tuple[float, float]] = []
        self.mismatch = 0.0
        self.eps = torch.finfo(torch.float64).eps

    def __call__(self, ref: SiteRef, seen: Observed) -> None:
        if isinstance(seen, Unreadable):
            return
        if isinstance(seen, AttentionCall):
            probs = seen.probs()
            # Many models compute their softmax in float32, whatever their own dtype.
            self.eps = max(self.eps, torch.finfo(probs.dtype).eps)
            sums = as_float64(probs).sum(-1)
            self.row_sums.append((float(sums.min()), float(sums.max())))
            self.mismatch = max(self.mismatch, seen.mismatch())
            return
        tensors = seen if isinstance(seen, tuple) else (seen,)
        self.eps = max(self.eps, torch.finfo(tensors[0].dtype).eps)
        # An update shows the stream and a branch that have sites of their own.
        is_pair = isinstance(seen, tuple)
        if self.not_finite is None and not is_pair and not all(bool(torch.isfinite(t).all()) for t in tensors):
            self.not_finite = ref


def _examine(loaded: LoadedModel, view: ModelView, batch: Batch) -> list[Check]:
    witness = _Witness()
    with without_fastpath():
        bare = tensors_in(batch.run(loaded.model), depth=4)
    try:
        with trace(view, SiteSelection.parse(SITES), witness):
            traced = tensors_in(batch.run(loaded.model), depth=4)
    except SiteError as error:
        return [Check("sites", "fail", str(error))]
    same = len(bare) == len(traced) and all(map(_bit_equal, bare, traced))
    parity = f"{len(bare)} output tensors, traced and bare, bit for bit" if same else _difference(bare, traced)
    return [
        Check("parity", "pass" if same else "fail", parity),
        *(Check("second stream", "info", note) for note in notes_on_second_streams(view)),
        _finite(witness),
        _attention(witness, view, loaded),
    ]


def _finite(witness: _Witness) -> Check:
    if witness.not_finite is None:
        return Check("finite", "pass", "every value of the stream is a finite number")
    return Check("finite", "fail", f"NaN or infinity first seen at {witness.not_finite}")


def _attention(witness: _Witness, view: ModelView, loaded: LoadedModel) -> Check:
    seen = sum(bool(plan.attention) for stack in view.stacks for plan in stack.plans)
    hidden = notes_on_hidden_attention(view)
    if not seen:
        return Check(
            "attention",
            "refused",
            "; ".join(hidden)
            or "no attention probabilities were seen: this model mixes tokens without a softmax over keys that fits "
            "its tokens, or inside a kernel. Token metrics work; attention metrics are not available.",
        )
    low = min(least for least, _ in witness.row_sums)
    high = max(most for _, most in witness.row_sums)
    where = f"probabilities seen in {seen} of {view.depth} blocks"
    if witness.mismatch > _ROUNDINGS * witness.eps:
        return Check("attention", "fail", f"{where}, but P V differs from the model's own by {witness.mismatch:.1e}")
    if high - 1 > _ROUNDINGS * witness.eps:
        return Check("attention", "fail", f"{where}, but a row sums to {high:.6g}")
    if hidden:
        return Check("attention", "refused", "; ".join((where, *hidden)))
    if 1 - low > _ROUNDINGS * witness.eps:
        return Check("attention", "info", f"{where}; rows sum to as little as {low:.3g}: a sink takes the rest")
    return Check("attention", "pass", f"{where}; every row sums to one")


def _bit_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _difference(bare: list[Tensor], traced: list[Tensor]) -> str:
    if len(bare) != len(traced):
        return f"{len(bare)} output tensors bare, {len(traced)} traced"
    worst = max(
        float((as_float64(a) - as_float64(b)).abs().max())
        for a, b in zip(bare, traced, strict=True)
        if a.shape == b.shape
    )
    return f"outputs differ by up to {worst:.3g}: the model is not deterministic, or tracing changed it"


def check_heads(loaded: LoadedModel, view: ModelView) -> list[Check]:
    """One check per stack: readable, or refused with the family's reason."""
    from rankscope.models.heads import head_weights

    if loaded.config is None:
        reason = "per-head weights need a family description, and this is not a transformers model"
        return [Check("heads", "refused", f"{reason}. Everything that needs no weights works.")]
    modules = view.modules()
    checks = []
    for stack in view.stacks:
        try:
            weights = head_weights(modules[stack.calls[0].module_name], loaded.config)
        except RankscopeError as error:
            checks.append(Check("heads", "refused", str(error)))
        else:
            heads, dim, width = weights.W_Q.shape
            checks.append(Check("heads", "pass", f"weights of {heads} heads read, {dim} x {width} each"))
    return checks
