"""Several processes, one gauge: which rank reports, when all take a reading, and what happens if one is missing.

Nothing here is a collective operation (see :mod:`rankscope.execution.rank_store`), so a rank that is late, has no
batch or died cannot block the others.
"""

from __future__ import annotations

import json
from dataclasses import replace

from rankscope.errors import ProcessError
from rankscope.execution.rank_store import RankStore
from rankscope.models.wrapping import in_group
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.readings import LayerValue


class Ranks:
    """This process among the others; alone if ``torch.distributed`` is not initialised.

    Args:
        patience: seconds to wait for other ranks where a forward pass needs them.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._store = RankStore("gauge") if in_group() else None
        self._shared: int | None = None
        self.rank, self.world = (0, 1) if self._store is None else (self._store.rank, self._store.world)

    @property
    def is_first(self) -> bool:
        """Whether this rank logs, records and calls functions."""
        return self.rank == 0

    def announce(self, step: int) -> None:
        """Let every rank read at the first step from this one on."""
        if self._store is not None:
            self._store.write("announced", str(step))

    def announced(self) -> int | None:
        """The step that the first rank announced last."""
        if self._store is None or not self._store.has("announced"):
            return None
        return int(self._store.read("announced"))

    def leave(self) -> None:
        """Tell the others that this rank is done, so that they do not wait for it."""
        if self._store is not None:
            self._store.write("left", str(self.rank))

    def report(self, words: str) -> None:
        """Leave a message for the first rank, replacing the one before."""
        if self._store is None:
            return
        try:
            self._store.write(f"report.{self.rank}", words)
        except RuntimeError:  # the store is gone with the rank that hosted it: there is nobody to inform
            LOGGER.debug("No report of rank %d: the other processes have ended.", self.rank)

    def reports(self) -> dict[int, str]:
        """The last message of each rank; those that left none yet are missing. Does not wait."""
        if self._store is None:
            return {}
        store, keys = self._store, {rank: f"report.{rank}" for rank in range(self.world)}
        try:
            return {rank: store.read(key).decode() for rank, key in keys.items() if store.has(key)}
        except RuntimeError:  # as above
            return {}

    def meet(self, step: int) -> bool:
        """Whether all ranks are here to read this step; the same answer on every rank."""
        return self._store is None or self._store.meet(str(step), patience=self._patience, unless="left")

    def same_as_first(self, step: int, values: tuple[LayerValue, ...]) -> tuple[LayerValue, ...]:
        """The numbers of the first rank on every rank, so that all decide the same.

        Every rank returns or every rank raises: if one raised alone, the others would wait for it in the passes that
        look for a cause.

        Raises:
            ProcessError: a rank has left, did not arrive in time, or read other values than the first.
        """
        if self._store is None:
            return values
        key, before, self._shared = f"values.{step}", self._shared, step
        if self.is_first:
            if before is not None:  # all have met since
                self._store.delete(f"values.{before}")
            self._store.write(key, json.dumps([[row.mean, row.least, row.most] for row in values]))
            self._agree(step)
            return values
        store = self._store
        if not store.wait(lambda: store.has(key) or store.has("left"), self._patience) or not store.has(key):
            raise ProcessError(f"The first of {self.world} processes read nothing at step {step}.")
        first = json.loads(store.read(key))
        if len(first) != len(values):
            raise ProcessError(
                f"Process {self.rank} of {self.world} read {len(values)} values at step {step}, and the first read "
                f"{len(first)}: their models, probes or metrics differ."
            )
        self._agree(step)
        return tuple(
            replace(row, mean=mean, least=least, most=most)
            for row, (mean, least, most) in zip(values, first, strict=True)
        )

    def _agree(self, step: int) -> None:
        assert self._store is not None
        if not self._store.meet(f"{step}.values", patience=self._patience, unless="left"):
            raise ProcessError(
                f"Not all of {self.world} processes read the values of the first at step {step}; one that failed says "
                "why in its log."
            )
