"""Every verb that takes a device, on it and on the processor: are the values the same?"""

from __future__ import annotations

import time
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
        time_ratio: seconds on the device over seconds on the processor, for a tiny model.
        error: what the device raised; empty if nothing.
    """

    verb: str
    values: int = 0
    difference: float = float("nan")
    time_ratio: float = float("nan")
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
    _timed(verb, torch.device("cpu"))  # the first call imports modules
    here, seconds_here = _timed(verb, torch.device("cpu"))
    try:
        there, seconds_there = _timed(verb, device)
    except (RankscopeError, RuntimeError, TypeError, NotImplementedError) as error:
        return VerbParity(verb.name, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.200}")
    values, difference = _difference(here, there)
    return VerbParity(verb.name, values, difference, seconds_there / seconds_here)


def _timed(verb: Verb, device: torch.device) -> tuple[Run, float]:
    started = time.perf_counter()
    run: Run = verb.run()(Model(MODEL, device=device), Inputs(sequences=1, tokens=16))
    return run, time.perf_counter() - started


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
