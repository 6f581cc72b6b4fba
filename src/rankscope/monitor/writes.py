"""What something other than the optimizer wrote into the weights, between two of its steps."""

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
from rankscope.monitor.motion import JUMPED, described
from rankscope.monitor.parameters import homes_of, is_readable
from rankscope.monitor.readings import LayerValue
from rankscope.monitor.steps import with_hooks

_SAMPLED = 64
"""Entries of a parameter that are compared at every step."""
RESOLVED = 1e-3
"""Share of its norm by which a parameter has to change to be written; in half precision, more: an adapter that is
merged for an evaluation and taken out again leaves its rounding behind."""
FAR = 8.0
"""Times the largest step of the optimizer of late, and the largest earlier write, that is a jump. Lookahead, which goes
back by half of ten steps, is at most five steps long."""
BACK = 0.3
"""Share of the distance since the last write that is left by a write that undoes the training in between."""
APART = 4
"""Steps from one such write to the next: weights that are clipped at every step go back by most of it."""
RESTORED = 0.01
"""The same share for a write that puts weights back, also at every step."""
REGULAR = 0.75
"""Share of the steps since its first write, from which on a parameter is written regularly: scaled to a length,
clipped, or the average of another one."""
LARGE = 2.0
"""Times the step just made. What keeps weights in a set after each step (clipping, scaling to a length, a mask, a grid)
moves them by no more than the step did, because they were in the set before it."""
EARLY = 8
"""Steps before a write is reported: what is set up at the start. Also how often weights have to be put back."""
TWICE = 2


class _Samples:
    """Entries of the parameters on one device, and what became of them; nothing waits for the device."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.names, self._parameters = list(named), list(named.values())
        self._device = self._parameters[0].device
        self._view()
        resolved = [max(RESOLVED, 4.0 * torch.finfo(one.dtype).eps) for one in self._parameters]
        self._resolved = torch.tensor(resolved, device=self._device)
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._base: Tensor | None = None
        self._moved: Tensor | None = None
        self._steps, self._last = 0, torch.zeros_like(self._resolved)
        self.facts = {name: torch.zeros_like(self._resolved) for name in FACTS}

    def _view(self) -> None:
        """Views are kept, so that a step costs one copy; they are renewed if ``parameter.data`` was replaced."""
        self._places = [one.data_ptr() for one in self._parameters]
        self._views = []
        nothing = torch.zeros(_SAMPLED, device=self._device, dtype=self._parameters[0].dtype)
        for one in self._parameters:
            flat = one.detach().view(-1)
            # An odd stride does not stay in one column.
            view = flat[:: max(1, len(flat) // _SAMPLED) | 1][:_SAMPLED]
            self._views += [view] if len(view) == _SAMPLED else [view, nothing[len(view) :]]

    def _read(self) -> Tensor:
        if [one.data_ptr() for one in self._parameters] != self._places:
            self._view()
        found = torch.cat(self._views).view(-1, _SAMPLED)
        return found if found.dtype is torch.float64 else found.float()

    def before(self, step: int) -> None:
        """A step of the optimizer begins; ``step`` is the last one that is done."""
        self._before, self._steps = self._read(), self._steps + 1
        # Only on the CPU can the values be looked at without waiting for them.
        if self._after is not None and not (self._device.type == "cpu" and torch.equal(self._before, self._after)):
            self._compare(self._before, self._after, step)

    def _compare(self, now: Tensor, after: Tensor, step: int) -> None:
        assert self._base is not None
        facts = self.facts
        size = torch.maximum(now.norm(dim=1), after.norm(dim=1))
        out = ((now - after).norm(dim=1) / size).nan_to_num(0.0, 0.0)
        written = out > self._resolved
        moves = written & ~_rounded(now - after, after)
        facts["first"] = torch.where(written & (facts["writes"] == 0.0), float(self._steps), facts["first"])
        facts["writes"] = facts["writes"] + written
        is_rare = self._steps - self._last >= APART
        self._last = torch.where(written, float(self._steps), self._last)
        net, rest = (after - self._base).norm(dim=1), (now - self._base).norm(dim=1)
        facts["undone"] = facts["undone"] + (written & is_rare & (rest <= BACK * net))
        facts["restored"] = facts["restored"] + (written & (rest <= RESTORED * net))
        if self._moved is not None:
            facts["large"] = facts["large"] + (moves & (self._moved > 0.0) & (out > LARGE * self._moved))
        facts["step"] = torch.where(out > facts["most"], float(step), facts["step"])
        facts["most"] = torch.maximum(facts["most"], out * written)
        facts["total"] = facts["total"] + out * moves
        self._base = torch.where(written[:, None], now, self._base)

    def after(self) -> None:
        """A step of the optimizer has ended."""
        self._after = self._read()
        if self._base is None:
            self._base = self._after
        if self._before is not None:
            moved = (self._after - self._before).norm(dim=1) / self._after.norm(dim=1)
            self._moved = moved.nan_to_num(0.0, 0.0)
            self.facts["fastest"] = torch.maximum(self.facts["fastest"], self._moved)

    def take(self) -> dict[str, dict[str, float]]:
        """The facts of each parameter that was written since the last call, by name."""
        rows = torch.stack([self.facts[name].float() for name in FACTS])
        (host,) = to_host([rows])
        self.facts["usual"] = torch.maximum(self.facts["usual"], self.facts["most"])
        # The first steps are the largest: the reference is what was seen since the reading before the last one.
        self.facts["before"], self.facts["fastest"] = self.facts["fastest"], torch.zeros_like(self._resolved)
        self.facts["most"] = torch.zeros_like(self.facts["most"])
        columns = host.T.tolist()
        found = {name: dict(zip(FACTS, column, strict=True)) for name, column in zip(self.names, columns, strict=True)}
        return {name: {**one, "steps": float(self._steps)} for name, one in found.items()}


FACTS = ("most", "step", "total", "writes", "large", "undone", "restored", "first", "fastest", "before", "usual")
"""Of each parameter, with sizes relative to its norm: the largest write since the last reading, and the step before it;
of all writes the sum and how many were larger than the step before, both without roundings, their number, how many
undid the training since the write before, how many put the weights back, and the first step; the largest step of the
optimizer since the last reading, and between the two readings before that; and the largest write until the last
reading."""


class Writes:
    """Compares the weights at the end of each step of an optimizer with those at the beginning of the next.

    Nothing but the optimizer should write them: averaged weights that stay after an evaluation, an adapter that is
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
        self.step = 0
        self._groups: list[_Samples] = []
        self._followed: dict[str, Tensor] | None = None
        self._handles: list[Any] = []
        for one in filter(None, map(with_hooks, optimizers if len(optimizers) <= MOST_OPTIMIZERS else ())):
            self._handles += [one.register_step_pre_hook(self._before), one.register_step_post_hook(self._after)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._groups, self._followed = [], [], None

    def _before(self, *_: Any) -> None:
        with self._guarded():
            for group in self._groups if not torch.compiler.is_compiling() else ():
                group.before(self.step)

    def _after(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or self.model is None:
            return
        with self._guarded():
            if self._followed is None:
                self._followed = self._follow(self.model)
            for group in self._groups:
                group.after()

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

    def _follow(self, model: nn.Module) -> dict[str, Tensor]:
        """Begin anew, with the parameters that the model has now."""
        found: dict[str, Tensor] = dict(model.named_parameters())
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, one in found.items() if not needs_all_ranks(model) else ():
            if is_readable(one) and one.numel() and one.is_contiguous() and not one.is_sparse:
                by_device.setdefault(one.device, {})[name] = one
        self._groups = [_Samples(named) for named in by_device.values()]
        return found

    def take(self, view: ModelView) -> Iterator[LayerValue]:
        """What was written since the last reading, as no step explains it: the worst parameter of each block.

        ``weights_written`` is 1 if a parameter was written by a tenth of its norm, and eight times as far as any step
        of the optimizer of late or earlier write; if it is written in most steps, by a tenth in all, further than the
        steps themselves; or if no step moves it, by a tenth in all, several times and not in most steps.
        ``weights_undone`` is 1 if all matrices of a block that learn were written back twice, after four steps or more,
        or eight times exactly, as a hook or a rounding does after every step. ``least`` is the size of the write,
        ``most`` the step before it.
        """
        now = {} if self.model is None else dict(self.model.named_parameters())
        facts = {name: one for group in self._groups for name, one in group.take().items()}
        followed = self._followed or {}
        if now.keys() != followed.keys() or any(now[name] is not one for name, one in followed.items()):
            self._groups, self._followed = [], None  # other parameters: followed from the next step on
            return
        homes = homes_of(view, facts)
        places: dict[tuple[str | None, int | None], list[str]] = {}
        for name in facts:
            places.setdefault(homes.get(name, (None, None)), []).append(name)
        for place, names in places.items():
            name = max(names, key=lambda name: _severity(facts[name]))
            if (severity := _severity(facts[name])) > 0.0:
                found = severity, facts[name]["most"], facts[name]["step"]
                yield LayerValue("weights_written", described(view, name, homes), *place, *found)
            learned = [name for name in names if facts[name]["fastest"] + facts[name]["before"] > 0.0]
            matrices = [name for name in learned if followed[name].ndim > 1] or learned
            for kind, often in (("undone", TWICE), ("restored", EARLY)):
                count = min((facts[name][kind] for name in matrices), default=0.0)
                name = max(matrices, key=lambda name: facts[name]["most"], default="")
                if count > 0.0 < facts[name]["most"]:
                    found = count / often, facts[name]["most"], facts[name]["step"]
                    site = f"{described(view, name, homes)} and {len(matrices) - 1} other matrices of its place"
                    yield LayerValue("weights_undone", site, *place, *found)
                    break


MOST_OPTIMIZERS = 4
BITS = 2.0**-7
"""Distance of neighbouring numbers of bfloat16, relative to them, at most."""


def _rounded(write: Tensor, after: Tensor) -> Tensor:
    """Whether what was written to each parameter is a rounding to bfloat16, up and down: as at random, after each step.

    A decay by hand has one sign.
    """
    is_small = (write.abs() <= BITS * after.abs()).all(1)
    return is_small & ((write * after.sign()).sum(1).abs() <= 0.5 * write.abs().sum(1))


def _severity(one: Mapping[str, float]) -> float:
    """How far beyond what steps and earlier writes explain a parameter was written."""
    if one["most"] == 0.0 or one["steps"] <= EARLY:
        return 0.0
    steps = max(one["fastest"], one["before"])
    usual = max(steps, one["usual"])
    far = min(one["most"] / JUMPED, one["most"] / usual / FAR if usual > 0.0 else math.inf)
    often = REGULAR * (one["steps"] - one["first"] + 1.0)
    is_regular = one["writes"] > often
    if one["large"] > max(often, EARLY - 1.0):
        far = max(far, min(one["large"] / EARLY, one["total"] / JUMPED))
    if steps == 0.0 and one["writes"] >= TWICE and not is_regular:
        far = max(far, one["total"] / JUMPED)
    return far
