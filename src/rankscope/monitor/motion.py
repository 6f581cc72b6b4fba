"""How far every weight moved between two readings, and whether it moved at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from rankscope.linalg.to_host import to_host
from rankscope.models.view import ModelView
from rankscope.models.wrapping import is_distributed
from rankscope.monitor.alarms.facts import MOVED
from rankscope.monitor.parameters import SITE, block_row, homes_of, is_readable, sampled, tensors_of
from rankscope.monitor.readings import LayerValue, fact
from rankscope.monitor.steps import held_by

Place = tuple[str | None, int | None]


class WeightMotion:
    """How far each parameter moved since the last look, by a sample of its entries."""

    def __init__(self) -> None:
        self._step = 0
        self._still: dict[Place, int] = {}
        self._zero = 0
        self._has_moved: set[Place] = set()
        self._samples: dict[str, Tensor] = {}
        self._norms: dict[str, float] = {}
        self._from_zero: set[str] = set()

    def take(
        self,
        view: ModelView,
        step: int,
        *,
        gradient: float = math.nan,
        optimizers: Sequence[Optimizer] = (),
        used: frozenset[str] = frozenset(),
    ) -> tuple[LayerValue, ...]:
        r"""Per step, :math:`\|W_t - W_s\|_F / ((t - s) \|W_t\|_F)` over the sampled entries of a block.

        **Estimate.** Nothing at the first look, of parameters whose shape changed, and of a model whose weights are
        sharded over ranks: each rank would sample other entries. Parameters that begin at zero, as one half of an
        adapter does, are left out of the motion of a block that has others: relative to nothing, any step is large.

        Args:
            view: the model.
            step: training step.
            gradient: norm of the gradient of the whole model, if it is known.
            optimizers: of the run, if they are known.
            used: names of the parameters that a pass reads, if they are known: a block may be switched on later.
        """
        named = {name: tensor for name, tensor in tensors_of(view.model, "weight") if is_readable(tensor)}
        if any(map(is_distributed, named.values())):
            return ()
        homes = homes_of(view, named)
        parts = to_host([sampled(tensor).clone() for tensor in named.values()])
        now = {name: sample.double() for name, sample in zip(named, parts, strict=True)}
        before, steps = self._samples, step - self._step
        self._from_zero |= {name for name, sample in now.items() if name not in before and not bool(sample.any())}
        self._samples, self._step = now, step
        self._norms = dict(zip(now, _norms_of(list(now.values())), strict=True))
        self._zero = self._zero + max(steps, 0) if gradient == 0.0 else 0
        known = [name for name in now if name in before and before[name].shape == now[name].shape]
        if steps <= 0 or not known:
            return ()
        pairs = [now[name] for name in known], [before[name] for name in known]
        changes = dict(zip(known, _norms_of(torch._foreach_sub(*pairs)), strict=True))
        learned = [name for name, one in view.model.named_parameters() if one.requires_grad and name in changes]
        learned = [name for name in learned if not used or name in used] or learned
        matrices = [name for name in learned if named[name].dim() > 1 and name in homes] or learned
        return (
            *self._motion(homes, changes, steps),
            *self._stillness(homes, before, matrices, held_by(view.model, optimizers), steps),
            fact("zero_steps", "gradients", float(self._zero)),
        )

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
            still = self._still[place] = self._still.get(place, 0) + steps if share < MOVED else 0
            if place == (None, None):
                yield fact("weights_moved", "weights", share)
                yield fact("still_steps", "weights", float(still))
                if held:  # the optimizers are known
                    yield fact("weights_held", "optimizer", len(held.intersection(names)) / len(names))
            elif still and (place in self._has_moved or held.issuperset(names)):
                yield LayerValue("weights_moved", SITE, *place, share, share, share)
                yield LayerValue("still_steps", SITE, *place, still, still, still)
            if share >= MOVED:
                self._has_moved.add(place)


def _norms_of(tensors: list[Tensor] | tuple[Tensor, ...]) -> list[float]:
    found: list[float] = torch.stack(torch._foreach_norm(tensors)).tolist() if tensors else []
    return found
