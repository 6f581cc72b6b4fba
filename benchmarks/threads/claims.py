"""What the doctor claims of models that are not known to be faulty: all families at initialisation, trained models.

``python -m benchmarks.threads.claims --write`` records every claim in ``docs/data/doctor_claims.json`` and the table of
the docs. Each model runs on six sequences of random tokens, so that all causes can be looked for, or on two sequences
of the sample text if it does not read token ids alone; trained models run on both. Trained models are those of ``./dev
fetch``. ``--lines FILE`` appends each model to a file as soon as it is done, and leaves out those that it has.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch

import rankscope as rs
from rankscope.errors import RankscopeError
from tests.tiny_presets import TINY_PRESETS

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "data" / "doctor_claims.json"
TABLE = ROOT / "docs" / "data" / "doctor_claims.inc"
TRAINED = ("minilm", "smollm2-135m", "reaction-albert", "reaction-bert", "reaction-bert-ft", "reaction-bert-ft-10k",
           "antiberty")  # fmt: skip


def specs(kind: str) -> dict[str, str]:
    """Names and specs of the models of one kind."""
    if kind == "families":
        return {name: f"init:{name}" for name in TINY_PRESETS}
    held = {name: Path.home() / ".cache" / "rankscope" / name for name in TRAINED}
    return {name: str(folder) for name, folder in held.items() if folder.is_dir()}


def batches(spec: str) -> dict[str, Any]:
    """What a model is run on."""
    text: dict[str, Any] = {"two sequences of text": None}
    config = rs.Model(spec).loaded.config
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or getattr(config, "is_encoder_decoder", False):
        return text
    drawn = torch.randint(5, size, (6, 20), generator=torch.Generator().manual_seed(0))
    tokens = {"six sequences of random tokens": rs.Inputs(drawn, axes="batch tokens")}
    return tokens if spec.startswith("init:") else text | tokens


def claims(spec: str) -> list[dict[str, Any]]:
    """Every finding about one model, by what it was run on."""
    rows: list[dict[str, Any]] = []
    for words, inputs in batches(spec).items():
        start = time.perf_counter()
        try:
            report = rs.doctor(spec, inputs)
        except (RankscopeError, RuntimeError, IndexError, ValueError, TypeError):
            if inputs is None:
                raise
            words, report = "two sequences of text", rs.doctor(spec)  # it reads more than token ids
        found = [
            {"code": one.code, "kind": one.kind, "certainty": one.certainty, "sentence": one.sentence,
             "evidence": one.evidence}
            for one in report.findings
        ]  # fmt: skip
        failed = {
            code: why
            for code, why in report.not_examined.items()
            if not why.startswith("needs") and why != "an earlier fault would explain it"
        }
        rows.append(
            {"inputs": words, "found": found, "failed": failed, "passes": list(report.passes),
             "seconds": round(time.perf_counter() - start, 1)}
        )  # fmt: skip
    return rows


def counts(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """How many models there are, and of how many something is claimed."""
    found = {
        name: {(one["kind"], one["certainty"], one["code"]) for run in runs for one in run["found"]}
        for name, runs in rows.items()
    }
    by_code = Counter(key for keys in found.values() for key in keys)
    return {
        "models": len(rows),
        "with a fault shown": sum(any(key[:2] == ("fault", "shown") for key in keys) for keys in found.values()),
        "with a possible fault": sum(any(key[:2] == ("fault", "possible") for key in keys) for keys in found.values()),
        "by code": {" ".join(key): count for key, count in sorted(by_code.items())},
    }


def table(record: dict[str, Any]) -> str:
    """The counts in Markdown."""
    lines = ["| models | finding | how | number |", "|---|---|---|---:|"]
    for kind, words in (("families", "families at initialisation"), ("trained", "trained models")):
        told = record[kind]["counts"]
        total = f"{words} ({told['models']})"
        lines.append(f"| {total} | nothing wrong | | {told['models'] - told['with a fault shown']} |")
        for key, count in told["by code"].items():
            sort, certainty, code = key.split(" ")
            lines.append(f"| {total} | `{code}` | {certainty if sort == 'fault' else sort} | {count} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Ask about the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--lines", type=Path, default=Path("doctor_claims.jsonl"))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {"date": date.today().isoformat()}
    for kind in ("families", "trained"):
        for name, spec in specs(kind).items():
            if (given.names and name not in given.names) or name in known(given.lines):
                continue
            rows = claims(spec)
            with given.lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: rows}) + "\n")
            told = [f"{o['code']}({o['certainty']},{o['kind']})" for run in rows for o in run["found"]]
            trouble = [run["failed"] for run in rows if run["failed"]]
            print(name, told, *([run["passes"], run["seconds"]] for run in rows), trouble or "", flush=True)
        rows = {name: known(given.lines)[name] for name in specs(kind) if name in known(given.lines)}
        record[kind] = {"counts": counts(rows), "models": rows}
        print(json.dumps(record[kind]["counts"], indent=1), flush=True)
    if given.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        TABLE.write_text(table(record))


def known(lines: Path) -> dict[str, list[dict[str, Any]]]:
    """What was found out before."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
        found |= json.loads(line)
    return found


if __name__ == "__main__":
    main()
