"""Measure a randomly initialised BERT twin, print the table and the verdict, save the numbers and a figure.

    python examples/first_look.py

Needs no network: ``init:NAME`` builds a known architecture with fresh weights. Give a hub name or a local folder
instead to look at trained weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rankscope as rs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="init:tiny-bert", help="init:NAME, a hub name or a local folder")
    parser.add_argument("--out", type=Path, default=Path("first_look"), help="folder for the result and the figure")
    arguments = parser.parse_args()
    folder = arguments.out / "first_look"

    run = rs.measure(arguments.model, rs.Inputs(sequences=4, tokens=32))
    print(run)
    run.save(folder)
    run.plot().savefig(folder / "first_look.png", dpi=150)

    again = rs.load_run(folder)
    print(f"saved to {folder}: {len(again.to_frame())} values")


if __name__ == "__main__":
    main()
