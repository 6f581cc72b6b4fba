"""Every sentence a verdict can print is in one table, and short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rankscope.verdicts
from rankscope.verdicts.sentences import SENTENCES
from rankscope.verdicts.states import State

FACTS = {
    "where": "in 3 of 8 sequences, in blocks 0-2, 5 and 3 more spans",
    "items": "12 inputs",
    "values": "Centred effective rank 1.2, centred energy rank 99 2.5",
    "metric": "Relative composite residual",
    "states": "one huge token, one huge channel, few directions, copies of one token",
    "whose": "The other 5 sequences",
    "state": "collapsing by a factor of 0.50 per block, below 0.03 at block 12",
    "name": "Cross-attention of the decoder",
    "kind": "one-hot",
    "heads": "62 of 96 heads (in blocks 1, 4 and 14 more)",
    "axes": "tokens and inputs",
    "rest": ", not experts or attention",
    "why": "4 different inputs are too few (at least 8)",
    "pooling": " (decoder, mean)",
    "floor": "the float floor 4.8e-7",
}
"""Long examples of what is filled in; a number otherwise."""


def printed(template: str) -> str:
    """The sentence with these facts."""
    return template.format(**{name: FACTS.get(name, "12") for name in re.findall(r"{(\w+)}", template)})


def test_there_are_at_most_forty() -> None:
    assert len(SENTENCES) <= 40
    states = {state.code for state in State} - {"not finite"}
    assert states <= set(SENTENCES)


@pytest.mark.parametrize("key", SENTENCES)
def test_each_has_at_most_25_words(key: str) -> None:
    for sentence in printed(SENTENCES[key]).removesuffix(".").split(". "):
        assert len(sentence.split()) <= 25, sentence


def test_each_is_used_and_none_is_written_elsewhere() -> None:
    folder = Path(rankscope.verdicts.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    used = set(re.findall(r'say\(\s*"([^"]+)"', source)) | {state.code for state in State}
    assert set(SENTENCES) - used <= {"streams", "equal streams", "one token", "unknown"}
