"""What is claimed of the structure of a model, with the evidence; results record it, so torch is not imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Claim:
    """One statement about the structure of a model.

    Attributes:
        about: what kind of statement it is.
        stack: the stack it is about; None if there is one.
        says: the statement.
        proven_by: the experiment or the fact it rests on; None if it is an assumption.
    """

    about: Literal["blocks", "axes", "skips", "roles", "causality"]
    stack: str | None
    says: str
    proven_by: str | None
