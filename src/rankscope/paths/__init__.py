"""Paths: a network frozen at its inputs, and what single paths, or all of one length, carry through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.paths.capture import freeze_network
    from rankscope.paths.effectiveness import path_effectiveness
    from rankscope.paths.lengths import length_sums
    from rankscope.paths.marginals import Pick, through, without
    from rankscope.paths.network import FrozenNetwork
    from rankscope.paths.single import decay_orders, median_interval, path_decay, sample_paths, top_paths

__all__ = [
    "FrozenNetwork",
    "Pick",
    "decay_orders",
    "freeze_network",
    "length_sums",
    "median_interval",
    "path_decay",
    "path_effectiveness",
    "sample_paths",
    "through",
    "top_paths",
    "without",
]

_HOME = {
    "FrozenNetwork": "rankscope.paths.network",
    "Pick": "rankscope.paths.marginals",
    "decay_orders": "rankscope.paths.single",
    "freeze_network": "rankscope.paths.capture",
    "length_sums": "rankscope.paths.lengths",
    "median_interval": "rankscope.paths.single",
    "path_decay": "rankscope.paths.single",
    "path_effectiveness": "rankscope.paths.effectiveness",
    "sample_paths": "rankscope.paths.single",
    "through": "rankscope.paths.marginals",
    "top_paths": "rankscope.paths.single",
    "without": "rankscope.paths.marginals",
}

__getattr__ = names_of(__name__, _HOME)
