"""The result of ``doctor``: a list of checks, each with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rankscope._printing import shortened
from rankscope.runs.claims import Claim
from rankscope.runs.presenting import document_of
from rankscope.views.notebook import document_html
from rankscope.views.text import document_text

if TYPE_CHECKING:  # printing needs no torch
    from rankscope.examination.findings import Finding

SCHEMA = 1
"""Version of what ``doctor --json`` prints. A field that is added keeps it; one that is renamed or goes raises it."""
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
    """What is wrong with a model, and whether rankscope can be trusted on it.

    Args:
        model: the spec, or the class of a module in memory.
        architecture: class name of the model.
        stacks: the residual stacks found; may be empty.
        checks: in the order in which they ran.
        claims: what is claimed about its structure, and what each claim rests on.
        findings: what is found of the inputs, faults that are shown, then possible ones, then notes and what looks like
            a fault and is harmless.
        not_examined: causes that were not looked for, and why.
        passes: forward and backward passes of the checks, the examination and its experiments.
        structure_passes: forward passes that found the structure before; 0 if it was remembered.
        details: whether to print all checks and claims.
    """

    model: str
    architecture: str
    stacks: tuple[StackFacts, ...]
    checks: tuple[Check, ...]
    claims: tuple[Claim, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_examined: Mapping[str, str] = field(default_factory=dict)
    passes: tuple[int, int] = (0, 0)
    structure_passes: int = 0
    details: bool = False

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What is wrong, shown before possible."""
        return tuple(one for one in self.findings if one.kind == "fault")

    @property
    def trusted(self) -> bool:
        """Whether no check of rankscope's own numbers failed. A refusal does not count as a failure."""
        return not any(check.status == "fail" for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether no check failed and no fault was shown."""
        return self.trusted and not any(one.certainty == "shown" for one in self.faults)

    @property
    def answer(self) -> str:
        """What is wrong and what to do, or that nothing was found, in one line."""
        if self.faults:
            first = self.faults[0]
            possible = "Possibly: " if first.certainty == "possible" else ""
            return f"{possible}{first.sentence}"
        if not self.trusted:
            return "The numbers cannot be trusted on this model."
        return "Nothing wrong was found."

    @property
    def brief(self) -> str:
        """The answer with what to change or to look at, then the checks that failed, one per line."""
        lines = [self.answer] if self.faults else []
        if self.faults and self.faults[0].change:
            lines.append(f"{'Change' if self.faults[0].tried else 'Hint'}: {self.faults[0].change}")
        failed = [f"{check.name}: {check.detail}" for check in self.checks if check.status == "fail"]
        return "\n".join([*lines, *failed])

    @property
    def source(self) -> None:
        """It is not read from a file."""

    @property
    def kind(self) -> str:
        """The verb."""
        return "doctor"

    def __getitem__(self, name: str) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        shown = {name: value for name, value in vars(self).items() if name not in ("findings", "details")}
        plain = {
            **shown,
            "stacks": [asdict(stack) for stack in self.stacks],
            "checks": [asdict(check) for check in self.checks],
            "claims": [asdict(claim) for claim in self.claims],
            "not_examined": dict(self.not_examined),
            "passes": list(self.passes),
        }
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "answer": self.answer,
            "codes": [one.code for one in self.faults],
            "findings": [one.to_json() for one in self.findings],
            **plain,
            "passed": self.passed,
        }

    def __repr__(self) -> str:
        return shortened(f"<DoctorReport of {self.model}: {self.answer}>")

    def __str__(self) -> str:
        return document_text(document_of(self))

    def _repr_html_(self) -> str:
        return document_html(document_of(self))
