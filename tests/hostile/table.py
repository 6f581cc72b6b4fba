"""The table network x verb, printed: ``python -m tests.hostile.table``."""

from __future__ import annotations

import sys

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


def main() -> None:
    torch.manual_seed(0)
    wanted = sys.argv[1:]
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
