"""Every mechanism by its name, in the order of the table, and the few that a small run takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rankscope.experiments.mechanisms.declaring import Mechanism
from rankscope.experiments.mechanisms.other_rows import HYBRID, RECURRENT, SPARSE
from rankscope.experiments.mechanisms.softmax_rows import SOFTMAX

MECHANISMS: Mapping[str, Mechanism] = MappingProxyType(
    {entry.name: entry for entry in (*SOFTMAX, *SPARSE, *RECURRENT, *HYBRID)}
)
IN_SMALL = ("bert", "gpt2", "sinks", "fourier", "mamba2")
