"""What changes between two steps of an optimizer, and what a step does: weights, settings, parameters that learn.

Parameters change in a step of the optimizer alone, and as its settings say. What else changes them, or the settings, is
an event, with the step and its size. ``with ledger.planned("merge adapters"):`` declares what happens inside::

    ledger = Ledger([optimizer])
    ledger.model = model
    ...  # steps of the training
    ledger.take(view)  # the events
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankscope.linalg.to_host import to_host
from rankscope.models.view import ModelView
from rankscope.models.wrapping import needs_all_ranks
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.parameters import described, is_readable, sampled
from rankscope.monitor.readings import Alarm, noted
from rankscope.monitor.steps import predicted, settings_of, with_hooks
from rankscope.monitor.why import RAISED

_SAMPLED = 64
"""Entries of a parameter that are compared at every step."""
RESOLVED = 1e-3
"""Share of its norm by which a parameter has to change to be written; in half precision, more: an adapter that is
merged for an evaluation and taken out again leaves its rounding behind."""
FAR = 8.0
"""Times the largest write until then, from which on a parameter that is written again and again is an event again."""
RESTORED = 0.01
"""Share of the distance since the last write that is left by a write that undoes the training in between."""
OFTEN = 8
"""Such writes in a row before that is said."""
DOUBLED, TENFOLD = 2.0, 10.0
"""Factors by which a learning rate changes in one step, or since it was told last, to be an event: a schedule changes
it at every step."""
MOST_RATES = 3
"""Changes of a rate by its schedule that are told one by one."""
SAME_STEP = 0.02
"""Share of a step that rounding may change."""
MOST_OPTIMIZERS = 4
FACTS = ("most", "step", "writes", "restored", "usual")
"""Of each parameter: the largest write since the last reading, relative to its norm, and the step before it; the number
of all writes, how many in a row put the weights back, and the largest write until the last reading."""


class _Samples:
    """Entries of the parameters on one device, and what became of them; nothing waits for the device."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.names, self._parameters = list(named), list(named.values())
        self._device = self._parameters[0].device
        self._view()
        resolved = [max(RESOLVED, 4.0 * torch.finfo(one.dtype).eps) for one in self._parameters]
        self._resolved = torch.tensor(resolved, device=self._device)
        self._after: Tensor | None = None
        self._base: Tensor | None = None
        self._told = torch.zeros_like(self._resolved)
        self.facts = {name: torch.zeros_like(self._resolved) for name in FACTS}

    def _view(self) -> None:
        """Views are kept, so that a step costs one copy; they are renewed if ``parameter.data`` was replaced."""
        self._places = [one.data_ptr() for one in self._parameters]
        self._views = []
        nothing = torch.zeros(_SAMPLED, device=self._device, dtype=self._parameters[0].dtype)
        for one in self._parameters:
            view = sampled(one, _SAMPLED)
            self._views += [view] if len(view) == _SAMPLED else [view, nothing[len(view) :]]

    def read(self) -> Tensor:
        """One row for each parameter."""
        if [one.data_ptr() for one in self._parameters] != self._places:
            self._view()
        found = torch.cat(self._views).view(-1, _SAMPLED)
        return found if found.dtype is torch.float64 else found.float()

    def before(self, step: int) -> None:
        """A step of the optimizer begins; ``step`` is the last one that is done."""
        now, after, facts = self.read(), self._after, self.facts
        # Only on the CPU can the values be looked at without waiting for them.
        if after is None or self._base is None or (self._device.type == "cpu" and torch.equal(now, after)):
            return
        size = torch.maximum(now.norm(dim=1), after.norm(dim=1))
        out = ((now - after).norm(dim=1) / size).nan_to_num(0.0, 0.0)
        written = out > self._resolved
        net, rest = (after - self._base).norm(dim=1), (now - self._base).norm(dim=1)
        facts["writes"] = facts["writes"] + written
        back = written & (rest <= RESTORED * net)
        facts["restored"] = torch.where(back, facts["restored"] + 1.0, facts["restored"] * ~written)
        facts["step"] = torch.where(out * written > facts["most"], float(step), facts["step"])
        facts["most"] = torch.maximum(facts["most"], out * written)
        self._base = torch.where(written[:, None], now, self._base)

    def after(self) -> None:
        """A step of the optimizer has ended, or what was declared."""
        self._after = self.read()
        if self._base is None:
            self._base = self._after

    def take(self) -> dict[str, dict[str, float]]:
        """The facts of each parameter that was written for the first time, or much further than ever, by name."""
        (host,) = to_host([torch.stack([self.facts[name].float() for name in FACTS])])
        told, self._told = self._told, self.facts["writes"].clone()
        self.facts["usual"] = torch.maximum(self.facts["usual"], self.facts["most"])
        self.facts["most"] = torch.zeros_like(self.facts["most"])
        rows = {name: dict(zip(FACTS, row, strict=True)) for name, row in zip(self.names, host.T.tolist(), strict=True)}
        known = dict(zip(self.names, told.tolist(), strict=True))
        return {
            name: row
            for name, row in rows.items()
            if row["most"] > 0.0
            and (known[name] == 0.0 or row["most"] > FAR * row["usual"] or row["restored"] >= OFTEN)
        }


class Ledger:
    """Compares weights and settings at the end of each step of an optimizer with those at the beginning of the next.

    Nothing but the optimizer should write weights: averaged weights that stay after an evaluation, an adapter that is
    merged twice, a checkpoint or a part of one, or a hook do. **Exact** for 64 entries of each parameter. Version
    counters do not see what is written through ``.data``, so that values are compared. Not where processes share
    the model, or for more than :data:`MOST_OPTIMIZERS`, as if each parameter has its own.

    Args:
        optimizers: of the run. Their hooks are used until :meth:`close`.

    Attributes:
        model: whose parameters are followed; nothing is until it is set.
        step: the last training step that is done.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.model: nn.Module | None = None
        self.step, self._at = -1, 0
        self._groups: list[_Samples] = []
        self._followed: dict[str, Tensor] | None = None
        self._learn: dict[str, bool] | None = None
        self._settings: dict[tuple[int, int], tuple[dict[str, float], dict[str, float]]] = {}
        self._steps: dict[int, list[tuple[Any, ...]]] = {}
        self._rates: dict[tuple[int, int], int] = {}
        self._told_step, self._restored = False, False
        self._events: list[Alarm] = []
        self._handles: list[Any] = []
        self._optimizers = [one for one in map(with_hooks, optimizers[:MOST_OPTIMIZERS]) if one is not None]
        for one in self._optimizers if len(optimizers) <= MOST_OPTIMIZERS else ():
            self._handles += [one.register_step_pre_hook(self._before), one.register_step_post_hook(self._after)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._groups, self._followed = [], [], None

    @contextmanager
    def planned(self, words: str) -> Iterator[None]:
        """What is written or set inside is declared, and no event of its own."""
        yield
        with self._guarded():
            self._events.append(noted("planned", self.step + 1, f"planned: {words}", "none", declared=1.0))
            for group in self._groups:
                group.after()
            self._learn, self._settings = None, {}

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.model is None:
            return
        with self._guarded():
            self._at = self.step + 1
            self._compare_settings(optimizer)
            self._compare_learning(self._followed or {})
            for group in self._groups:
                group.before(self.step)
            self._steps[id(optimizer)] = [] if (self.step + 1) % JUDGED_EVERY else _begun(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.model is None:
            return
        with self._guarded():
            if self._followed is None:
                self._followed = self._follow(self.model)
            for group in self._groups:
                group.after()
            self._judge_step(optimizer, self._steps.pop(id(optimizer), []))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error in here never ends the run. Hooks stay: none can be removed inside another one."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.model, self._groups = None, []
            LOGGER.warning(
                "What is written between steps is no longer read. Cause: %s: %s", type(error).__name__, error
            )

    def _compare_settings(self, optimizer: Optimizer) -> None:
        """The settings that the coming step uses, with those that were told last."""
        # A scheduler wraps the step of its optimizer to count it.
        has_schedule = hasattr(optimizer.step, "_wrapped_by_lr_sched") or hasattr(optimizer.step, "_with_counter")
        by = ", by its schedule" if has_schedule else ""
        changes: dict[tuple[str, str, float, float, bool], int] = {}
        for number, group in enumerate(optimizer.param_groups):
            now, key = settings_of(group), (id(optimizer), number)
            told, before = self._settings.setdefault(key, ({}, {}))
            self._settings[key] = told, now
            for name, value in now.items():
                old = previous = before.get(name, math.nan)
                # A schedule that goes on and on is told by what it adds up to.
                if (name == "lr" or has_schedule) and (
                    _is_near(value, old, DOUBLED) or self._rates.get(key, 0) > MOST_RATES
                ):
                    old = told[name]  # what a schedule adds up to
                    if _is_near(value, old, TENFOLD):
                        continue
                if value != old:
                    told[name] = value
                    kind = "learning_rate" if name == "lr" else "optimizer_settings"
                    self._rates[key] = self._rates.get(key, 0) + (name == "lr" and has_schedule)
                    if kind == "learning_rate" or not math.isnan(old):
                        # Nobody plans steps uphill, or a rate that is raised at once without a scheduler.
                        is_planned = value >= 0.0 and (has_schedule or not 0.0 < RAISED * previous <= value)
                        sudden = (kind, name, old, value, name == "lr" and is_planned)
                        changes[sudden] = changes.get(sudden, 0) + 1
        for (kind, name, old, value, declared), count in changes.items():
            of = f" of {count} of {len(optimizer.param_groups)} groups" if count < len(optimizer.param_groups) else ""
            named = f"learning rate{of}" if name == "lr" else f"{name}{of}"
            if math.isnan(old):
                words = f"{type(optimizer).__name__}, {named} {value:.3g}"
            else:
                times = value / old if old else math.nan
                factor = f" (x {times:,.0f})" if times >= 10.0 else f" (x {times:.3g})" if old else ""
                words = f"{named} {value:.3g} instead of {old:.3g}{factor}{by if name == 'lr' else ''}"
            words = f"{words}: steps go uphill" if name == "lr" and value < 0.0 else words
            component = "rate" if name == "lr" else "objective" if name == "maximize" else "optimizer"
            facts = {"now": value, "before": old, "declared": float(declared)}
            self._events.append(noted(kind, self.step + 1, words, component, **facts))

    def _compare_learning(self, followed: Mapping[str, Tensor]) -> None:
        """Which parameters require gradients: those that code switches are declared."""
        now = {name: one.requires_grad for name, one in followed.items()}
        before, self._learn = self._learn, now
        if not before or now == before:
            return
        for learn, what in ((True, "set free"), (False, "frozen")):
            names = [name for name, one in now.items() if one is learn and before.get(name, learn) is not learn]
            if names:
                more = f" ({names[0]} and {len(names) - 1} more)" if len(names) > 1 else f" ({names[0]})"
                words = f"{len(names)} of {len(now)} parameters {what}{more}"
                facts = {"parameters": float(len(names)), "of": float(len(now)), "declared": 1.0}
                self._events.append(noted("requires_grad", self.step + 1, words, "gradients", **facts))

    def _judge_step(self, optimizer: Optimizer, begun: Sequence[tuple[Any, ...]]) -> None:
        """Whether a step did what the settings say, by the formula; told once, at the first parameter that differs."""
        for parameter, group, weight, state in begun if not self._told_step else ():
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            expected = predicted(optimizer, group, weight, _wide(parameter.grad), state)
            if expected is None:
                return
            now = _wide(parameter)
            rounding = 8.0 * torch.finfo(parameter.dtype).eps * float(weight.norm())
            apart, moved = float((now - expected).norm()), float((expected - weight).norm())
            if apart > SAME_STEP * moved + rounding and math.isfinite(apart):
                self._told_step = True
                name = next((name for name, one in (self._followed or {}).items() if one is parameter), "a parameter")
                words = f"a step of {type(optimizer).__name__} moved {name} by {float((now - weight).norm()):.3g} in a"
                words = f"{words} sample of its entries, and settings and gradient say {moved:.3g}, {apart:.3g} away"
                self._events.append(noted("step_differs", self._at, words, "optimizer", apart=apart, moved=moved))
                return

    def _follow(self, model: nn.Module) -> dict[str, Tensor]:
        """Begin anew, with the parameters that the model has now."""
        found: dict[str, Tensor] = dict(model.named_parameters())
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, one in found.items() if not needs_all_ranks(model) else ():
            if is_readable(one) and one.numel() and one.is_contiguous() and not one.is_sparse:
                by_device.setdefault(one.device, {})[name] = one
        self._groups = [_Samples(named) for named in by_device.values()]
        return found

    def take(self, view: ModelView) -> tuple[Alarm, ...]:
        """The events since the last reading, in order."""
        now = {} if self.model is None else dict(self.model.named_parameters())
        facts = {name: one for group in self._groups for name, one in group.take().items()}
        followed = self._followed or {}
        if now.keys() != followed.keys() or any(now[name] is not one for name, one in followed.items()):
            self._groups, self._followed = [], None  # other parameters: followed from the next step on
            facts = {}
        undone = [name for name, one in facts.items() if one["restored"] >= OFTEN]
        for names in (undone if not self._restored else [], [name for name in facts if name not in undone]):
            if names:
                self._events.append(_written(view, names, facts, undone=names is undone))
        self._restored = self._restored or bool(undone)
        events, self._events = self._events, []
        return tuple(sorted(events, key=lambda one: one.step))


def _written(view: ModelView, names: Sequence[str], facts: Mapping[str, Mapping[str, float]], *, undone: bool) -> Alarm:
    first = min(int(facts[name]["step"]) for name in names)
    worst = max((name for name in names if int(facts[name]["step"]) == first), key=lambda name: facts[name]["most"])
    more = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
    words = f"something other than the optimizer wrote {described(view, worst)}{more} between steps {first} and"
    words = f"{words} {first + 1}, by {facts[worst]['most']:.2g} of its norm"
    words = f"{words}: back to where they were, not for the first time" if undone else words
    return noted("weights_written", first + 1, words, "weights", size=facts[worst]["most"], parameters=len(names))


def _is_near(value: float, old: float, factor: float) -> bool:
    return value == old or 0.0 < old <= factor * value <= factor * factor * old


def _wide(tensor: Tensor) -> Tensor:
    return sampled(tensor, _SAMPLED).double().cpu()


MOST_JUDGED, JUDGED_EVERY = 4, 16
"""Parameters of a group whose step is computed, and steps from one such step to the next."""


def _begun(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """A sample of some parameters and of what the optimizer holds of them, before its step; on the CPU alone."""
    found: list[tuple[Any, ...]] = []
    for group in optimizer.param_groups:
        learned = [one for one in group["params"] if one.grad is not None and one.is_contiguous()]
        for one in learned[:: max(1, len(learned) // MOST_JUDGED)][:MOST_JUDGED]:
            if one.device.type != "cpu" or not one.is_floating_point() or type(one.detach()) is not Tensor:
                continue
            state = optimizer.state.get(one, {})
            held = {name: _wide(value) if value.ndim else float(value) for name, value in state.items()
                    if isinstance(value, Tensor)}  # fmt: skip
            found.append((one, group, _wide(one).clone(), held))
    return found
