"""How far every weight moved between two readings: fast, or not at all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankscope.linalg.to_host import to_host
from rankscope.models.view import ModelView
from rankscope.models.wrapping import is_distributed
from rankscope.monitor.alarms.still_weights import MOVED, STOPPED
from rankscope.monitor.parameters import SITE, block_row, homes_of, is_readable, tensors_of, values_of
from rankscope.monitor.readings import LayerValue, fact
from rankscope.monitor.steps import epsilon_ratio, held_by

_SAMPLED = 1024
"""Entries of a parameter that are compared with those of the last reading."""
_ROWS, _COLUMNS = 64, 256
"""Rows and columns of an embedding whose spread is measured."""
LEAST_ROWS = 8
JUMPED = 0.1
"""Share of its norm by which a parameter has to be written between two steps, to have jumped."""
SLOWED = 0.01
"""Share of the motion per step and learning rate until then, or of the learning rate itself, that is hardly any."""
SAME_GRADIENT = 0.2
"""Share of its usual norm that a gradient has to have, if weights that slow down are not to follow it."""
SLOW_HISTORY = 8
MOVED_BEFORE = 4
"""Looks at which a parameter moved, before it is missed."""
ABRUPT = 0.5
"""Share of its usual norm that a gradient had in the two looks before it was exactly zero, for no good reason."""
CRAWLS = 1e-4
"""Motion per step, relative to the norm, below which an epsilon that decides the steps is a fault; some recipes have
one on purpose, and a learning rate to match."""
NEVER = 3e-7
"""The same for a motion that was never larger: in 300,000 steps, weights change by a tenth."""

Place = tuple[str | None, int | None]


class _Speed:
    """Whether weights move, but hardly: far less than the learning rate lets expect."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, float]] = deque(maxlen=24)
        self._largest = 0.0

    def take(
        self, change: float, size: float, steps: int, rate: float, gradient: float, epsilon: float
    ) -> tuple[LayerValue, ...] | None:
        """Add a look; None if weights move as they should, else what shows that they do not.

        Noise adds up to the root of the number of steps, so that the motion of a step is between ``change / steps``,
        which is compared with later ones, and ``change / sqrt(steps)``, which is compared with earlier ones.

        Args:
            change: since the last look, relative to the norm.
            size: root mean square of the entries.
            steps: since the last look.
            rate: learning rate, if it is known.
            gradient: norm of the gradient, if it is known.
            epsilon: that of the optimizer over the root of its second moment, if it has one.
        """
        speed = change / math.sqrt(steps)
        self._largest = max(self._largest, speed) if math.isfinite(speed) else self._largest
        found: dict[str, float] = {}
        if rate > 0.0 and gradient != 0.0:
            usual, of_gradient = (median(one) for one in zip(*self._past, strict=True)) if self._past else (0.0, 0.0)
            follows = not gradient >= SAME_GRADIENT * of_gradient
            if len(self._past) >= SLOW_HISTORY and speed / rate < SLOWED * usual and not follows:
                found["weights_slowed"] = speed / rate / usual
            if epsilon * SLOWED >= 1.0 and speed < min(CRAWLS, SLOWED * rate / size):
                found["weights_slowed"] = speed * size / rate
            if not found and math.isfinite(gradient):
                self._past.append((change / steps / rate, gradient))
        # A margin that all inputs keep leaves no gradient either, and gets there slowly.
        last = [one for _, one in self._past]
        fell = gradient == 0.0 and len(last) >= SLOW_HISTORY and min(last[-2:]) >= ABRUPT * median(last)
        if fell or self._largest < NEVER:
            found["weights_slowed"] = speed
        if not found or not math.isfinite(speed):
            return None
        if math.isfinite(epsilon):
            found["epsilon_ratio"] = epsilon
        found["weights_speed"] = speed
        return tuple(fact(name, "weights", value) for name, value in found.items())


class WeightMotion:
    """How far each parameter moved since the last look, by a sample of its entries."""

    def __init__(self) -> None:
        self._step = 0
        self._still: dict[Place, int] = {}
        self._has_moved: set[Place] = set()
        self._looks_moved: dict[str, int] = {}
        self._stopped, self._stopped_steps = 0.0, 0
        self._samples: dict[str, Tensor] = {}
        self._norms: dict[str, float] = {}
        self._matrices: set[str] = set()
        self._from_zero: set[str] = set()
        self._speed = _Speed()
        self._spreads: dict[str, float] = {}

    def take(
        self,
        view: ModelView,
        step: int,
        *,
        rate: float = math.nan,
        gradient: float = math.nan,
        optimizers: Sequence[Optimizer] = (),
    ) -> tuple[LayerValue, ...]:
        r"""Per step, :math:`\|W_t - W_s\|_F / ((t - s) \|W_t\|_F)` over the sampled entries of a block.

        **Estimate.** Nothing at the first look, of parameters whose shape changed, and of a model whose weights are
        sharded over ranks: each rank would sample other entries. Parameters that begin at zero, as one half of an
        adapter does, are left out of the motion of a block that has others: relative to nothing, any step is large.

        Args:
            view: the model.
            step: training step.
            rate: learning rate, if it is known.
            gradient: norm of the gradient of the whole model, if it is known.
            optimizers: of the run, if they are known.
        """
        named = {name: tensor for name, tensor in tensors_of(view.model, "weight") if is_readable(tensor)}
        if any(map(is_distributed, named.values())):
            return ()
        homes = homes_of(view, named)
        tables = _tables(view.model, homes)
        parts = to_host([*map(_sample, named.values()), *(tensor[:, :_COLUMNS] for tensor in tables.values())])
        now = {name: sample.double() for name, sample in zip(named, parts, strict=False)}
        spread = self._spread(dict(zip(tables, parts[len(named) :], strict=True)))
        self._matrices = {name for name, tensor in named.items() if tensor.dim() > 1}
        before, steps = self._samples, step - self._step
        self._from_zero |= {name for name, sample in now.items() if name not in before and not bool(sample.any())}
        self._samples, self._step = now, step
        self._norms = dict(zip(now, _norms_of(list(now.values())), strict=True))
        known = [name for name in now if name in before and before[name].shape == now[name].shape]
        if steps <= 0 or not known:
            return ()
        pairs = [now[name] for name in known], [before[name] for name in known]
        changes = dict(zip(known, _norms_of(torch._foreach_sub(*pairs)), strict=True))
        learned = [name for name, one in view.model.named_parameters() if one.requires_grad and name in changes]
        matrices = [name for name in learned if name in self._matrices and name in homes] or learned
        epsilon, held = epsilon_ratio(optimizers), held_by(view.model, optimizers)
        stopped = self._stop({name: change for name, change in changes.items() if name in homes}, learned, held, steps)
        slow = (
            self._speed.take(*self._speed_of(matrices, changes), steps, rate, gradient, epsilon) if matrices else None
        )
        return (
            *self._motion(homes, changes, steps),
            *self._stillness(homes, before, matrices, held, steps, is_slow=slow is not None, stopped=stopped),
            *(slow or ()),
            *spread,
        )

    def _speed_of(self, names: Sequence[str], changes: Mapping[str, float]) -> tuple[float, float]:
        """Change of some parameters, relative to their norm, and the root mean square of their entries."""
        names = [name for name in names if name not in self._from_zero] or names
        change, size = (math.sqrt(math.fsum(of[name] ** 2 for name in names)) for of in (changes, self._norms))
        count = sum(self._samples[name].numel() for name in names)
        return change / size if size > 0.0 else math.nan, size / math.sqrt(count)

    def _motion(
        self, homes: Mapping[str, tuple[str | None, int]], changes: Mapping[str, float], steps: int
    ) -> Iterator[LayerValue]:
        for home in dict.fromkeys(homes.values()):
            own = [name for name in changes if homes.get(name) == home]
            own = [name for name in own if name not in self._from_zero] or own
            change = math.sqrt(math.fsum(changes[name] ** 2 for name in own))
            size = math.sqrt(math.fsum(self._norms[name] ** 2 for name in own))
            if size > 0.0:
                yield block_row("weight_motion", *home, change / size / steps)

    def _stillness(
        self,
        homes: Mapping[str, tuple[str | None, int]],
        before: Mapping[str, Tensor],
        learned: Sequence[str],
        held: frozenset[str],
        steps: int,
        *,
        is_slow: bool,
        stopped: int,
    ) -> Iterator[LayerValue]:
        """Share of the entries of matrices that learn which moved at all, and for how many steps hardly any did.

        Also of single blocks that do not move while others do, if they did before or an optimizer holds all of them.
        """
        now = self._samples
        groups: dict[Place, list[str]] = {(None, None): list(learned)} if learned else {}
        for name in learned:
            if name in homes:
                groups.setdefault(homes[name], []).append(name)
        differ = {name: int((now[name] != before[name]).sum()) for name in learned}
        for place, names in groups.items():
            moved = sum(differ[name] for name in names)
            share = moved / max(1, sum(now[name].numel() for name in names))
            is_whole = place == (None, None)
            is_still = share < MOVED or (is_slow and is_whole)
            still = self._still[place] = self._still.get(place, 0) + steps if is_still else 0
            if is_whole:
                yield fact("weights_moved", "weights", share)
                yield fact("still_steps", "weights", float(max(still, stopped)))
                if stopped:
                    yield fact("weights_stopped", "weights", self._stopped)
            elif still and (place in self._has_moved or held.issuperset(names)):
                yield LayerValue("weights_moved", SITE, *place, share, share, share)
                yield LayerValue("still_steps", SITE, *place, still, still, still)
            if share >= MOVED:
                self._has_moved.add(place)

    def _stop(self, changes: Mapping[str, float], learned: Sequence[str], held: frozenset[str], steps: int) -> int:
        """For how many steps most weights that moved do not, because they stopped requiring gradients all at once."""
        for name in set(learned) & changes.keys():
            self._looks_moved[name] = self._looks_moved.get(name, 0) + (changes[name] > 0.0)
        moved = [name for name, looks in self._looks_moved.items() if looks >= MOVED_BEFORE and name in changes]
        now = [name for name in moved if name in held and name not in learned and changes[name] == 0.0]
        sizes = [sum(self._samples[name].numel() for name in names) for names in (now, moved)]
        before, self._stopped = self._stopped, sizes[0] / max(1, sizes[1])
        at_once = self._stopped - before >= STOPPED
        lasts = self._stopped_steps > 0 and self._stopped >= STOPPED
        self._stopped_steps = self._stopped_steps + steps if at_once or lasts else 0
        return self._stopped_steps

    def _spread(self, tables: Mapping[str, Tensor]) -> tuple[LayerValue, ...]:
        """How far the rows of an embedding are from their mean, relative to the first look; the one that lost most."""
        found: dict[str, float] = {}
        for name, rows in tables.items():
            rows = rows.double()
            size = float(rows.norm())
            spread = float((rows - rows.mean(0)).norm()) / size if size > 0.0 else math.nan
            start = self._spreads.setdefault(name, spread)
            if math.isfinite(spread) and start > 0.0:
                found[name] = spread / start
        if not found:
            return ()
        least = min(found, key=lambda name: found[name])
        return (fact("embedding_spread", least, found[least]),)


def described(view: ModelView, name: str, homes: Mapping[str, tuple[str | None, int]]) -> str:
    """The name of a parameter and what it is: ``"lm_head.weight (head)"``. The words are for readers, not evidence."""
    if name in homes:
        stack, layer = homes[name]
        return f"{name} (block {layer}{f' of the {stack}' if stack else ''})"
    owner = view.model.get_submodule(name.rpartition(".")[0])
    names = [one for one, _ in view.model.named_parameters()]
    last = max((names.index(one) for one in homes if one in names), default=-1)
    if isinstance(owner, nn.Embedding):
        what = "position embedding" if "pos" in name.lower() or "wpe" in name.lower() else "embedding"
    elif "norm" in type(owner).__name__.lower():
        what = "norm outside the blocks"
    elif names.index(name) > last:
        what = "head"
    else:
        what = "before the blocks"
    return f"{name} ({what})"


def _tables(model: nn.Module, homes: Mapping[str, object]) -> dict[str, Tensor]:
    """Rows of the embeddings outside the blocks."""
    found = {}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Embedding) and name not in homes and len(parameter) >= LEAST_ROWS:
            found[name] = parameter.detach()[:: max(1, len(parameter) // _ROWS)][:_ROWS]
    return {name: rows for name, rows in found.items() if is_readable(rows)}


def _norms_of(tensors: list[Tensor] | tuple[Tensor, ...]) -> list[float]:
    found: list[float] = torch.stack(torch._foreach_norm(tensors)).tolist() if tensors else []
    return found


def _sample(tensor: Tensor) -> Tensor:
    flat = values_of(tensor).flatten()
    return flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].clone()
