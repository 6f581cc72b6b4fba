"""Every mechanism by its name, in the order of the table, and the few that a small run takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rankscope.papers.mechanisms.declaring import Mechanism
from rankscope.papers.mechanisms.other_rows import HYBRID, RECURRENT, SPARSE
from rankscope.papers.mechanisms.softmax_rows import SOFTMAX

MECHANISMS: Mapping[str, Mechanism] = MappingProxyType(
    {entry.name: entry for entry in (*SOFTMAX, *SPARSE, *RECURRENT, *HYBRID)}
)
IN_SMALL = ("bert", "gpt2", "sinks", "fourier", "mamba2")
