"""The gauge in a ``Trainer`` of Composer (the package ``mosaicml``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor

from rankscope.models.wrapping import unwrapped
from rankscope.monitor.hosts.hosting import HostedGauge

__all__ = ["GaugeCallback"]


class GaugeCallback(HostedGauge, Callback):
    """Monitors a Composer run; its arguments are those of :class:`~rankscope.monitor.hosts.hosting.HostedGauge`.

    A ``ComposerModel`` takes a batch instead of keyword arguments: name the transformer in it with ``model``, which is
    ``"model"`` in a ``HuggingFaceModel``. Gradients are read after all microbatches, before clipping by an algorithm
    that runs later. Step numbers are batches, counted after the step. Scalars go to all loggers; pass ``sinks`` for
    alarms. ``"stop"`` calls ``state.stop_training()``.

    Example::

        trainer = Trainer(model, loader, max_duration="100ba", callbacks=[GaugeCallback(probe, model="model")])
        trainer.fit()
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        """Build the gauge: by now the model is on its device, and wrapped."""
        self._start(unwrapped(state.model), (), tuple(state.optimizers or ()))

    def before_backward(self, state: State, logger: Logger) -> None:
        """Look at what the loss was computed from."""
        self._before_backward(state.loss)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Read gradients."""
        self._read_gradients(state.timestamp.batch.value + 1)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take a reading, log it, and stop if requested."""
        if self.gauge is None:
            return
        batch = state.batch if isinstance(state.batch, (Tensor, Mapping, Sequence)) else None
        loss = state.loss if isinstance(state.loss, Tensor) and state.loss.numel() == 1 else None
        reading = self._read(state.timestamp.batch.value, loss, batch)
        if reading is not None:
            self._tell_host(lambda: logger.log_metrics(dict(reading.scalars), step=reading.step))
        if self.gauge.should_stop:
            state.stop_training()

    def close(self, state: State, logger: Logger) -> None:
        """Close the record; Composer calls this after an error, too."""
        self._stop()
