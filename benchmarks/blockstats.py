"""What block statistics cost: ``python -m benchmarks.blockstats [--layers 4] [--rounds 40] [--threads 1]``.

Steps of a BERT-base encoder are interleaved: bare, with every step counted, and attached while counting is off. Printed
are the medians of their ratios to the bare step beside them, kernels per block, and estimates for an accelerator.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope import blockstats

VIEWS = ("view", "reshape", "unflatten", "unsqueeze", "squeeze", "select", "as_strided", "expand", "promote_types")
PEAK, BANDWIDTH = 989e12, 3.35e12  # of an H100: operations in bfloat16 and bytes per second
USED, MOVED = 0.4, 0.8  # the shares of both that are assumed to be reached
TOKENS = 8192


class Kernels(TorchDispatchMode):
    """Counts operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(view in str(operator) for view in VIEWS):
            self.names[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def step_times(layers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, by kind."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, layers)
    x = torch.randn(8, 128, 768)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> float:
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step()
    seconds: dict[str, list[float]] = {"bare": [], "counted": [], "off": []}
    for _ in range(rounds):
        for kind, own in seconds.items():
            stats = None if kind == "bare" else blockstats.attach(model.layers, 768)
            if stats is not None:
                stats.count(kind == "counted")
            own.append(step())
            if stats is not None:
                stats.detach()
    return seconds


def kernels(dtype: torch.dtype) -> int:
    """Kernels of one block: the operator is one call, eager or in a compiled graph, and launches these."""
    x = torch.randn(2, 16, 32).to(dtype)
    stats = blockstats.attach([nn.Identity()], 32)
    stats.count()
    tap = stats.taps[0]
    with Kernels() as seen, torch.no_grad():
        blockstats._add._init_fn(x, x, None, tap.totals, tap.largest, tap.gate, 0)
    return sum(seen.names.values())


def estimates(width: int) -> str:
    """Work and bytes as a share of those of the block, forward and backward in bfloat16, and of its time."""
    block_work = 72 * width**2 * TOKENS + 6 * TOKENS**2 * width
    work = 10 * width * TOKENS
    block_bytes = 72 * width**2 + 102 * TOKENS * width  # weights in three passes, 17 activations in three passes
    moved = 34 * TOKENS * width  # two differences in float32, five reductions
    share = (moved / BANDWIDTH / MOVED) / (block_work / PEAK / USED)
    shares = f"{work / block_work:.1e} of the work, {moved / block_bytes:.0%} of the bytes"
    return f"{shares}, {share:.2%} of the time (estimate)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = step_times(options.layers, options.rounds)
    medians = {}
    for kind, own in seconds.items():
        ratios = [one / bare for one, bare in zip(own, seconds["bare"], strict=True)]
        medians[kind] = statistics.median(ratios)
        print(f"{kind}: {1e3 * statistics.median(own):.1f} ms, {medians[kind]:.4f} of the bare step beside it")
    print(f"every tenth step counted: {0.1 * medians['counted'] + 0.9 * medians['off']:.4f}")
    print(f"kernels per block: {kernels(torch.float32)} in float32, {kernels(torch.bfloat16)} in bfloat16")
    for width in (768, 4096, 8192):
        print(f"width {width}: {estimates(width)}")


if __name__ == "__main__":
    main()
