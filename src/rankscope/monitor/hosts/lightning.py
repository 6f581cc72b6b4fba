"""The gauge in a Lightning ``Trainer``.

``log_dict`` follows ``log_every_n_steps`` and would drop readings in between. So a reading goes directly to the
loggers, at its own step, and through ``log_dict`` only to ``callback_metrics``, where ``ModelCheckpoint`` and
``EarlyStopping`` look for what they monitor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rankscope.errors import MissingExtraError
from rankscope.monitor.hosts.hosting import HostedGauge
from rankscope.monitor.outlets import Sink
from rankscope.monitor.readings import Reading
from rankscope.monitor.sinks import sinks_of

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
except ImportError as error:
    raise MissingExtraError("The Lightning callback", "lightning", "lightning") from error

__all__ = ["GaugeCallback"]


class GaugeCallback(HostedGauge, Callback):
    """Monitors a Lightning run; its arguments are those of :class:`~rankscope.monitor.hosts.hosting.HostedGauge`.

    A ``LightningModule`` often has no forward of its own: name the transformer in it with ``model``. Gradients are read
    before clipping. Step numbers are ``trainer.global_step``, counted after the step; with several optimizers Lightning
    counts each of their steps. ``"stop"`` sets ``trainer.should_stop``.

    Example::

        trainer = lightning.Trainer(callbacks=[GaugeCallback(probe, model="net", record="runs/gauge")])
        trainer.fit(module, loader)
    """

    _stepped = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the gauge: by now the model is on its devices and the processes know each other."""
        loggers = trainer.loggers if trainer.is_global_zero else ()
        self._stepped = trainer.global_step
        self._start(pl_module, self._sinks_for(loggers, _sinks_of), tuple(trainer.optimizers))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Look at what the loss was computed from."""
        self._before_backward(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Read gradients."""
        self._read_gradients(trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a reading, log it, and stop if requested; a batch that only accumulates gradients is not a step."""
        if self.gauge is None or trainer.global_step == self._stepped:
            return
        self._stepped = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        reading = self._read(
            self._stepped,
            loss if isinstance(loss, Tensor) and loss.numel() == 1 else None,
            batch if isinstance(batch, (Tensor, Mapping, Sequence)) else None,
        )
        if reading is not None:
            self._tell_host(lambda: _log(reading, trainer, pl_module))
        if self.gauge.should_stop:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the record."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run failed; what was read is kept."""
        self._stop()


def _log(reading: Reading, trainer: Trainer, pl_module: LightningModule) -> None:
    scalars = dict(reading.scalars)
    pl_module.log_dict(scalars, logger=False, on_step=True, on_epoch=False, batch_size=1)
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=reading.step)


def _sinks_of(logger: Logger) -> Iterator[Sink]:
    """A sink for this logger's target, for alarms."""
    if isinstance(logger, TensorBoardLogger):
        yield from sinks_of("tensorboard", logger.experiment)
    elif isinstance(logger, WandbLogger):
        yield from sinks_of("wandb", logger.experiment)
    elif isinstance(logger, MLFlowLogger):
        yield from sinks_of("mlflow", logger.run_id, logger.experiment)
