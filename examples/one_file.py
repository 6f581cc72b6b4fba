# /// script
# requires-python = ">=3.10"
# dependencies = ["rankscope[hf,plot]"]
# ///
"""Does my model collapse, and would it without its skips? One file, run with its dependencies by uv or pipx.

uv run examples/one_file.py sentence-transformers/all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rankscope as rs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="init:tiny-bert", help="init:NAME, a hub name or a local folder")
    parser.add_argument("--out", type=Path, default=Path("one_file"), help="folder for the figure")
    arguments = parser.parse_args()

    run = rs.ablate(arguments.model, rs.Inputs(sequences=4, tokens=32))
    print(run)
    arguments.out.mkdir(parents=True, exist_ok=True)
    run.plot().savefig(arguments.out / "ablate.png", dpi=150)


if __name__ == "__main__":
    main()
