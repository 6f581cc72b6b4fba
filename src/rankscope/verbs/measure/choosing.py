"""What ``measure`` measures: metrics, sites, how inputs are compared, and the random baseline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rankscope.errors import InputError
from rankscope.linalg.numbered_vectors import LARGEST_STORED
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Spectra, Tokens
from rankscope.metrics import (
    DEFAULT_ATTENTION_METRICS,
    DEFAULT_ROUTER_METRICS,
    DEFAULT_TOKEN_METRICS,
    DEFAULT_UPDATE_METRICS,
    METRICS,
    MetricSpec,
    evaluate,
    is_left_out,
)
from rankscope.models.inputs import Prepared, TokensPolicy
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import SITES, SiteSelection, side_shown, sites_of_sides
from rankscope.stream.viewing import notes_on_hidden_attention
from rankscope.verbs import between_inputs as inputs_axis
from rankscope.verbs.between_inputs import Pooling, metrics_between, parse_poolings
from rankscope.verbs.measure.similarity import SITE
from rankscope.verbs.reader import SiteReader


@dataclass(frozen=True)
class BatteryChoice:
    """The arguments of ``measure`` that decide its values, other than the model and the inputs.

    Attributes:
        specs: the metrics.
        selection: the sites.
        policy: which tokens count.
        attention: algorithm for the attention probabilities, as the user wrote it.
        similarity: whether cosines between tokens are stored.
        poolings: how inputs are pooled to be compared; empty if they are not.
        of_inputs: the metrics that compare them.
        classes: the class of each input, numbered; None if not given.
        spectra: ``"exact"`` or ``"estimated"``, as the user wrote it; None for a choice by size.
    """

    specs: tuple[MetricSpec, ...]
    selection: SiteSelection
    policy: TokensPolicy
    attention: str | None
    similarity: bool
    poolings: tuple[Pooling, ...] = ()
    of_inputs: tuple[MetricSpec, ...] = ()
    classes: tuple[int, ...] | None = None
    spectra: Spectra | None = None

    def __post_init__(self) -> None:
        if self.spectra not in (None, "exact", "estimated"):
            raise InputError(f"spectra={self.spectra!r} is not known. Expected 'exact', 'estimated' or None (by size).")
        if self.similarity and not self.selection.wants(SITE):
            raise InputError(f"similarity is measured at {SITE}, which is not among the chosen sites: add it to sites.")

    def reader(self, writer: RowWriter, computed_in: torch.dtype | None = None) -> SiteReader:
        """A reader that writes the chosen metrics to ``writer``."""
        return SiteReader(
            self.specs, self.policy, writer, attention=self.attention, computed_in=computed_in, spectra=self.spectra
        )

    def comparing(
        self, asked: str | Sequence[str] | None, prepared: Prepared, *, default: bool, labels: Any = None
    ) -> BatteryChoice:
        """The same choice with the comparison between inputs.

        Args:
            asked: how to pool, as the user wrote it; None compares if it costs nothing.
            prepared: the inputs.
            default: whether the metrics are the default ones, which are then joined by those for inputs.
            labels: the class of each input; None if unknown.

        Raises:
            InputError: the comparison was asked for and is not possible.
        """
        of_inputs = metrics_between(self.specs, default=default)
        poolings = poolings_for(asked, of_inputs, self.selection, prepared)
        return replace(self, poolings=poolings, of_inputs=of_inputs, classes=classes_of(labels, prepared.sequences))

    def nothing_measured(self, view: ModelView) -> str:
        """Why a model of this structure gave no row."""
        asked = ", ".join(self.selection.layers)
        names = ", ".join(spec.name for spec in self.specs)
        skips = sorted({label for stack in view.stacks for plan in stack.plans for label in plan.skips})
        return (
            f"None of the metrics ({names}) could be measured at the chosen sites ({asked}). This model has "
            f"{view.depth} blocks with skip adds {', '.join(skips) or 'none'}; token metrics need stream sites, "
            "attention metrics need attention.probs." + "".join(f" {note}." for note in notes_on_hidden_attention(view))
        )


DEFAULT_METRICS = (
    *DEFAULT_TOKEN_METRICS,
    *DEFAULT_ATTENTION_METRICS,
    *DEFAULT_UPDATE_METRICS,
    *DEFAULT_ROUTER_METRICS,
)


def metrics_named(names: Sequence[str] | None) -> tuple[MetricSpec, ...]:
    """The metrics of these names, without duplicates; by default those that verdicts use."""
    chosen = DEFAULT_METRICS if names is None else tuple(names)
    return tuple(METRICS[name] for name in dict.fromkeys(chosen))


def token_metrics_named(names: Sequence[str] | None) -> tuple[MetricSpec, ...]:
    """The metrics of these names that need only tokens; by default those that verdicts use.

    Raises:
        InputError: one needs more than tokens.
    """
    specs = metrics_named(DEFAULT_TOKEN_METRICS if names is None else names)
    for spec in specs:
        if spec.side != "tokens":
            raise InputError(
                f"{spec.name} is measured on {spec.side}, and hidden states hold tokens only. Leave it out, or measure "
                "the model itself."
            )
    return specs


def sites_for(specs: Sequence[MetricSpec], words: Sequence[str] | None, default: Sequence[str]) -> SiteSelection:
    """The chosen sites; else those of ``default`` that the metrics can read, and all sites of a side it leaves out."""
    if words is not None:
        return SiteSelection.parse(words)
    chosen = sites_of_sides(sides := {spec.side for spec in specs}, default)
    left_out = sides - {side_shown(word.partition("@")[0]) for word in chosen}
    return SiteSelection.parse([*chosen, *sites_of_sides(left_out, SITES)])


def poolings_for(
    asked: str | Sequence[str] | None, specs: Sequence[MetricSpec], selection: SiteSelection, prepared: Prepared
) -> tuple[Pooling, ...]:
    """How to pool the inputs; by default the mean, if it costs nothing and there is something to compare.

    Raises:
        InputError: the comparison was asked for and is not possible.
    """
    everywhere = inputs_axis.SITE in selection.layers and selection.layers[inputs_axis.SITE] is None
    if asked is None:
        return parse_poolings("mean") if everywhere and specs and prepared.sequences > 1 else ()
    poolings = parse_poolings(asked)
    if poolings and not specs:
        raise InputError("between_inputs needs a metric of tokens, such as relative_residual: add one to metrics.")
    if poolings and not everywhere:
        raise InputError(f"between_inputs compares inputs at {inputs_axis.SITE}: add it to sites.")
    return poolings


def classes_of(labels: Any, inputs: int) -> tuple[int, ...] | None:
    """The class of each input as a number, from labels of any kind; None if there are no labels.

    Raises:
        InputError: there is not one label for each input.
    """
    if labels is None:
        return None
    told = labels.tolist() if isinstance(labels, (torch.Tensor, np.ndarray)) else list(labels)
    if len(told) < inputs or any(isinstance(one, (list, tuple, dict)) for one in told):
        raise InputError(
            f"labels has {len(told)} entries for {inputs} inputs. Pass the class of each input: a number or a name, in "
            "the order of the inputs."
        )
    numbers = {one: number for number, one in enumerate(dict.fromkeys(told))}
    return tuple(numbers[one] for one in told[:inputs])


def about_comparison(prepared: Prepared, choice: BatteryChoice, dim: int | None, seed: int | None) -> dict[str, Any]:
    """What a run records about the comparison of its inputs.

    Args:
        prepared: the inputs that were finished.
        choice: how they were compared.
        dim: width of the stream.
        seed: for a random baseline of the same shape; None for no baseline.
    """
    facts: dict[str, Any] = {
        "inputs": prepared.sequences,
        "distinct": prepared.distinct,
        "common_prefix": prepared.common_prefix,
        "width": dim,
        "poolings": {pooling.site: str(pooling) for pooling in choice.poolings},
    }
    if seed is not None and dim is not None:
        # A larger cloud would only repeat what this one says, except for ranks beyond the width.
        size = min(prepared.sequences, LARGEST_STORED)
        facts["null"] = gaussian_null(choice.of_inputs, {(size, dim)}, seed=seed)
    return facts


DRAWS = 8


def gaussian_null(
    specs: Sequence[MetricSpec],
    shapes: Collection[tuple[int, int]],
    *,
    seed: int,
    draws: int = DRAWS,
    spectra: Spectra | None = "exact",
) -> dict[str, Any]:
    """Mean and spread of each token metric over ``draws`` matrices of independent N(0, 1) entries.

    **Estimate.** The shape is that of the largest stream seen. Metrics that depend on scale are left out: a
    Gaussian of unit variance says nothing about the scale of a model.
    """
    from rankscope.metrics import Invariance

    chosen = [spec for spec in specs if spec.side == "tokens" and Invariance.SCALE in spec.invariant_to]
    if not chosen or not shapes:
        return {}
    tokens, dim = max(shapes)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(draws, tokens, dim, generator=generator, dtype=torch.float64)
    view = Tokens(x, spectra=spectra)
    chosen = [spec for spec in chosen if not is_left_out(spec, view)]
    values = evaluate(chosen, view, float_floor(x.dtype)).values
    return {
        spec.name: {"mean": float(row.mean()), "sd": float(row.std()), "draws": draws}
        for spec, row in zip(chosen, values, strict=True)
    }
