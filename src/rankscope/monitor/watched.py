"""What a run that is watched keeps: a slice of its first batches, and what a user looks at."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from rankscope.errors import InputError
from rankscope.models.inputs import InputsLike
from rankscope.models.model import Model
from rankscope.models.wrapping import unwrapped
from rankscope.monitor.acting import LOGGER, Actions
from rankscope.monitor.alarms import ALARMS
from rankscope.monitor.gauge import Gauge
from rankscope.monitor.history import History
from rankscope.monitor.ledger import Ledger
from rankscope.monitor.readings import Alarm, Reading, layer_scalars
from rankscope.monitor.schedules import as_schedule
from rankscope.monitor.status import ReadingRequest
from rankscope.verdicts.states import LEAST_INPUTS


class FirstBatch:
    """Keeps a slice of the first training batches that a model is called with, on their device.

    Args:
        model: the model, wrapped or not; it is not changed.
        heard: called after each training forward with its arguments by name.

    A model that takes one dictionary, as those of sentence-transformers and Composer do, is not called as a transformer
    is: the part of it is followed that is called with tensors and holds most of its parameters.

    Attributes:
        module: the model, or the part of it that is followed.
        latest: the arguments of the last training forward by name; None if there was none.
        saw_eval: whether the model was called in eval mode with gradients enabled.
        is_paused: whether calls are left alone, because they are not those of the training.
    """

    def __init__(self, model: nn.Module, heard: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._heard = heard
        self.module, self._names = model, _argument_names(model)
        self._parts: list[dict[str, Any]] = []
        self.is_paused = False
        self._count = 0
        self.latest: Mapping[str, Any] | None = None
        self.saw_eval, self._modes = False, set[bool]()
        self._handles = [model.register_forward_pre_hook(self._see, with_kwargs=True)]

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Traced as nothing at all: a graph that torch.compile builds must not depend on it.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.is_paused or module is not self.module:
            return
        self._modes.add(module.training)
        if not module.training:
            self.saw_eval = True
            return
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if module is self.module and not _has_tensor(named) and any(isinstance(v, Mapping) for v in named.values()):
            self._look_inside(module)
            return
        self.latest = named
        if self._count < LEAST_INPUTS:
            self._gather(named)
        if self._heard is not None:
            self._heard(named)

    def __deepcopy__(self, memo: Any) -> FirstBatch:
        return self  # a copy of a watched model, such as a teacher, is not watched

    def _look_inside(self, model: nn.Module) -> None:
        """Follow the part that this very forward will call with tensors."""
        whole = sum(parameter.numel() for parameter in model.parameters())
        parts = [part for part in model.modules() if part is not model and next(part.children(), None) is not None]
        parts = [part for part in parts if 2 * sum(one.numel() for one in part.parameters()) > whole]

        def see(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.module is model and _has_tensor({**dict(enumerate(args)), **kwargs}):
                self.module, self._names = part, _argument_names(part)
                for handle in self._handles:
                    handle.remove()
                self._handles = [part.register_forward_pre_hook(self._see, with_kwargs=True)]
                self._see(part, args, kwargs)

        self._handles += [part.register_forward_pre_hook(see, with_kwargs=True) for part in parts]

    def _gather(self, named: Mapping[str, Any]) -> None:
        size = _batch_size(named)
        if size is None:
            return
        wanted = min(size, LEAST_INPUTS - self._count)
        part = pytree.tree_map(lambda leaf: _slice(leaf, size, wanted), dict(named))
        if self._parts and _shapes(self._parts[0]) != _shapes(part):
            return
        self._parts.append(part)
        self._count += wanted

    def take_latest(self) -> dict[str, Tensor] | None:
        """The tensors of the last training forward since the last call, by name; None if there were none."""
        latest, self.latest = self.latest, None
        return {name: one for name, one in (latest or {}).items() if isinstance(one, Tensor)} or None

    def take_modes(self) -> set[bool]:
        """In which modes the model was called with gradients enabled since the last call: True is training mode."""
        found, self._modes = self._modes, set()
        return found

    @property
    def parts(self) -> int:
        """Batches of which sequences were kept."""
        return len(self._parts)

    def probe(self) -> dict[str, Any] | None:
        """What was kept, as arguments of the model's forward; None if no training batch was seen."""
        if not self._parts:
            return None
        leaves, spec = zip(*(pytree.tree_flatten(part) for part in self._parts), strict=True)
        joined = [torch.cat(same) if _is_batched(same[0]) else same[0] for same in zip(*leaves, strict=True)]
        found: dict[str, Any] = pytree.tree_unflatten(joined, spec[0])
        required = _required(self.module)
        return {name: value for name, value in found.items() if value is not None or name in required}

    def close(self) -> None:
        """Remove the hook and forget the batches."""
        for handle in self._handles:
            handle.remove()
        self.latest = None


def _argument_names(model: nn.Module) -> list[str]:
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _required(model: nn.Module) -> set[str]:
    """Arguments without a default."""
    parameters = inspect.signature(unwrapped(model).forward).parameters
    return {name for name, one in parameters.items() if one.default is inspect.Parameter.empty}


def _has_tensor(named: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in named.values())


def _batch_size(named: Mapping[str, Any]) -> int | None:
    """Size of the first axis of the first tensor that has one."""
    for leaf in pytree.tree_leaves(dict(named)):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return len(leaf)
    return None


def _slice(leaf: Any, size: int, wanted: int) -> Any:
    if isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size:
        return leaf.detach()[:wanted].clone()
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _is_batched(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _shapes(part: Mapping[str, Any]) -> list[tuple[int, ...] | None]:
    """Shapes without the batch axis: only such batches can be joined."""
    return [tuple(leaf.shape[1:]) if _is_batched(leaf) else None for leaf in pytree.tree_leaves(part)]


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a gauge: invalid ones are reported where they were written, not at the first step."""
    as_schedule(options.get("schedule", "1%"))
    ReadingRequest(options.get("metrics"), options.get("alarms"))
    Actions(options.get("actions", ("log",)), speaks=False)
    return dict(options)


class Watched:
    """What a user looks at while a run is watched: readings, alarms, a table, a line.

    Args:
        probe: the inputs of the gauge; None for a slice of the first training batches.
        silence: names of alarms that are never raised.
        options: of the gauge that is made once a training batch is known.

    Raises:
        UnknownNameError: there is no such alarm.
    """

    gauge: Gauge | None = None
    _batches: FirstBatch | None = None

    def __init__(self, probe: InputsLike, silence: Sequence[str], options: Mapping[str, Any]) -> None:
        self._probe, self._options = probe, checked(options)
        self._silenced = [ALARMS[name].name for name in silence]
        self._start_over()

    def _start_over(self) -> None:
        self.gauge = None
        self._rows: list[dict[str, float]] = []
        self._history = History()

    def _make(
        self, model: Model, optimizers: Sequence[Optimizer], ledger: Ledger | None = None, **options: Any
    ) -> Gauge:
        """Make the gauge, with other options in place of some of those that were given."""
        batches, probe = self._batches, self._probe
        if probe is None and batches is not None:
            probe = batches.probe()
            inside = batches.module is not model.model
            model = Model(batches.module, blocks=model.blocks, stream=model.declared_stream) if inside else model
        why = "" if probe is not None else self._why_no_probe(type(model.model).__name__)
        if why and self._options.get("strict"):
            raise InputError(why)
        self.gauge = Gauge(model, probe, **{**self._options, **options})
        self.gauge.silence(*self._silenced)
        if why:
            LOGGER.warning("No blocks are read. %s", why)
            self.gauge.leave_out_probe(why)
        self.gauge.ledger, self.gauge.optimizers = ledger, tuple(optimizers)
        return self.gauge

    def _why_no_probe(self, name: str) -> str:
        if self._batches is not None and self._batches.saw_eval:
            return (
                f"{name} was called in eval mode before the first step of the optimizer. Call model.train() before the "
                "loop; if it is trained in eval mode on purpose, pass probe=."
            )
        return (
            f"{name} was not called with a training batch before the first step of the optimizer. If the loop calls "
            "one of its methods or parts instead, pass probe=, or to a trainer model=; if it is compiled, pass what "
            "torch.compile returned; if another model is trained, pass that."
        )

    def _keep(self, reading: Reading) -> None:
        single = {row.metric: row.mean for row in reading.table if row.layer is None}
        scalars = {**layer_scalars(reading.table), **reading.scalars}
        named = {name.removeprefix("rankscope/"): value for name, value in scalars.items()}
        self._rows.append({"step": reading.step, **single, **named})
        self._history.take(reading)

    @property
    def should_stop(self) -> bool:
        """Whether an alarm requested that the run be stopped (``actions=("stop",)``)."""
        return self.gauge is not None and self.gauge.should_stop

    @property
    def disabled(self) -> str | None:
        """Why nothing is read any more; None as long as it is."""
        return None if self.gauge is None else self.gauge.disabled

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Every alarm that was raised, in order."""
        return () if self.gauge is None else tuple(one for one in self.gauge.alarms if one.state == "raised")

    @property
    def notes(self) -> tuple[Alarm, ...]:
        """What was written down and is no alarm, in order: what curves show, and changes that may be planned."""
        return () if self.gauge is None else tuple(self.gauge.notes)

    @property
    def history(self) -> Any:
        """One row per reading: a pandas DataFrame with the step as index, or a list of dictionaries without pandas."""
        try:
            import pandas as pd
        except ImportError:
            return list(self._rows)
        return pd.DataFrame(self._rows).set_index("step") if self._rows else pd.DataFrame()

    def __repr__(self) -> str:
        if self.disabled is not None:
            return f"watch: disabled: {self.disabled}"
        return f"watch: {'no training batch was seen yet' if self.gauge is None else self.gauge.summary}"

    def _repr_html_(self) -> str:
        from rankscope.monitor.showing import history_html

        return history_html(repr(self), self._history)
