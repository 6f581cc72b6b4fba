"""The gauge in a ``Trainer`` of OLMo-core (the package ``ai2-olmo-core``)."""

from __future__ import annotations

from typing import Any

from olmo_core.train.callbacks import Callback

from rankscope.monitor.hosts.hosting import HostedGauge
from rankscope.monitor.readings import Reading

__all__ = ["GaugeCallback"]

LOSS = "train/CE loss"
"""The name under which OLMo-core records the loss of a step."""


class GaugeCallback(HostedGauge, Callback):
    """Monitors an OLMo-core run; its arguments are those of :class:`~rankscope.monitor.hosts.hosting.HostedGauge`.

    Reads ``trainer.train_module.model``. Gradients are read before they are clipped, which ``optim_step`` does. Step
    numbers are ``trainer.global_step``, and the loss is what the train module records as ``train/CE loss``. Scalars go
    through ``trainer.record_metric``, and from there to every logger; pass ``sinks`` for alarms.
    ``"stop"`` cancels the run.

    Example::

        trainer.add_callback("gauge", GaugeCallback(probe, record="runs/gauge"))
        trainer.fit()
    """

    _batch: Any = None
    _loss: Any = None
    _plain: Any = None

    def pre_train(self) -> None:
        """Build the gauge: by now the model is on its devices and the processes know each other."""
        self._start(self.trainer.train_module.model, ())
        plain = self._plain = self.trainer.record_metric

        def heard(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            # Before it is reduced over processes, so that nobody has to wait for others.
            if "/".join(filter(None, (kwargs.get("namespace"), name))) == LOSS:
                self._loss = value
            return plain(name, value, *args, **kwargs)

        self.trainer.record_metric = heard

    def pre_step(self, batch: dict[str, Any]) -> None:
        """Remember the batch, which later calls are not given, and from which training removes what it has used."""
        self._batch = dict(batch)

    def pre_optim_step(self) -> None:
        """Read gradients."""
        self._read_gradients(self.step)

    def post_train_batch(self) -> None:
        """Take a reading, log it, and stop if requested."""
        batch, self._batch = self._batch, None
        loss, self._loss = self._loss, None
        if self.gauge is None:
            return
        reading = self._read(self.step, loss=loss, batch=batch)
        if reading is not None:
            self._tell_host(lambda: self._log(reading))
        if self.gauge.should_stop:
            # Every rank is told to stop at the same step, so that no other has to be asked.
            self.trainer.cancel_run("an alarm of the gauge", no_sync=True)

    def close(self) -> None:
        """Close the record; called after an error, too."""
        if self._plain is not None:
            self.trainer.record_metric, self._plain = self._plain, None
        self._stop()

    def _log(self, reading: Reading) -> None:
        for name, value in reading.scalars.items():
            self.trainer.record_metric(name, value)
