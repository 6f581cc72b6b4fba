"""How a verb can be executed, as declared; other modes raise with the reason, which ``--help`` shows too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankscope.errors import InputError

Parallel = Literal["data", "fsdp", "tensor"]
PARALLEL_MODES: tuple[Parallel, ...] = ("data", "fsdp", "tensor")


@dataclass(frozen=True)
class ExecutionSupport:
    """How a verb can be executed other than in memory in one process: for each mode None, or why it cannot.

    Attributes:
        verb: name of the verb.
        no_offload: why the blocks cannot run one at a time.
        no_data: why batches cannot be distributed over ranks.
        no_spread: why the model cannot be sharded over ranks (``"fsdp"``, ``"tensor"``).
        in_float64: whether it computes in float64 throughout, so that a device without float64 cannot run it.

    Example:
        >>> entry = ExecutionSupport("count", no_spread="count reads whole weights")
        >>> entry.parallel_modes
        ('data',)
        >>> entry.check(parallel="fsdp")
        Traceback (most recent call last):
        rankscope.errors.InputError: count does not take parallel='fsdp': count reads whole weights. It takes 'data'.
    """

    verb: str
    no_offload: str | None = None
    no_data: str | None = None
    no_spread: str | None = None
    in_float64: bool = False

    @property
    def parallel_modes(self) -> tuple[Parallel, ...]:
        """The supported values of ``parallel``."""
        return tuple(mode for mode in PARALLEL_MODES if self._reason(mode) is None)

    def check(self, *, offload: bool = False, parallel: Parallel | None = None) -> None:
        """Check that the verb supports this.

        Raises:
            InputError: it does not, for the declared reason.
        """
        if offload and self.no_offload is not None:
            raise InputError(f"{self.verb} does not take offload=True: {self.no_offload}. Leave it out.")
        reason = None if parallel is None else self._reason(parallel)
        if reason is not None:
            modes = " or ".join(map(repr, self.parallel_modes))
            takes = f"It takes {modes}." if modes else "Run it in one process."
            raise InputError(f"{self.verb} does not take parallel={parallel!r}: {reason}. {takes}")

    def _reason(self, mode: Parallel) -> str | None:
        return self.no_data if mode == "data" else self.no_spread


WHOLE_WEIGHTS = "it computes with the weights of whole blocks, but each process would hold a shard of every weight"
"""Why several verbs cannot shard a model."""
