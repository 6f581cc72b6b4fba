"""Every verb that takes a device, on it and on the processor: are the values the same?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rankscope._types import Status
from rankscope.errors import RankscopeError
from rankscope.models.inputs import Inputs
from rankscope.models.model import Model
from rankscope.runs.run import Run
from rankscope.verbs._spec import Verb, verbs_in_order

MODEL = "init:tiny-llama"
ALLOWED = 1e-3
"""Largest relative difference between devices: their float32 products round differently, by about 1e-6 per block."""


@dataclass(frozen=True)
class VerbParity:
    """One verb on a device, compared with the processor.

    Attributes:
        verb: its name.
        values: number of values compared: those above the float floor on both.
        difference: largest relative difference; NaN if the rows do not correspond.
        error: what the device raised; empty if nothing.
    """

    verb: str
    values: int = 0
    difference: float = float("nan")
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the values agree."""
        return not self.error and self.difference <= ALLOWED

    def to_json(self) -> dict[str, Any]:
        """All fields, and whether the values agree."""
        return {**vars(self), "passed": self.passed}


def verbs_on(device: torch.device) -> tuple[VerbParity, ...]:
    """Run every verb that makes runs and takes a device."""
    return tuple(_compared(verb, device) for verb in verbs_in_order() if verb.makes_runs and verb.takes("device"))


def _compared(verb: Verb, device: torch.device) -> VerbParity:
    here = _run(verb, torch.device("cpu"))
    try:
        there = _run(verb, device)
    except (RankscopeError, RuntimeError, TypeError, NotImplementedError) as error:
        return VerbParity(verb.name, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.200}")
    return VerbParity(verb.name, *_difference(here, there))


def _run(verb: Verb, device: torch.device) -> Run:
    run: Run = verb.run()(Model(MODEL, device=device), Inputs(sequences=1, tokens=16))
    return run


def _difference(here: Run, there: Run) -> tuple[int, float]:
    if here.table.num_rows != there.table.num_rows:
        return 0, float("nan")
    a, b = (np.asarray(run.table["value"].to_pylist(), dtype=float) for run in (here, there))
    ok = [np.asarray(run.table["status"].to_pylist()) == str(Status.OK) for run in (here, there)]
    known = ok[0] & ok[1] & np.isfinite(a) & np.isfinite(b)
    # Statuses may differ only for a value next to its threshold.
    if not known.any() or float((ok[0] != ok[1]).mean()) > ALLOWED:
        return int(known.sum()), float("nan")
    a, b = a[known], b[known]
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(float).tiny)
    return len(a), float((np.abs(a - b) / size).max())
