"""Small vocabulary shared by every layer; no torch here."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """What a value is worth.

    Means hold values that are ``OK``, ``FLOOR`` or ``ESTIMATE`` and are marked if one is not ``OK``; verdicts count the
    others.
    """

    OK = "ok"
    FLOOR = "at the float floor"
    UNDEFINED = "undefined"
    NOT_FINITE = "not finite"
    NOT_FIRED = "not fired"
    ESTIMATE = "estimated"

    def __str__(self) -> str:
        return self.value
