"""Draw the confusion matrix of verdicts over stacks whose state is known by construction, and over real models.

``python scripts/verdict_matrix.py`` writes ``docs/data/verdicts.json`` and ``docs/data/verdicts.inc`` (a table). The
kinds of stacks and their labels are declared in ``tests/verdicts/corpus.py``. Real models are run whole and as
attention alone; pretrained weights are those of ``scripts/fetch_pretrained.py`` and left out, by name, if they were
not fetched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import rankscope as rs
from rankscope.models.pretrained import PRETRAINED, pretrained_folder
from rankscope.verdicts.states import State

ROOT = Path(__file__).resolve().parents[1]
DATA, TABLE = ROOT / "docs" / "data" / "verdicts.json", ROOT / "docs" / "data" / "verdicts.inc"
COLLAPSE = [state.code for state in (State.COLLAPSING, State.FLOOR, State.COLLAPSED, State.VANISHED)]
APART = [state.code for state in State if State.UNKNOWN < state < State.CLUSTERS]
PRESETS = ("bert-base", "albert-base", "gpt2", "opt-125m", "smollm2-135m", "vit-base")
CUTS: dict[str, dict[str, Any]] = {"whole": {}, "attention alone": {"skip": 0.0, "mlp": "drop"}}


def synthetic(seeds: range) -> Iterator[dict[str, Any]]:
    """One line of the matrix for each kind of stack."""
    sys.path.insert(0, str(ROOT))
    from tests.verdicts.corpus import KINDS, verdicts_of

    for kind in KINDS.values():
        found = Counter(verdict.code for verdict in verdicts_of(kind, seeds))
        print(kind.name, dict(found), flush=True)
        yield line(kind.name, kind.words, [kind.label], found)


def real(seeds: range) -> Iterator[dict[str, Any]]:
    """Whole models, labelled apart, and their attention alone, labelled collapse; several texts or seeds of each."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    for cut, operation in CUTS.items():
        label, words = (COLLAPSE, "without skips and MLPs") if operation else (APART, "whole")
        for origin, runs in (("initialised", initialised(seeds)), ("pretrained", pretrained(seeds, texts))):
            found: Counter[str] = Counter()
            by_model: dict[str, list[str]] = {}
            for name, loaded, inputs in runs:
                with rs.operate(loaded, rs.Surgery(**operation)) if operation else torch.no_grad():
                    run = rs.measure(loaded, rs.Inputs(inputs, sequences=2, tokens=64))
                found[str(run.code)] += 1
                by_model.setdefault(name, []).append(str(run.code))
                print(cut, name, run.code, run.curve("relative_residual", "block.out").mean[-1], flush=True)
            yield {**line(f"{origin}, {cut}", f"{origin} models, {words}", label, found), "models": by_model}


def initialised(seeds: range) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Presets at random weights, one per seed."""
    for name in PRESETS:
        for seed in seeds:
            yield name, rs.load(f"init:{name}", seed=seed).model, None


def pretrained(seeds: range, texts: list[str]) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """The fetched models, each on several texts."""
    for name in PRETRAINED:
        if not pretrained_folder(name).exists():
            print(f"{name} was not fetched and is left out.")
            continue
        loaded = rs.load(str(pretrained_folder(name))).loaded
        for seed in seeds:
            own = list(PRETRAINED[name].texts)
            chosen = own[seed % len(own)] if own else texts[seed % len(texts)][: 40 * 64]
            ids = loaded.tokenizer([chosen], return_tensors="pt", truncation=True, max_length=64)["input_ids"]
            yield name, loaded.model, {"input_ids": ids}


def line(name: str, words: str, right: list[str], found: Counter[str]) -> dict[str, Any]:
    """One kind: what is right and what was said."""
    total = sum(found.values())
    return {"kind": name, "words": words, "right": right, "total": total,
            "agree": sum(found[code] for code in right), "said": dict(found.most_common())}  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """The matrix as text: one row per kind, every code that was said with its count."""
    rows = [
        f"{record['stacks']} stacks of {len(record['lines'])} kinds, drawn on {record['date']} with "
        f"`{record['command']}`: {record['agree']} ({record['agree'] / record['stacks']:.1%}) verdicts name the state "
        "the stack was built with.",
        "",
        "| stacks | built as | right | verdict named |",
        "|---|---|---|---|",
    ]
    for item in record["lines"]:
        right = item["right"][0] if len(item["right"]) == 1 else "not collapsed" if "healthy" in item["right"] else (
            "collapsed, collapsing or at the floor")  # fmt: skip
        said = ", ".join(f"{code} {count}" for code, count in item["said"].items())
        rows.append(f"| {item['total']} | {item['words']} | {right} | {said} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Draw both parts and write the record."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--first", type=int, default=1000, help="first seed; the tests use seeds below 1000")
    options.add_argument("--each", type=int, default=80, help="stacks of each kind; 0 for none")
    options.add_argument("--real", type=int, default=4, help="runs of each real model and cut; 0 for none")
    given = options.parse_args()
    torch.set_num_threads(1)
    lines = [*synthetic(range(given.first, given.first + given.each))] if given.each else []
    lines += [*real(range(given.first, given.first + given.real))] if given.real else []
    record = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": f"python scripts/verdict_matrix.py --first {given.first} --each {given.each} --real {given.real}",
        "stacks": sum(item["total"] for item in lines),
        "agree": sum(item["agree"] for item in lines),
        "lines": lines,
    }
    DATA.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(table(record), encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
