"""``watch``: one line that watches a training loop, counted by the optimizer's own hooks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from rankscope.errors import InputError, ReadingError
from rankscope.models.inputs import InputsLike
from rankscope.models.loading import need_module
from rankscope.models.model import Model
from rankscope.models.stream import Stream
from rankscope.models.wrapping import is_distributed
from rankscope.monitor.acting import LOGGER, Action, CollapseError
from rankscope.monitor.alarms import ALARMS
from rankscope.monitor.answers import Answers, Samples, cross_entropy, labels_of
from rankscope.monitor.gauge import Gauge
from rankscope.monitor.ledger import Ledger
from rankscope.monitor.outlets import Sink
from rankscope.monitor.probing import MetricsLike, Objective
from rankscope.monitor.readings import Alarm
from rankscope.monitor.schedules import Schedule
from rankscope.monitor.steps import with_hooks
from rankscope.monitor.watched import FirstBatch, Watched
from rankscope.monitor.why import Why
from rankscope.verdicts.states import LEAST_INPUTS

if TYPE_CHECKING:
    from accelerate import Accelerator
    from typing_extensions import Unpack

    from rankscope.monitor.hosts.hosting import HostedGauge

MOST_FORWARDS = 64
"""Training forwards without a step of the optimizer, after which that is said; more if more were accumulated before."""
SCALED = 256.0
"""Factor from which on a power of two is taken to be that of a loss scaler."""


class WatchOptions(TypedDict, total=False):
    """The options of :func:`watch`; ``accelerator`` is for a loop of one's own."""

    probe: InputsLike
    schedule: str | int | Schedule
    metrics: MetricsLike
    alarms: Sequence[str] | None
    actions: Sequence[Action]
    sinks: Sequence[Sink]
    record: str | Path | None
    strict: bool
    patience: float
    blocks: str | Sequence[str] | None
    stream: Stream | str | None
    silence: Sequence[str]
    accelerator: Accelerator | None


class Watch(Watched):
    """A training run that is watched; made by :func:`watch`.

    Attributes:
        gauge: the gauge that takes the readings; None until the first training batch was seen.
    """

    def __init__(
        self,
        module: nn.Module,
        declared: Model,
        optimizers: Sequence[Optimizer],
        probe: InputsLike,
        silence: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(probe, silence, options)
        self._watched, self._optimizers = declared, tuple(optimizers)
        self._steps = dict.fromkeys(map(id, self._optimizers), 0)
        self._done: set[int] = set()
        self._pending: int | None = None
        self._undo: list[Callable[[], object]] = []
        self._losses: list[float | Tensor] = []
        self._forwards, self._most, self._told = 0, 0, False
        self._before_forwards: list[Tensor] = []
        self._modes: set[bool] = set()
        self._disabled: str | None = None
        self._module = module
        self._batches: FirstBatch = FirstBatch(module, lambda named: self._forward())
        self._reached, self._returns = False, False
        self._output: Tensor | None = None  # of the first batch, until its loss is known
        self._objective: Objective | None = None
        self._handles: list[Any] = [module.register_forward_hook(self._loss_of)]
        self._hear_backward()
        self._answers = Answers()
        for one in self._optimizers:
            self._handles += [one.register_step_pre_hook(self._before), one.register_step_post_hook(self._after)]
        self._ledger = Ledger(self._optimizers)  # its hooks come after those that know the model

    # What the loop calls

    def loss(self, loss: Tensor) -> Tensor:
        """Show the loss of a step; it is returned as it is, so that ``watch.loss(loss).backward()`` works.

        With gradient accumulation, the mean of the losses since the last step is stored.
        """
        if not self._told:
            self._losses, self._told = [], True  # losses that the model itself returned are no longer used
        self._show(loss)
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        return loss

    def take_losses_of(self, host: Any, method: str) -> None:
        """Look at the loss that is passed to a method of an object, until the watch is closed."""
        plain = getattr(host, method)

        def heard(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.loss(loss)
            return plain(loss, *args, **kwargs)

        setattr(host, method, heard)
        self._undo.append(lambda: vars(host).pop(method, None))

    def silence(self, *names: str) -> None:
        """Never raise these alarms again.

        Raises:
            UnknownNameError: there is no such alarm.
        """
        self._silenced += [ALARMS[name].name for name in names]
        if self.gauge is not None:
            self.gauge.silence(*names)

    @contextmanager
    def planned(self, words: str) -> Iterator[None]:
        """Declare what is written, set or switched inside: ``with watch.planned("merge adapters"): ...``."""
        if self.gauge is None:
            yield
        else:
            with self.gauge.planned(words):
                yield

    def why(self) -> Why:
        """Why the run went bad: what is shown, recorded and seen, in order; with what ``doctor`` finds now."""
        if self.gauge is None:
            return Why(None, None, (), 0)
        with self._not_of_the_training():
            return self.gauge.why()

    def close(self) -> None:
        """Take a reading that is pending, remove all hooks, and close record and sinks; may be called again."""
        self._guarded(self._read_pending)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for undo in self._undo:
            undo()
        self._undo = []
        self._batches.close()
        self._ledger.close()
        if self.gauge is not None:
            self.gauge.close()

    def __deepcopy__(self, memo: Any) -> Watch:
        return self  # a copy of a watched model, such as a teacher, is not watched

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What the user looks at

    @property
    def step(self) -> int:
        """Steps of the optimizer so far; of several, those of the one that made the most."""
        return max(self._steps.values(), default=0)

    @property
    def disabled(self) -> str | None:
        """Why nothing is read any more; None as long as it is."""
        return self._disabled if self._disabled is not None else super().disabled

    # Hooks

    def _forward(self) -> None:
        self._forwards += 1
        most = max(MOST_FORWARDS, 8 * self._most)
        if self._forwards == most // 2:
            self._before_forwards = self._sample()
        if self._forwards == most + 1:
            self._guarded(lambda: self._without_step(most))

    def _without_step(self, forwards: int) -> None:
        """Many training forwards and no step: a fault if weights move all the same, or gradients are not finite."""
        words = ""
        if not all(map(torch.equal, self._before_forwards, self._sample())):
            words = "weights move all the same: another optimizer makes the steps"
        elif not all(bool(torch.isfinite(one.grad).all()) for one in self._held if one.grad is not None):
            words = "gradients are NaN or infinite, and no step is made with them: look at the scale of the loss"
        said = f"{forwards} training forwards without a step of the optimizer that is watched"
        LOGGER.warning("%s%s.", said, f"; {words}" if words else "")
        # A later phase of a training may have an optimizer of its own.
        if words and self.step == 0:
            gauge = self._need_gauge()
            evidence, sentence = {"forwards": float(forwards)}, f"{said}; {words}."
            gauge.alarm(Alarm("still_weights", "raised", 0, None, None, sentence, evidence, "optimizer"))

    def _sample(self) -> list[Tensor]:
        """An entry of each parameter that the optimizers hold."""
        return [one.detach().flatten()[:1].clone() for one in self._held if one.numel() and not is_distributed(one)]

    @property
    def _held(self) -> list[Tensor]:
        """The parameters that the optimizers hold."""
        return [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]

    def _loss_of(self, module: nn.Module, args: Any, output: Any) -> None:
        """The loss that a model returns, by name or as the only scalar of a tuple, unless the loop passes its own."""
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if self._batches.is_paused or module is not self._module:
            return
        if self.gauge is None and self._objective is None and isinstance(output, Tensor) and output.ndim > 1:
            self._output = output.detach()[:LEAST_INPUTS]
        if self._told:
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None and isinstance(output, tuple | list):  # nanoGPT: logits, loss
            scalars = [one for one in output if isinstance(one, Tensor) and one.ndim == 0 and one.requires_grad]
            loss = scalars[0] if len(scalars) == 1 else None
        self._returns = isinstance(loss, Tensor) and loss.numel() == 1
        if isinstance(loss, Tensor) and self._returns:
            self._show(loss)
            self._losses.append(loss.detach())
            return
        is_plain = isinstance(output, Tensor | Mapping | tuple | list)
        for leaf in pytree.tree_leaves(output if is_plain else getattr(output, "__dict__", {})):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._reach)  # type: ignore[no-untyped-call]

    def _show(self, loss: float | Tensor) -> None:
        """Before ``backward`` frees what autograd saved for the loss."""
        if isinstance(loss, Tensor):
            self._guarded(lambda: self._answers.keep(loss))
            self._guarded(lambda: self._learn_objective(loss))
            self._guarded(lambda: self._hear_objective(loss))

    def _learn_objective(self, loss: Tensor) -> None:
        """The labels of the first batch, if its loss is the cross-entropy of what the model returned."""
        output, self._output = self._output, None
        if output is not None:
            labels = labels_of(loss, output)
            self._objective = None if labels is None else (cross_entropy, labels)

    def _hear_objective(self, loss: Tensor) -> None:
        if self.gauge is not None:
            self.gauge.hear_objective(loss)

    def _reach(self, gradient: Tensor) -> None:
        self._reached = True

    def _hear_backward(self) -> None:
        """If the model does not return its loss: the scalar on which backward is called and that reaches its outputs.

        ``Tensor.backward`` calls ``torch.autograd.backward``, which has no hook of its own. It is wrapped until the
        watch is closed or forgotten, and gets and returns what it did.
        """
        plain, me = torch.autograd.backward, weakref.ref(self)

        def heard(tensors: Any, *args: Any, **kwargs: Any) -> None:
            watch = me()
            one = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
            is_loss = isinstance(one, Tensor) and one.numel() == 1 and not torch.compiler.is_compiling()
            if watch is None or not is_loss or not watch._needs_loss:
                plain(tensors, *args, **kwargs)
                return
            loss = _unscaled(one)  # before backward frees what the graph saved
            samples: Samples = {}
            watch._guarded(lambda: samples.update(watch._answers.sample(one)))
            watch._guarded(lambda: watch._learn_objective(one))
            watch._guarded(lambda: watch._hear_objective(one))
            watch._reached = False
            plain(tensors, *args, **kwargs)
            if watch._reached:
                watch._losses.append(loss)
                watch._answers.add(samples)

        torch.autograd.backward = heard

        def undo() -> None:
            if torch.autograd.backward is heard:  # otherwise a later watch has wrapped this one
                torch.autograd.backward = plain

        self._undo.append(undo)

    @property
    def _needs_loss(self) -> bool:
        """Whether a loss is only known from ``backward``."""
        return bool(self._handles) and not (self._told or self._returns or self._batches.is_paused)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        is_first = self.gauge is None and self._probe is None and self._batches.parts == 0
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if is_first and has_closure:
            return  # a closure calls the model inside the step
        self._guarded(lambda: self._begin(optimizer, has_closure=has_closure))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._guarded(lambda: self._end(optimizer))

    def _begin(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Before the first optimizer of a step: read the gradients that all of them are about to use."""
        if self._steps[id(optimizer)] < self.step:
            return  # another optimizer began this step
        is_late = self._pending is not None  # what is read now has the gradients of the coming step already
        self._read_pending()
        self._most, self._forwards = max(self._most, self._forwards), 0
        gauge, modes = self._need_gauge(), self._batches.take_modes()
        if modes != self._modes and {len(modes), len(self._modes)} == {1}:
            mode = "training" if modes == {True} else "evaluation"
            gauge.note("mode_switched", self.step, f"the model is trained in {mode} mode from here on", "code")
        self._modes = modes or self._modes
        self._notice(gauge)
        with self._not_of_the_training():
            gauge.after_backward(self.step, is_own=has_closure or is_late)

    def _tell_idle(self) -> None:
        """Once, which optimizers made no step while another one made many."""
        idle = [one for one in self._optimizers if self._steps[id(one)] == 0]
        held = [p for one in idle for group in one.param_groups for p in group["params"] if p.requires_grad]
        if self.gauge is not None and held:
            names = ", ".join(type(one).__name__ for one in idle)
            words = f"{names} made no step so far, and holds {len(held)} parameters that require gradients"
            self.gauge.note("no_step", self.step, words, "optimizer", parameters=len(held))

    def _end(self, optimizer: Optimizer) -> None:
        if self._pending is None:
            self._pending = self.step
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] == self.step == MOST_FORWARDS:
            self._tell_idle()
        self._done.add(id(optimizer))
        if len(self._done) == len(self._optimizers):
            self._read_pending()

    def _read_pending(self) -> None:
        """Take the reading of a step; after the last optimizer, or before the next step if some did not take part."""
        step, self._pending = self._pending, None
        self._done = set()
        if step is None or self.gauge is None:
            return
        losses, self._losses = self._losses, []
        batch = self._batches.take_latest()
        with self._not_of_the_training():
            reading = self.gauge.step(step, loss=_mean(losses), batch=batch)
        if reading is not None:
            self._keep(reading)

    @contextmanager
    def _not_of_the_training(self) -> Iterator[None]:
        """What the gauge calls in here is no batch of the training, and what it differentiates is not its loss."""
        self._batches.is_paused = True
        try:
            yield
        finally:
            self._batches.is_paused = False

    def _notice(self, gauge: Gauge) -> None:
        """The norm of the gradient, which costs one pass over the gradients."""
        gradients = [one.grad for one in self._held if one.grad is not None]
        if gradients and not any(one.is_sparse or is_distributed(one) for one in gradients):
            norms = torch._foreach_norm([one.detach() for one in gradients])
            first = norms[0].device
            gauge.notice(self.step, "gradient", torch.stack([norm.to(first).float() for norm in norms]).norm())

    def _need_gauge(self) -> Gauge:
        if self.gauge is not None:
            return self.gauge
        # The hooks of the ledger are there already: none can be added inside another one.
        gauge = self._make(self._watched, self._optimizers, ledger=self._ledger)
        gauge.answers = self._answers
        # The labels are those of the first batch: the probe has to be of that batch as well.
        gauge.objective = self._objective if self._probe is None and self._batches.parts == 1 else None
        return gauge

    def _guarded(self, act: Callable[[], None]) -> None:
        """Whatever goes wrong in here never ends the run, unless it was asked to."""
        if self._disabled is not None:
            return
        try:
            act()
        except (CollapseError, ReadingError):
            raise
        except Exception as error:
            if self._options.get("strict"):
                raise
            self._disabled = f"{type(error).__name__}: {error}"
            LOGGER.error("watch was disabled; the run continues. Cause: %s", self._disabled, exc_info=error)


def _unscaled(loss: Tensor) -> Tensor:
    """A loss without the factor of a ``GradScaler``: the last product, with a power of two of at least 256."""
    factor = getattr(loss.grad_fn, "_saved_other", None) if "MulBackward" in type(loss.grad_fn).__name__ else None
    found = loss.detach()
    if not isinstance(factor, Tensor) or factor.requires_grad or factor.numel() != 1:
        return found
    by = factor.detach().to(found.device, torch.float32).reshape(found.shape)
    is_scale = (by >= SCALED) & (by.log2() == by.log2().round())  # on its device: nobody waits for it
    return found / torch.where(is_scale, by, torch.ones_like(by))


def _mean(losses: Sequence[float | Tensor]) -> float | Tensor | None:
    if not losses:
        return None
    if all(isinstance(loss, Tensor) for loss in losses):
        return torch.stack([loss.float().reshape(()) for loss in losses if isinstance(loss, Tensor)]).mean()
    return math.fsum(float(loss) for loss in losses) / len(losses)


def hooked(optimizer: object) -> Optimizer:
    """The torch optimizer under the wrappers of accelerate and Lightning, whose own hooks are called.

    Raises:
        InputError: it is not an optimizer of torch.
    """
    inner = with_hooks(optimizer)
    if inner is None:
        raise InputError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer, so that its steps cannot be counted. Use "
            "rankscope.Gauge and call it in the loop."
        )
    return inner


@overload
def watch(
    model: nn.Module | Model, optimizer: Optimizer | Sequence[Optimizer], **options: Unpack[WatchOptions]
) -> Watch: ...


@overload
def watch(model: object, optimizer: None = None, **options: Unpack[WatchOptions]) -> HostedGauge: ...


def watch(
    model: object,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    probe: InputsLike = None,
    schedule: str | int | Schedule = "1%",
    metrics: MetricsLike = None,
    alarms: Sequence[str] | None = None,
    actions: Sequence[Action] = ("log",),
    sinks: Sequence[Sink] = (),
    record: str | Path | None = None,
    strict: bool = False,
    patience: float = 60.0,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
    silence: Sequence[str] = (),
    accelerator: Accelerator | None = None,
) -> Watch | HostedGauge:
    """Watch a training loop, without any other change to it.

    Steps are counted by the optimizer's hooks, gradients are read before its step, and the probe is a slice of the
    first training batches that the model is called with. Training computes the same bits as without it.

    Args:
        model: the model that the loop calls: wrapped in DDP or FSDP2, compiled, or neither. Or a ``Trainer`` of
            transformers, TRL, sentence-transformers, Lightning, Composer or OLMo-core, before it starts.
        optimizer: of the loop, or several; a step that a ``GradScaler`` skips is not counted.
        probe: fixed inputs to measure on, as for :class:`~rankscope.monitor.Gauge`; None for the first eight training
            sequences.
        schedule: ``"1%"`` of the wall time, every so many steps (a whole number), or a ``Schedule``.
        metrics: names from ``rankscope ls metrics``; None for the cheap default.
        alarms: names from ``ALARMS``; None for all that can be watched, an empty tuple for none.
        actions: what to do on an alarm: ``"log"``, ``"warn"``, ``"stop"``, ``"raise"``, or functions of an ``Alarm``.
        sinks: where scalars and alarms go in addition to the record.
        record: a folder for the record; None to keep none. If it holds one, the run is continued.
        strict: raise errors of the monitor itself instead of reporting them and going on without it.
        patience: seconds to wait for other ranks where a forward pass needs them.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: layout of the residual stream, if it is not ``batch tokens dim``; see :class:`rankscope.Stream`.
        silence: names of alarms that are never raised.
        accelerator: that of accelerate: the loss is taken from its ``backward``, and scalars go to its trackers.

    Returns:
        A :class:`Watch`, or the callback that was added to the trainer.

    Raises:
        InputError: there is no optimizer, or an argument is not one of those above.

    Example:
        >>> import torch
        >>> from rankscope import load
        >>> model = load("init:tiny-bert").model.train()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        >>> with watch(model, optimizer, schedule=1) as watched:
        ...     for _ in range(2):
        ...         _ = model(torch.randint(5, 90, (8, 12))).last_hidden_state.sum().backward()
        ...         optimizer.step(); optimizer.zero_grad()
        >>> len(watched.history), watched.alarms
        (2, ())
    """
    if isinstance(model, Optimizer):
        raise InputError(f"{type(model).__name__} is not a model, which comes first: watch(model, optimizer).")
    options: dict[str, Any] = {
        "schedule": schedule, "metrics": metrics, "alarms": alarms, "actions": actions,
        "sinks": sinks, "record": record, "strict": strict, "patience": patience,
    }  # fmt: skip
    if not isinstance(model, nn.Module | Model):
        from rankscope.monitor.hosts.attaching import attach

        return attach(model, probe=probe, blocks=blocks, stream=stream, silence=silence, **options)
    if optimizer is None:
        raise InputError("watch(model, optimizer) counts the steps of the optimizer: pass it, or several in a list.")
    if accelerator is not None:
        from rankscope.monitor.hosts.accelerate import AcceleratorSink

        options["sinks"] = (*sinks, AcceleratorSink(accelerator))
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    declared = model if isinstance(model, Model) else Model(need_module(model, "watch"), blocks=blocks, stream=stream)
    module = declared.model if isinstance(model, Model) else model
    watched = Watch(module, declared, [hooked(one) for one in optimizers], probe, silence, options)
    if accelerator is not None:
        watched.take_losses_of(accelerator, "backward")
    return watched
