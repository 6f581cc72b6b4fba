"""One look at a model: its structure found once, the probe run, numbers taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope._errors import RankscopeError
from rankscope.models.inputs import Padding, Prepared, TokensPolicy, prepare_inputs
from rankscope.models.loading import load
from rankscope.models.spread import needs_all_ranks
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.battery import Battery
from rankscope.monitor.gradients import gradient_values
from rankscope.monitor.isolation import beside_training
from rankscope.monitor.ledger import Entry, read_ledger
from rankscope.monitor.projections import Projections, find_projections
from rankscope.remedies import REMEDIES, applied
from rankscope.runs.readings import LayerValue
from rankscope.stream.viewing import view_of

Given = str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None


@dataclass(frozen=True)
class ProbePlan:
    """What the probe is and how much of it; the arguments of ``prepare_inputs``.

    Attributes:
        given: texts, a tensor, keyword arguments, or None for the built-in sample text.
        sequences: at most how many.
        tokens: length at which texts are cut.
        policy: which tokens count.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, where it was declared.
        tokenizer: reads the texts.
        padding: which tokens of tensors do not count.
    """

    given: Given
    sequences: int
    tokens: int
    policy: TokensPolicy
    blocks: str | Sequence[str] | None
    stream: Stream | None = None
    tokenizer: Any = None
    padding: Padding = None


class Prober:
    """Looks at one model on one fixed probe.

    Args:
        model: without wrappers.
        plan: the probe.
        battery: what to take.

    Attributes:
        caveats: how the probe is not what was given: hashed, random or cut; known once it was prepared.
    """

    def __init__(self, model: nn.Module, plan: ProbePlan, battery: Battery) -> None:
        self.model = model
        self.battery = battery
        self.caveats: tuple[str, ...] = ()
        self._plan = plan
        self._ready: tuple[ModelView, Prepared, Mapping[tuple[str | None, int], Projections]] | None = None

    @property
    def needs_all_ranks(self) -> bool:
        """Whether looking is a common effort of all ranks."""
        return needs_all_ranks(self.model)

    def set_up(self) -> tuple[ModelView, Prepared, Mapping[tuple[str | None, int], Projections]]:
        """Prepare the probe and find the blocks, the first time."""
        if self._ready is None:
            loaded = load(self.model)
            plan = self._plan
            with beside_training(self.model):
                prepared = prepare_inputs(
                    loaded,
                    plan.given,
                    sequences=plan.sequences,
                    tokens=plan.tokens,
                    batch=plan.sequences,
                    tokens_policy=plan.policy,
                    tokenizer=plan.tokenizer,
                    padding=plan.padding,
                )
                view = view_of(self.model, prepared[0], blocks=plan.blocks, stream=plan.stream)
            for caveat in prepared.caveats:
                LOGGER.warning("The probe: %s", caveat)
            self.caveats = prepared.caveats
            self._ready = view, prepared, find_projections(view, loaded.config)
        return self._ready

    def look(self) -> tuple[LayerValue, ...]:
        """Run the probe and take the battery."""
        view, prepared, _ = self.set_up()
        with beside_training(self.model):
            for part in prepared:
                with self.battery.reading(view, part):
                    part.run(self.model)
        return self.battery.values()

    def trials(self) -> dict[str, tuple[LayerValue, ...]]:
        """How the first part of the probe reads under each remedy that the model can undergo: one pass each."""
        view, prepared, _ = self.set_up()
        found = {}
        for name in REMEDIES:
            try:
                with (
                    beside_training(self.model),
                    applied(self.model, name, view=view),
                    self.battery.reading(view, prepared[0]),
                ):
                    prepared[0].run(self.model)
            except RankscopeError:
                self.battery.values()  # what was read before the model refused it
            except Exception as error:  # noqa: BLE001  (a remedy that fails is no reason to stop watching)
                self.battery.values()
                LOGGER.warning("The remedy %s could not be tried: %s: %s", name, type(error).__name__, error)
            else:
                found[name] = self.battery.values()
        return found

    def look_at_gradients(self) -> tuple[LayerValue, ...]:
        """Norms of the gradients as they are now."""
        _, _, projections = self.set_up()
        return gradient_values(self.model, projections)

    def ledger(self) -> dict[str | None, tuple[Entry, ...]]:
        """Run the first part of the probe and write down every add and norm."""
        view, prepared, _ = self.set_up()
        with beside_training(self.model):
            return read_ledger(view, prepared[0], self._plan.policy)
