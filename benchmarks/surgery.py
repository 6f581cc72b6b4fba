"""What surgery costs: the forward pass with an operation in place, as a ratio to the bare one, interleaved::

python -m benchmarks.surgery --rounds 11
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.overhead import Contestant, bert_base, contest
from rankscope.masks import parse_mask
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation

OPERATIONS = {
    "identity": Operation(),
    "skip gain 0.5": Operation(attention_skip=0.5, mlp_skip=0.5),
    "skips cut": Operation(attention_skip=0.0, mlp_skip=0.0),
    "norms replaced by scaling": Operation(norm="scale"),
    "causal mask": Operation(mask=parse_mask("causal")),
    "temperature 2": Operation(temperature=2.0),
    "attention centred": Operation(attention="centred"),
}


def operated(view: ModelView, batch: Batch, operation: Operation) -> Contestant:
    def run() -> object:
        with operating(view.model, operation, view=view):
            return batch.run(view.model)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    model, batch = bert_base(args.sequences, args.tokens)
    with torch.no_grad():
        view = view_of(model, batch)
        contestants: dict[str, Contestant] = {"bare forward": lambda: batch.run(model)}
        contestants |= {name: operated(view, batch, operation) for name, operation in OPERATIONS.items()}
        times = contest(contestants, args.rounds)
    bare = statistics.median(times["bare forward"])
    print(f"BERT-base, {args.sequences} x {args.tokens} tokens, {args.rounds} rounds, torch {torch.__version__}")
    for name, found in times.items():
        print(f"{name:28} {statistics.median(found) * 1e3:8.0f} ms   {statistics.median(found) / bare:5.3f} x bare")


if __name__ == "__main__":
    main()
