"""The gauge in a Hugging Face ``Trainer``.

User callbacks run after the reporting callbacks, so what they add to ``logs`` is not reported; and a callback does not
know its trainer. :meth:`GaugeCallback.attach` solves both: values go through ``trainer.log``, on every process as the
trainer itself does it, and the callback runs first, before reporters close their files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rankscope.errors import InputError
from rankscope.models.inputs import Inputs
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.hosts.hosting import HostedGauge
from rankscope.monitor.outlets import Sink
from rankscope.monitor.readings import Reading
from rankscope.monitor.sinks import sinks_of

__all__ = ["GaugeCallback"]


class GaugeCallback(HostedGauge, TrainerCallback):
    """Monitors a ``Trainer``; its arguments are those of :class:`~rankscope.monitor.hosts.hosting.HostedGauge`.

    Gradients are read after clipping and before the optimizer's step; clipping does not change the ratio of Q/K to V.
    Step numbers are ``state.global_step``, counted after the step. ``"stop"`` sets ``control.should_training_stop``.

    Example::

        GaugeCallback(probe, record="runs/gauge").attach(trainer)
        trainer.train()
    """

    _trainer: Trainer | None = None
    _running = False
    _loss: Tensor | None = None

    def attach(self, trainer: Trainer) -> GaugeCallback:
        """Add the callback to the trainer, before the others, and log through it from now on."""
        if not isinstance(trainer, Trainer):
            raise InputError(f"attach() takes a transformers.Trainer, got {type(trainer).__name__}.")
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        if self._trainer is not trainer:
            self._listen(trainer)
        self._trainer = trainer
        return self

    def _listen(self, trainer: Trainer) -> None:
        """A callback is not shown the loss; what ``training_step`` returns adds up to the loss of a step."""
        plain = trainer.training_step

        def heard(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = plain(*args, **kwargs)
            if self._running:
                self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
            return loss

        trainer.training_step = heard
        compute = trainer.compute_loss

        def computed(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            if self._running:
                self._before_backward(loss[0] if isinstance(loss, tuple) else loss)
            return loss

        trainer.compute_loss = computed

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: Any
    ) -> None:
        """A new run; the gauge is built at its first step, when reporters are ready."""
        self._running = False
        if self._trainer is None:
            LOGGER.warning(
                "GaugeCallback does not know its trainer: readings go to the record and to sinks, but not to the "
                "trainer's reporters. Use GaugeCallback(...).attach(trainer) instead of Trainer(callbacks=[...])."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **facts: Any
    ) -> None:
        """Build the gauge, the first time."""
        if not self._running:
            self._running = True
            own = facts.get("processing_class")
            if (
                isinstance(self._probe, Inputs)
                and self._probe.tokenizer is None
                and callable(own)
                and hasattr(own, "all_special_ids")
            ):
                self._probe = replace(self._probe, tokenizer=own)
            optimizer = facts.get("optimizer")
            reporters = self._reporters() if state.is_world_process_zero else ()
            self._start(model, reporters, () if optimizer is None else (optimizer,))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: Any
    ) -> None:
        """Read gradients, which ``zero_grad`` is about to remove."""
        self._read_gradients(state.global_step + 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: Any
    ) -> TrainerControl:
        """Take a reading, log it, and stop if requested."""
        if self.gauge is None:
            return control
        loss, self._loss = self._loss, None
        reading = self._read(state.global_step, loss)
        if reading is not None:
            self._tell_host(lambda: self._log(reading, control))
        if self.gauge.should_stop:
            control.should_training_stop = True
        return control

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: Any) -> None:
        """Close the record."""
        if self._running:
            self._stop()
        self._running, self._loss = False, None

    def _log(self, reading: Reading, control: TrainerControl) -> None:
        if self._trainer is None:
            return
        # Logging anything marks this step as logged, and its loss would not be logged.
        wanted = control.should_log
        self._trainer.log(dict(reading.scalars))
        control.should_log = wanted

    def _reporters(self) -> tuple[Sink, ...]:
        found = () if self._trainer is None else self._trainer.callback_handler.callbacks
        return self._sinks_for(found, _sinks_of)


def _sinks_of(callback: TrainerCallback) -> Iterator[Sink]:
    """A sink for this reporter's target, for alarms."""
    from transformers import integrations

    if isinstance(callback, integrations.TensorBoardCallback) and callback.tb_writer is not None:
        yield from sinks_of("tensorboard", callback.tb_writer)
    elif isinstance(callback, integrations.WandbCallback):
        yield from sinks_of("wandb")
    elif isinstance(callback, integrations.MLflowCallback):
        yield from sinks_of("mlflow")
    elif isinstance(callback, integrations.TrackioCallback):
        yield from sinks_of("trackio")
