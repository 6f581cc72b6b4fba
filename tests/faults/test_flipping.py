"""A flipped bit never becomes a number, and a killed writer leaves the old or the new."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.flipping import KINDS, Kind, flips
from tests.faults.killing import WRITERS, Writer, kills

FLIPS = 8
"""For each kind, 104 in all."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_flipped_bit_is_noticed(kind: Kind, tmp_path: Path) -> None:
    found = flips(kind, FLIPS, tmp_path)
    assert found == {"same" if kind.mends else "refused": FLIPS}


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)
def test_a_killed_writer_leaves_what_can_be_read(writer: Writer, tmp_path: Path) -> None:
    assert kills(writer, 3, tmp_path).total() == 3
