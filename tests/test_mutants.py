"""The tables about mutants are those of the record, and no survivor is left without a word."""

from __future__ import annotations

import json

from scripts.write_mutants import ALIVE, FIGURES, TABLE, written

FACTS = json.loads(FIGURES.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_record() -> None:
    assert TABLE.read_text(encoding="utf-8") == written(FACTS)


def test_every_survivor_is_judged() -> None:
    assert all(one["judged"] for one in FACTS["tried"] if one["first"] in ALIVE)
    assert all(one["judged"].startswith("equivalent: ") for one in FACTS["tried"] if one["outcome"] in ALIVE)
