"""What the battery costs: processor time of one thread for one layer, by group of metrics and by reduction.

Processor time, not wall-clock, and the best of many rounds: both are steady on a machine that does other work too. A
round makes a fresh view, so nothing is shared between rounds; within a group everything is. Run it with::

    python benchmarks/battery.py --rounds 15
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS, METRICS, NORM_METRICS, evaluate

View = Callable[[], Tokens | AttentionMatrix]


def group(names: tuple[str, ...], view: View) -> Callable[[], object]:
    """A group of metrics, as a run takes them."""
    specs = [METRICS[name] for name in names]
    return lambda: evaluate(specs, view(), float_floor(torch.float32))


def after(name: str, *before: str) -> Callable[[Tokens], Callable[[], object]]:
    """One reduction of a view that already has those it is made from."""

    def prepared(view: Tokens) -> Callable[[], object]:
        for earlier in before:
            getattr(view, earlier)
        return lambda: getattr(view, name)

    return prepared


REDUCTIONS = {
    "  norm sums": after("energies"),
    "  Gram matrices": after("kept_grams", "energies", "finite"),
    "  spectrum of X": after("singular_values", "kept_grams"),
    "  spectrum of CX": after("centred_singular_values", "kept_grams"),
    "column ranges": after("column_ranges", "energies"),
    "column medians": after("column_median_deviation", "energies"),
}


def best(prepare: Callable[[], Callable[[], object]], rounds: int) -> float:
    """Least processor time of a round, in milliseconds; what prepares a round is not counted."""
    times = []
    for _ in range(rounds + 1):
        run = prepare()
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times[1:])


def probabilities(sequences: int, heads: int, tokens: int, support: Tensor) -> Tensor:
    scores = 2 * torch.randn(sequences, heads, tokens, tokens)
    return torch.softmax(scores.masked_fill(~support, -torch.inf), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    x = (torch.randn(args.sequences, args.tokens, args.dim) + torch.randn(args.dim)).to(dtype)
    ragged = torch.arange(args.tokens) < torch.linspace(args.tokens / 2, args.tokens, args.sequences).unsqueeze(-1)

    print(f"{args.sequences} x {args.tokens} x {args.dim}, {args.dtype}, torch {torch.__version__}, ", end="")
    print(f"best of {args.rounds}, ms of processor time")
    for title, keep in (("tokens", None), ("tokens, ragged", ragged)):
        for label, names in (("norm metrics", NORM_METRICS), ("token battery", DEFAULT_TOKEN_METRICS)):
            run = group(names, lambda keep=keep: Tokens(x, keep))
            print(f"{f'{label}, {title}':40s} {best(lambda run=run: run, args.rounds):8.2f}")
    for label, prepared in REDUCTIONS.items():
        print(f"{label:40s} {best(lambda prepared=prepared: prepared(Tokens(x)), args.rounds):8.2f}")

    everywhere = torch.ones(args.tokens, args.tokens, dtype=torch.bool)
    for title, support in (("full", everywhere), ("causal", everywhere.tril())):
        P = probabilities(args.sequences, args.heads, args.tokens, support).to(dtype)
        run = group(DEFAULT_ATTENTION_METRICS, lambda P=P, support=support: AttentionMatrix(P, support))
        print(f"{f'attention metrics, {title}':40s} {best(lambda run=run: run, args.rounds):8.2f}")


if __name__ == "__main__":
    main()
