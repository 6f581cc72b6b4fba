"""What measuring costs in memory: peak against the bare forward, and resident memory over many passes.

Each figure comes from a process of its own, since a peak never goes down again::

    python -m benchmarks.memory --passes 200
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import psutil
import torch
import transformers

from benchmarks.overhead import bert_base, rankscope_pass
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS
from rankscope.stream.viewing import view_of

MIB = 2**20


def child(kind: str, passes: int, sequences: int, tokens: int) -> dict[str, list[float] | float]:
    """Resident memory after each pass and the peak of the process, in MiB."""
    with torch.no_grad():
        model, batch = bert_base(sequences, tokens)
        view = view_of(model, batch)
        everything = (*DEFAULT_TOKEN_METRICS, *DEFAULT_ATTENTION_METRICS)
        measured = rankscope_pass(view, batch, everything, ("block.out", "attention.probs"))
        run = measured if kind == "measured" else (lambda: batch.run(model))
        resident = []
        for _ in range(passes):
            run()
            resident.append(psutil.Process().memory_info().rss / MIB)
    return {"resident": resident, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--child", choices=("bare", "measured"))
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.passes, args.sequences, args.tokens)))
        return
    found = {}
    for kind, passes in (("bare", 5), ("measured", args.passes)):
        words = ["--child", kind, "--passes", str(passes), "--sequences", str(args.sequences)]
        command = [sys.executable, "-m", "benchmarks.memory", *words, "--tokens", str(args.tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    resident = found["measured"]["resident"]
    settled = resident[len(resident) // 10 :]
    middle = sorted(settled)[len(settled) // 2]
    print(f"BERT-base, {args.sequences} x {args.tokens} tokens, torch {torch.__version__}, ", end="")
    print(f"transformers {transformers.__version__}")
    print(f"peak, bare forward           {found['bare']['peak']:8.0f} MiB")
    ratio = found["measured"]["peak"] / found["bare"]["peak"]
    print(f"peak, battery + attention    {found['measured']['peak']:8.0f} MiB   {ratio:5.3f} x bare")
    spread = max(abs(value - middle) for value in settled) / middle
    drift = (settled[-1] - settled[0]) / middle
    print(f"resident over {len(resident)} passes     {middle:8.0f} MiB   spread {spread:.2%}, drift {drift:+.2%}")


if __name__ == "__main__":
    main()
