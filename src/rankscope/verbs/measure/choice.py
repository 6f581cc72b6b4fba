"""What ``measure`` takes, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankscope._errors import InputError
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS, METRICS, MetricSpec
from rankscope.models.inputs import TokensPolicy
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import DEFAULT_SITES, SiteSelection
from rankscope.verbs.attention_choice import parse_attention_choice
from rankscope.verbs.measure.similarity import SITE
from rankscope.verbs.reader import SiteReader


@dataclass(frozen=True)
class BatteryChoice:
    """The arguments of ``measure`` that decide its values besides the model and the inputs.

    Attributes:
        specs: the metrics.
        selection: the sites.
        policy: which tokens count.
        attention: how probabilities are gone through, in the user's word.
        similarity: whether cosines between tokens are kept.
    """

    specs: tuple[MetricSpec, ...]
    selection: SiteSelection
    policy: TokensPolicy
    attention: str | None
    similarity: bool

    def __post_init__(self) -> None:
        if self.similarity and not self.selection.wants(SITE):
            raise InputError(f"similarity is taken at {SITE}, which is not among the sites asked for: add it to sites.")

    def reader(self, writer: RowWriter) -> SiteReader:
        """A reader that writes there what was chosen."""
        return SiteReader(self.specs, self.policy, writer, attention=parse_attention_choice(self.attention))

    def identity(self) -> tuple[Any, ...]:
        """Everything that decides the values besides the model and its inputs."""
        names = [spec.name for spec in self.specs]
        return (names, self.selection, self.policy, self.similarity, self.attention)

    def nothing_measured(self, view: ModelView) -> str:
        """Why a model of this structure gave no row."""
        asked = ", ".join(self.selection.layers)
        names = ", ".join(spec.name for spec in self.specs)
        skips = sorted({label for stack in view.stacks for plan in stack.plans for label in plan.skips})
        return (
            f"None of the metrics ({names}) could be taken at the sites asked for ({asked}). This model has "
            f"{view.depth} blocks with skip adds {', '.join(skips) or 'none'}; token metrics go with stream sites, "
            "attention metrics with attention.probs."
        )


def metrics_named(names: Sequence[str] | None) -> tuple[MetricSpec, ...]:
    """The metrics of these names, each once; by default those a verdict is drawn from."""
    chosen = (*DEFAULT_TOKEN_METRICS, *DEFAULT_ATTENTION_METRICS) if names is None else tuple(names)
    return tuple(METRICS[name] for name in dict.fromkeys(chosen))


def sites_for(specs: Sequence[MetricSpec], words: Sequence[str] | None) -> SiteSelection:
    """The sites asked for; by default those that the chosen metrics can read."""
    if words is not None:
        return SiteSelection.parse(words)
    sides = {spec.side for spec in specs}
    return SiteSelection.parse(
        word for word in DEFAULT_SITES if ("attention" if word.endswith(".probs") else "tokens") in sides
    )
