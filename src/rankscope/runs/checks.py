"""The result of ``doctor``: a list of checks, each with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rankscope._deferred import resolve
from rankscope.runs.provenance import SCHEMA
from rankscope.views import Document
from rankscope.views.text import document_text

CheckStatus = Literal["pass", "fail", "refused", "info"]


@dataclass(frozen=True)
class Check:
    """One question and its answer."""

    name: str
    status: CheckStatus
    detail: str


@dataclass(frozen=True)
class StackFacts:
    """Structure of one residual stack, as discovered.

    Args:
        name: ``None`` for the only stack of a model.
        depth: number of block calls.
        blocks: pattern of the block modules' names, such as ``encoder.layer.*``.
        skips: labels of the skip adds of each block.
        attention: attention calls seen in each block.
        layout: order of axes inside the blocks.
        final_norm: name of the norm after the last block, if there is one.
    """

    name: str | None
    depth: int
    blocks: str
    skips: tuple[tuple[str, ...], ...]
    attention: tuple[int, ...]
    layout: str
    final_norm: str | None


@dataclass(frozen=True)
class DoctorReport:
    """Whether rankscope can be trusted on one model.

    Args:
        model: the spec, or the class of a module in memory.
        architecture: class name of the model.
        stacks: the residual stacks found; may be empty.
        checks: in the order in which they ran.
    """

    model: str
    architecture: str
    stacks: tuple[StackFacts, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed. A refusal is reported and does not count as a failure."""
        return not any(check.status == "fail" for check in self.checks)

    @property
    def brief(self) -> str:
        """The checks that failed, one per line."""
        return "\n".join(f"{check.name}: {check.detail}" for check in self.checks if check.status == "fail")

    def __getitem__(self, name: str) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"schema": SCHEMA, "kind": "doctor", **asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        describe: Callable[[DoctorReport], Document] = resolve("verbs.doctor.show:document")
        return document_text(describe(self))
