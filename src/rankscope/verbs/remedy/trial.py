"""Tries each remedy on a model: activations and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.errors import InputError, UnsupportedConfigError, UnsupportedOperationError
from rankscope.execution.findings import Findings
from rankscope.execution.passes import Execution
from rankscope.linalg.precision import as_float64
from rankscope.metrics import METRICS
from rankscope.models.heads import head_weights
from rankscope.models.inputs import Batch, Prepared, TokensPolicy
from rankscope.models.linear_maps import dense, is_plain
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.remedies import REMEDIES, Evidence, Treatment, applied, treatment
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, trace
from rankscope.stream.viewing import undisturbed
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.remedy.judge import NONE


def parsed_remedy(word: str) -> tuple[str, float | None]:
    """Name and strength; None for the remedy's own.

    Raises:
        UnknownNameError: no such remedy.
        InputError: a strength that is not a number.

    Example:
        >>> parsed_remedy("stronger_skip=3"), parsed_remedy("deepnorm")
        (('stronger_skip', 3.0), ('deepnorm', None))
    """
    name, equals, amount = word.partition("=")
    entry = REMEDIES[name.strip()]
    if not equals:
        return entry.name, None
    try:
        return entry.name, float(amount)
    except ValueError:
        raise InputError(f"{word!r}: expected {entry.name}=NUMBER ({entry.strength_means}).") from None


@dataclass(frozen=True)
class GradientNorms:
    """Frobenius norms of the gradients of one block's weights, all heads together."""

    stack: str | None
    layer: int
    query: float
    key: float
    value: float


def gradient_norms(loaded: LoadedModel, view: ModelView, batch: Batch, seed: int = 0) -> list[GradientNorms]:
    r"""Gradients of :math:`\langle G, X_L\rangle / \sqrt{nd}`, with G a fixed Gaussian matrix and X_L the last block.

    Exact, for that loss and these inputs. At collapse those of queries and keys vanish and those of values do not
    [noci2022signal]; their ratio does not depend on the scale of the loss. A block that is called in several layers
    has one gradient, reported for the first of them. The model's own ``.grad`` fields are left alone.

    Raises:
        UnsupportedConfigError: it is not known where this model stores its head weights.
    """
    if loaded.config is None:
        raise UnsupportedConfigError(f"{loaded.spec} is not a transformers model: its head weights are not known.")
    # Gradients of the dense weights: quantised ones have none, and those of an adapter are not those of the product.
    with dense(loaded.model):
        return _norms_of_dense(loaded, view, batch, seed)


def _norms_of_dense(loaded: LoadedModel, view: ModelView, batch: Batch, seed: int) -> list[GradientNorms]:
    modules = view.modules()
    parameters = [p for p in loaded.model.parameters() if p.is_floating_point()]
    with _differentiable(parameters), torch.enable_grad():
        loss = _projection(loaded.model, view, batch, seed)
        gradients_of_all = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {id(p): g for p, g in zip(parameters, gradients_of_all, strict=True)}
    norms = []
    for stack in view.stacks:
        for name, layer in {call.module_name: call.first_layer for call in reversed(stack.calls)}.items():
            heads = head_weights(_with_gradients_for_weights(modules[name], gradients), loaded.config)
            sizes = (float(as_float64(w).norm()) for w in (heads.W_Q, heads.W_K_groups, heads.W_V_groups))
            norms.append(GradientNorms(stack.name, layer, *sizes))
    return sorted(norms, key=lambda entry: (str(entry.stack), entry.layer))


def _projection(model: nn.Module, view: ModelView, batch: Batch, seed: int) -> Tensor:
    """The loss: the last block of every stack, projected onto a Gaussian matrix."""
    parts: list[Tensor] = []

    def take(ref: SiteRef, x: Observed) -> None:
        assert isinstance(x, Tensor)
        if ref.layer == depths[ref.stack] - 1:
            generator = torch.Generator().manual_seed(seed)
            direction = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype).to(x.device)
            parts.append((direction * x).sum() / (x.shape[-1] * x.shape[-2]) ** 0.5)

    depths = {stack.name: stack.depth for stack in view.stacks}
    with trace(view, SiteSelection.parse(("block.out",)), take):
        batch.run(model)
    return torch.stack(parts).sum()


@contextmanager
def _differentiable(parameters: list[nn.Parameter]) -> Iterator[None]:
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _with_gradients_for_weights(module: nn.Module, gradients: Mapping[int, Tensor | None]) -> nn.Module:
    """A shallow copy of a module with gradients in place of weights, so that they are split into heads like weights.

    It is only read, never run: it shares the hooks of the module, which a deep copy would copy too.

    Raises:
        UnsupportedConfigError: a layer would have to be run to know its matrix, and the gradient of that is not known.
    """
    if isinstance(getattr(module, "in_features", None), int) and not is_plain(module):
        raise UnsupportedConfigError(f"{type(module).__name__} computes its weight from other tensors.")
    twin = copy.copy(module)
    twin._parameters = {
        name: None if own is None else nn.Parameter(_or_zeros(gradients.get(id(own)), own), requires_grad=False)
        for name, own in module._parameters.items()
    }
    twin._modules = {
        name: None if child is None else _with_gradients_for_weights(child, gradients)
        for name, child in module._modules.items()
    }
    return twin


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.detach()


MEASURES = ("relative_residual", "mean_cosine", "correlation", "stable_rank")
SITES = SiteSelection.parse(("block.in@0", "block.out"))


@dataclass
class RemedyArm:
    """One remedy, or none, and its results."""

    name: str
    treatment: Treatment | None = None
    norms: list[GradientNorms] = field(default_factory=list)
    refused: bool = False

    def facts(self, seen: Mapping[str, Evidence]) -> dict[str, Any]:
        """The results other than rows, and what was seen of the remedy in training, at its default strength."""
        added = 0 if self.treatment is None else sum(p.numel() for p in self.treatment.parameters())
        gradients = [vars(norm) for norm in self.norms]
        known: dict[str, Any] = {"name": self.name, "parameters": added, "gradients": gradients}
        if self.treatment is not None:
            entry = self.treatment.remedy
            known |= {
                "strength": self.treatment.strength,
                "trained": _trained(seen.get(entry.name)) if self.treatment.strength == entry.strength else None,
                "summary": entry.summary,
                "claim": entry.claim,
                "claims_tokens": entry.claims_tokens,
                "cites": [str(cite) for cite in entry.cites],
                "needs": sorted(entry.needs),
                "cost": {"parameters": entry.parameters, "flops": entry.flops},
            }
        return known


def _trained(seen: Evidence | None) -> dict[str, Any] | None:
    return None if seen is None else {"rescued": seen.rescued, "trained": seen.trained, "words": seen.words}


class Trial:
    """Measures one remedy after the other on one model.

    Args:
        loaded: the model.
        view: its structure.
        prepared: its inputs.
        policy: which tokens count.
        seed: seed of the direction onto which the output is projected for gradients.

    Attributes:
        writer: collects the rows.
        reader: knows the dtypes and lengths seen in the last network that could be run.
        notes: what was left out, and why.
    """

    def __init__(
        self, loaded: LoadedModel, view: ModelView, prepared: Prepared, policy: TokensPolicy, seed: int
    ) -> None:
        self.writer = RowWriter(coordinates=("remedy",))
        self.notes: list[str] = []
        self._loaded, self._view, self._prepared = loaded, view, prepared
        self._policy, self._seed = policy, seed
        self._specs = [METRICS[name] for name in MEASURES]
        self.reader = SiteReader(self._specs, policy, self.writer)

    def arms(self, wanted: Sequence[tuple[str, float | None]]) -> list[RemedyArm]:
        """No remedy first, then every remedy that this model supports."""
        arms = [RemedyArm(NONE)]
        for name, strength in dict.fromkeys(wanted):
            label = name if strength is None else f"{name}={strength:g}"
            try:
                arms.append(RemedyArm(label, treatment(self._view, name, strength=strength)))
            except UnsupportedOperationError as error:
                self.notes.append(f"{label} was left out: {error}")
        return arms

    @contextmanager
    def _under(self, arm: RemedyArm) -> Iterator[None]:
        if arm.treatment is None:
            yield
            return
        with applied(self._loaded.model, arm.treatment, view=self._view):
            yield

    def run(self, arms: Sequence[RemedyArm], execution: Execution) -> None:
        """Measure every remedy; one that turns out not to run is marked as refused."""
        readers = {arm.name: SiteReader(self._specs, self._policy, self.writer, {"remedy": arm.name}) for arm in arms}
        refused: dict[str, str] = {}
        findings = Findings(self.writer, readers, rest=lambda: refused, learn_rest=refused.update)
        with execution.stages(passes=len(arms)) as stages:
            for _ in stages:
                for arm in arms:
                    try:
                        self._measure(arm, readers[arm.name], execution)
                    except UnsupportedOperationError as error:
                        refused[arm.name] = str(error)
        place = _places(arms)
        execution.collect(findings, lambda piece: (place[piece.coordinates], piece.first_sequence))
        self._refuse(arms, refused)
        self.reader = next((readers[arm.name] for arm in reversed(arms) if not arm.refused), self.reader)

    def _measure(self, arm: RemedyArm, reader: SiteReader, execution: Execution) -> None:
        with self._under(arm), trace(self._view, SITES, reader):
            for part in execution.batches():
                reader.start(part)
                part.run(self._loaded.model)

    def compare_gradients(self, arms: Sequence[RemedyArm], execution: Execution) -> None:
        """Gradients under every remedy that could be run; computed by the first process only."""
        told = execution.from_first(lambda: self._gradients(arms))
        self._refuse(arms, told["refused"])
        self.notes += [note for note in told["notes"] if note not in self.notes]
        for arm in arms:
            if not arm.refused:
                arm.norms = [GradientNorms(**norm) for norm in told["norms"][arm.name]]
                self._write_norms(arm)
        place = _places(arms)
        self.writer.replace(sorted(self.writer.pieces, key=lambda piece: place[piece.coordinates]))

    def _gradients(self, arms: Sequence[RemedyArm]) -> dict[str, Any]:
        told: dict[str, Any] = {"norms": {}, "refused": {}, "notes": self.notes}
        with undisturbed(self._loaded.model), quiet_transformers():
            for arm in arms:
                if not arm.refused:
                    try:
                        with self._under(arm):
                            told["norms"][arm.name] = [vars(norm) for norm in self._norms()]
                    except UnsupportedOperationError as error:
                        told["refused"][arm.name] = str(error)
        return told

    def _refuse(self, arms: Sequence[RemedyArm], reasons: Mapping[str, str]) -> None:
        """Leave out these remedies and their rows."""
        for arm in arms:
            if arm.name in reasons:
                arm.refused = True
                self.notes.append(f"{arm.name} was left out: {reasons[arm.name]}")
        self.writer.replace(piece for piece in self.writer.pieces if piece.coordinates[0] not in reasons)

    def _norms(self) -> list[GradientNorms]:
        try:
            return gradient_norms(self._loaded, self._view, self._prepared[0], self._seed)
        except UnsupportedConfigError as error:
            note = f"Gradients were left out: {error}"
            if note not in self.notes:
                self.notes.append(note)
            return []

    def _write_norms(self, arm: RemedyArm) -> None:
        for norm in arm.norms:
            for role in ("query", "key", "value"):
                self.writer.add(
                    metric=f"gradient_{role}",
                    site="weights",
                    stack=norm.stack,
                    layer=norm.layer,
                    first_sequence=0,
                    values=np.array([getattr(norm, role)]),
                    statuses=np.array([0]),
                    head_axis=False,
                    at={"remedy": arm.name},
                )


def _places(arms: Sequence[RemedyArm]) -> dict[tuple[str | int | None, ...], int]:
    """Where the rows of each remedy belong, by their further columns."""
    return {(arm.name,): number for number, arm in enumerate(arms)}
