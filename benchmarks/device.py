"""What measuring costs on a device: ratios to the bare forward pass, and counts if the device counts.

Prints a short text to paste into a bug report. Rounds are interleaved in one process; ratios are of medians, of
processor time on ``cpu`` and ``sim``, of wall time after a synchronisation elsewhere. Run it with::

    rankscope selftest --device cuda                       # first: are the values right?
    python -m benchmarks.device --device cuda --dtype bfloat16
    python -m benchmarks.device --device sim               # the simulated device of the tests: counts, not speed
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import rankscope as rs
from rankscope.linalg.precision import has_float64
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS, NORM_METRICS

CONTESTANTS = {
    "norm metrics": {"metrics": list(NORM_METRICS), "sites": ["block.out"]},
    "token metrics": {"metrics": list(DEFAULT_TOKEN_METRICS), "sites": ["block.out"]},
    "attention metrics": {"metrics": list(DEFAULT_ATTENTION_METRICS)},
    "measure": {},
}


def llama(layers: int, width: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        vocab_size=1000,
    )
    return transformers.LlamaModel(config).eval().to(device, dtype)


def clock(device: torch.device) -> float:
    if device.type in ("cpu", "sim"):
        return time.process_time()
    torch.get_device_module(device).synchronize()
    return time.perf_counter()


def contestants(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    inputs = {"input_ids": ids}

    def bare() -> object:
        with torch.no_grad():
            return model(**inputs)

    found: dict[str, Callable[[], object]] = {"bare forward": bare}
    for name, options in CONTESTANTS.items():
        found[name] = lambda options=options: rs.measure(model, inputs, **options)
    return found


def times(device: torch.device, runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            started = clock(device)
            run()
            if number:  # the first round warms up
                taken[name].append(clock(device) - started)
    return {name: statistics.median(values) for name, values in taken.items()}


def counts_per_block(device: torch.device, dtype: torch.dtype, width: int, ids: torch.Tensor) -> dict[str, list[float]]:
    """Kernels, copies and synchronisations of one more block, from models of two and four blocks."""
    from tests.device.simulated import simulated_device

    counter = simulated_device()
    found: dict[str, list[float]] = {}
    per_depth = []
    for layers in (2, 4):
        runs = contestants(llama(layers, width, device, dtype), ids)
        seen = {}
        for name, run in runs.items():
            run()
            counter.reset()
            run()
            counts = counter.counts()
            seen[name] = (counts.kernels, counts.copies, counts.synchronisations)
        per_depth.append(seen)
    for name, shallow in per_depth[0].items():
        found[name] = [(b - a) / 2 for a, b in zip(shallow, per_depth[1][name], strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.device.startswith("sim"):
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.device.simulated import simulated_device

        simulated_device()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    ids = torch.randint(0, 1000, (args.sequences, args.tokens), generator=torch.Generator().manual_seed(0)).to(device)
    runs = contestants(llama(args.layers, args.width, device, dtype), ids)
    found = times(device, runs, args.rounds)
    named = getattr(torch.get_device_module(device), "get_device_name", lambda _: "no name")
    print(f"device {device} ({named(device)}), {'has' if has_float64(device) else 'no'} float64")
    print(f"rankscope {rs.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(
        f"Llama, {args.layers} blocks, width {args.width}, {args.dtype}, {args.sequences} x {args.tokens} tokens; "
        f"median of {args.rounds} rounds"
    )
    per_block = counts_per_block(device, dtype, args.width, ids) if device.type == "sim" else {}
    for name, seconds in found.items():
        counts = per_block.get(name)
        counted = (
            "" if counts is None else "   per block: {:g} kernels, {:g} copies, {:g} synchronisations".format(*counts)
        )
        print(f"{name:18s} {seconds * 1e3:9.1f} ms  {seconds / found['bare forward']:6.2f} x forward{counted}")


if __name__ == "__main__":
    main()
