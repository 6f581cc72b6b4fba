"""What the doctor claims of models that are not known to be faulty: all families at initialisation, trained models.

``python -m benchmarks.exam.families`` writes the table of the docs. Each model runs on six sequences of random tokens,
so that all causes can be looked for, or on two sequences of the sample text if it does not read token ids alone.
Trained models are those of ``./dev fetch``, and run on both.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import rankscope as rs
from rankscope.errors import RankscopeError
from tests.tiny_presets import TINY_PRESETS

TABLE = Path(__file__).resolve().parents[2] / "docs" / "data" / "doctor_claims.inc"
KINDS = {"families": "families at initialisation", "trained": "trained models"}
TRAINED = ("minilm", "smollm2-135m", "reaction-albert", "reaction-bert", "reaction-bert-ft", "reaction-bert-ft-10k",
           "antiberty")  # fmt: skip


def specs(kind: str) -> dict[str, str]:
    """Names and specs of the models of one kind."""
    if kind == "families":
        return {name: f"init:{name}" for name in TINY_PRESETS}
    held = {name: Path.home() / ".cache" / "rankscope" / name for name in TRAINED}
    return {name: str(folder) for name, folder in held.items() if folder.is_dir()}


def claims(spec: str) -> set[tuple[str, str, str]]:
    """Kind, certainty and code of every finding about one model."""
    config = rs.Model(spec).loaded.config
    size = getattr(config, "vocab_size", None)
    batches: list[Any] = [] if spec.startswith("init:") else [None]  # None is the sample text
    if isinstance(size, int) and not getattr(config, "is_encoder_decoder", False):
        drawn = torch.randint(5, size, (6, 20), generator=torch.Generator().manual_seed(0))
        batches.append(rs.Inputs(drawn, axes="batch tokens"))
    found: set[tuple[str, str, str]] = set()
    for inputs in batches or [None]:
        try:
            report = rs.doctor(spec, inputs)
        except (RankscopeError, RuntimeError, IndexError, ValueError, TypeError):
            if inputs is None:
                raise
            report = rs.doctor(spec)  # it reads more than token ids
        found |= {(one.kind, one.certainty, one.code) for one in report.findings}
    return found


def rows(words: str, found: list[set[tuple[str, str, str]]]) -> list[str]:
    """The counts of one kind of models in Markdown."""
    total = f"{words} ({len(found)})"
    fine = sum(not any(one[:2] == ("fault", "shown") for one in claimed) for claimed in found)
    counts = Counter(one for claimed in found for one in claimed)
    return [f"| {total} | nothing wrong | | {fine} |"] + [
        f"| {total} | `{code}` | {certainty if kind == 'fault' else kind} | {count} |"
        for (kind, certainty, code), count in sorted(counts.items())
    ]


def main() -> None:
    """Ask about the models that are named, or about all and write the table."""
    warnings.simplefilter("ignore")
    lines = ["| models | finding | how | number |", "|---|---|---|---:|"]
    for kind, words in KINDS.items():
        found = []
        for name, spec in specs(kind).items():
            if sys.argv[1:] and name not in sys.argv[1:]:
                continue
            found.append(claims(spec))
            print(name, *found[-1], flush=True)
        lines += rows(words, found)
    if not sys.argv[1:]:
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
