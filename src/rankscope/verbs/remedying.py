"""``remedy``: what would each known remedy do to the tokens of this model, and at what cost?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from rankscope._errors import InputError, UnsupportedConfigError, UnsupportedOperationError
from rankscope.metrics import METRICS
from rankscope.models.inputs import Prepared, TokensPolicy, prepare_inputs
from rankscope.models.loading import LoadedModel, load, load_initialised_twin
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.remedies import REMEDIES, Treatment, applied, treatment
from rankscope.results.remedy_ranking import NONE, judge_remedies, ranked
from rankscope.results.rows import RowWriter
from rankscope.results.run import Run
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.verbs.gradient_norms import GradientNorms, gradient_norms
from rankscope.verbs.origin import floor_of, provenance_of
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.remedy_words import parsed_remedy
from rankscope.verbs.variants import Variant, variant_named

MEASURES = ("relative_residual", "mean_cosine", "correlation", "stable_rank")
SITES = SiteSelection.parse(("block.in@0", "block.out"))


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
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    blocks: str | Sequence[str] | None = None,
    progress: bool = False,
) -> Run:
    """Run one model under each remedy in turn, measure every block, and rank them.

    The rank is by the relative residual after the last block: how far tokens are kept apart on these weights, without
    training. That is what a remedy does to collapse, and not how well a model trained with it would do.

    Args:
        model: a spec or a module you hold; it is left as it was.
        inputs: as for ``measure``.
        remedies: names from ``rankscope ls remedies``, each as ``NAME`` or ``NAME=STRENGTH``; None for all.
        variant: the network that is treated: ``"full"``, or one with parts taken out (``"+norm+mlp"``: no skips).
        weights: ``"given"``, or ``"init"`` for a random initialisation of the same architecture.
        gradients: also measure the gradients of query and key weights against those of value weights.
        repeats: timed forward passes of each; 0 for none.
        sequences: at most how many sequences.
        tokens: length at which texts are cut.
        batch: sequences per forward pass.
        tokens_policy: which tokens count.
        random_tokens: random ids instead of text.
        dtype: of the weights, when the model is loaded here.
        seed: of a random initialisation and of random inputs.
        blocks: names or patterns of the block modules, where discovery needs help.
        progress: show a progress bar.

    Returns:
        Rows as in ``measure`` with the further column ``remedy`` (``none`` among them), and in ``extra["remedies"]``
        one entry per remedy, best first. What a model cannot undergo is left out and said in the notes.

    Example:
        >>> run = remedy("init:tiny-bert", remedies=["residual_scale"], sequences=2, tokens=16, repeats=0)
        >>> sorted(entry["name"] for entry in run.extra["remedies"])
        ['none', 'residual_scale']
    """
    started = time.perf_counter()
    loaded = load(model, seed=seed, dtype=dtype)
    if weights == "init" and loaded.origin != "init":
        loaded = load_initialised_twin(loaded, seed=seed)
    wanted = [parsed_remedy(word) for word in remedies or REMEDIES]
    prepared = prepare_inputs(
        loaded,
        inputs,
        sequences=sequences,
        tokens=tokens,
        batch=batch,
        tokens_policy=tokens_policy,
        seed=seed,
        random_tokens=random_tokens,
    )
    with undisturbed(loaded.model), quiet_transformers():
        view = view_of(loaded.model, prepared[0], blocks=blocks)
        trial = _Trial(loaded, view, prepared, variant_named(variant), tokens_policy, seed)
        arms = trial.arms(wanted)
        for arm in tqdm(arms, desc="remedy", unit="remedy", disable=not progress):
            trial.measure(arm, gradients=gradients)
        trial.time([arm for arm in arms if not arm.refused], repeats)
    done = [arm for arm in arms if not arm.refused]
    if not any(arm.name != NONE for arm in done):
        raise InputError("None of the remedies could be applied. " + " ".join(trial.notes))
    table = trial.writer.table()
    entries = ranked(table, [arm.facts() for arm in done])
    floor = floor_of(trial.reader.dtypes)
    verdict, evidence = judge_remedies(
        entries, floor["relative"], prepared.sequences, is_random=loaded.origin == "init"
    )
    return Run(
        kind="remedy",
        provenance=provenance_of(loaded, prepared, trial.reader, seed, time.perf_counter() - started),
        floor=floor,
        verdict=verdict,
        evidence=evidence,
        table=table,
        notes=(*loaded.notes, *prepared.notes, *trial.notes),
        extra={"variant": variant, "remedies": entries},
    )


@dataclass
class _Arm:
    """One remedy, or none, and what was seen of it."""

    name: str
    treatment: Treatment | None = None
    norms: list[GradientNorms] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    time_ratio: float | None = None
    parameters: int = 0
    refused: bool = False

    def facts(self) -> dict[str, Any]:
        """What is known besides the rows."""
        known: dict[str, Any] = {"name": self.name, "time_ratio": self.time_ratio, "parameters": self.parameters}
        known["gradients"] = [vars(norm) for norm in self.norms]
        if self.treatment is not None:
            entry = self.treatment.remedy
            known |= {
                "strength": self.treatment.strength,
                "summary": entry.summary,
                "claim": entry.claim,
                "claims_tokens": entry.claims_tokens,
                "cites": [str(cite) for cite in entry.cites],
                "needs": sorted(entry.needs),
                "cost": {"parameters": entry.parameters, "flops": entry.flops},
            }
        return known


class _Trial:
    """Measures one remedy after the other on one model."""

    def __init__(
        self,
        loaded: LoadedModel,
        view: ModelView,
        prepared: Prepared,
        variant: Variant,
        policy: TokensPolicy,
        seed: int,
    ) -> None:
        self.writer = RowWriter(coordinates=("remedy",))
        self.notes: list[str] = []
        self._loaded, self._view, self._prepared = loaded, view, prepared
        self._variant, self._policy, self._seed = variant, policy, seed
        self._specs = [METRICS[name] for name in MEASURES]
        self.reader = SiteReader(self._specs, policy, self.writer)

    def arms(self, wanted: Sequence[tuple[str, float | None]]) -> list[_Arm]:
        """None first, then every remedy this model can undergo."""
        found = [_Arm(NONE)]
        for name, strength in dict.fromkeys(wanted):
            label = name if strength is None else f"{name}={strength:g}"
            try:
                found.append(_Arm(label, treatment(self._view, name, strength=strength)))
            except UnsupportedOperationError as error:
                self.notes.append(f"{label} was left out: {error}")
        return found

    @contextmanager
    def _under(self, arm: _Arm) -> Iterator[None]:
        model = self._loaded.model
        with operating(model, self._variant.operation, view=self._view):
            if arm.treatment is None:
                yield
                return
            with applied(model, arm.treatment, view=self._view):
                yield

    def measure(self, arm: _Arm, *, gradients: bool) -> None:
        """Rows and gradients of one remedy."""
        reader = SiteReader(self._specs, self._policy, self.writer, {"remedy": arm.name})
        try:
            with self._under(arm):
                with trace(self._view, SITES, reader):
                    for part in self._prepared:
                        reader.start(part)
                        part.run(self._loaded.model)
                if gradients:
                    arm.norms = self._norms()
        except UnsupportedOperationError as error:
            arm.refused = True
            self.notes.append(f"{arm.name} was left out: {error}")
            return
        self.reader = reader
        self._write_norms(arm)
        arm.parameters = 0 if arm.treatment is None else sum(p.numel() for p in arm.treatment.parameters())

    def _norms(self) -> list[GradientNorms]:
        try:
            return gradient_norms(self._loaded, self._view, self._prepared[0], self._seed)
        except UnsupportedConfigError as error:
            note = f"Gradients were left out: {error}"
            if note not in self.notes:
                self.notes.append(note)
            return []

    def _write_norms(self, arm: _Arm) -> None:
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

    def time(self, arms: Sequence[_Arm], repeats: int) -> None:
        """Interleaved forward passes, each against the model under the same operator without a remedy."""
        for _ in range(repeats):
            for arm in arms:
                with self._under(arm):
                    self._prepared[0].run(self._loaded.model)
                    begun = time.perf_counter()
                    self._prepared[0].run(self._loaded.model)
                    arm.seconds.append(time.perf_counter() - begun)
        if repeats:
            base = median(arms[0].seconds)
            for arm in arms:
                arm.time_ratio = median(arm.seconds) / base
