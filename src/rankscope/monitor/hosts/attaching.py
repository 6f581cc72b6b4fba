"""One line for the trainers of others: finds the host by the packages its class comes from."""

from __future__ import annotations

from typing import Any

from rankscope.errors import InputError
from rankscope.monitor.hosts.hosting import HostedGauge


def attach(trainer: Any, **options: Any) -> HostedGauge:
    """Watch a ``Trainer`` of transformers, TRL, sentence-transformers, Lightning, Composer or OLMo-core: one line.

    Args:
        trainer: the host, before its training starts.
        **options: as for :class:`HostedGauge`.

    Raises:
        InputError: it is none of these.
    """
    roots = {kind.__module__.split(".")[0] for kind in type(trainer).__mro__}
    if "transformers" in roots:
        from rankscope.monitor.hosts.hugging_face import GaugeCallback as HuggingFaceGauge

        return HuggingFaceGauge(**options).attach(trainer)
    if roots & {"lightning", "pytorch_lightning"}:
        from rankscope.monitor.hosts.lightning import GaugeCallback as LightningGauge

        callback = LightningGauge(**options)
        trainer.callbacks.append(callback)
        return callback
    if "composer" in roots:
        from rankscope.monitor.hosts.composer import GaugeCallback as ComposerGauge

        hosted = ComposerGauge(**options)
        trainer.state.callbacks.append(hosted)
        return hosted
    if "olmo_core" in roots:
        from rankscope.monitor.hosts.olmo_core import GaugeCallback as OlmoGauge

        own = OlmoGauge(**options)
        trainer.add_callback("rankscope", own)
        return own
    raise InputError(
        f"watch() knows the trainers of transformers, Lightning, Composer and OLMo-core; {type(trainer).__name__} is "
        "none of them. "
        "In a loop of your own use rankscope.watch(model, optimizer)."
    )
