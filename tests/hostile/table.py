"""The table network x verb, printed: ``python -m tests.hostile.table``.

``python -m tests.hostile.table --skips`` writes the table of skip forms for the documentation.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import torch

from tests.hostile.harness import VERBS, Setting, measure_declared, outcome
from tests.hostile.suite import CASES


def cell(name: str, verb: str) -> tuple[str, str]:
    """A word for the table, and what was said."""
    case = CASES[name]
    try:
        if verb == "declared":
            if not case.declared:
                return "", ""
            return "equal", measure_declared(Setting(case, case.model(), case.given()))
        found = outcome(case, verb)
    except Exception as error:  # noqa: BLE001 (a raw exception is a finding like any other)
        return "WRONG", f"{type(error).__name__}: {error}".splitlines()[0]
    if found.kind == "refused" and verb in case.equal:
        return "refused!", found.detail
    return found.kind, found.detail


SKIPS = Path(__file__).parents[2] / "docs" / "data" / "skips.inc"
WORDS = {"equal": "yes", "refused": "refused", "": ""}


def write_skips() -> None:
    """Every form of skip: how its network writes it, whether it is measured, and whether it is scaled, as its twin."""
    lines = ["| network | the skip | measured | scaled |", "|---|---|---|---|"]
    for name, case in CASES.items():
        if case.skips:
            scaled = {cell(name, verb)[0] for verb in ("skip0", "skip05")}
            word = scaled.pop() if len(scaled) == 1 else "WRONG"
            measured = cell(name, "measure")[0]
            if measured == "refused" and case.declared:
                measured = "declared"
            shown = [WORDS.get(found, found) for found in (measured, word)]
            lines.append(f"| {name.replace('_', ' ')} | {written(name)} | {' | '.join(shown)} |")
            print(lines[-1], flush=True)
    SKIPS.write_text("\n".join(lines) + "\n")


def written(name: str) -> str:
    """How a network writes its skip, or its docstring."""
    model = CASES[name].model()
    if CASES[name].skips == "in a block" and "join" in vars(type(model.blocks[0])):
        lines = inspect.getsource(type(model.blocks[0]).join).splitlines()[1:]
        return f"`{'; '.join(line.strip().removeprefix('return ') for line in lines).replace('|', '/')}`"
    owner = type(model) if CASES[name].skips == "between blocks" else type(model.blocks[0])
    return (inspect.getdoc(owner) or "").splitlines()[0].replace("``", "`").rstrip(".")


def main() -> None:
    torch.manual_seed(0)
    wanted = sys.argv[1:]
    if wanted == ["--skips"]:
        write_skips()
        return
    names = [name for name in CASES if not wanted or any(word in name for word in wanted)]
    verbs = [*VERBS, "declared"]
    print("| network |", " | ".join(verbs), "|\n|" + "---|" * (len(verbs) + 1))
    said = []
    for name in names:
        cells = {verb: cell(name, verb) for verb in verbs}
        print(f"| {name} |", " | ".join(word for word, _ in cells.values()), "|", flush=True)
        said += [(name, verb, *found) for verb, found in cells.items() if found[0] in ("WRONG", "refused!")]
    print()
    for name, verb, word, detail in said:
        print(f"- {name} {verb}: {word}: {detail}")


if __name__ == "__main__":
    main()
