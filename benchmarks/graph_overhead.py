"""What reading norms in every step costs a compiled training: with and without a gauge, taking turns.

Run ``python -m benchmarks.graph_overhead`` (8 layers, width 512, inductor on the processor; compiling takes minutes),
``--width 64 --layers 2`` to try it. Both trainings advance one step each in turn; CPU time, medians of paired ratios.
Losses must be equal to the last bit. ``--out`` writes the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo

from rankscope.monitor import Gauge

WARM_UP = 2


def training(width: int, layers: int, batches: torch.Tensor, backend: str, *, watched: bool) -> Callable[[int], float]:
    """A function that takes one training step and returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=512, num_attention_heads=8, num_key_value_heads=8, use_cache=False, **shape)
    model = LlamaForCausalLM(config).train()
    gauge = None
    if watched:
        gauge = Gauge(model, {"input_ids": batches[0][:2]}, where="graph", schedule=1, alarms=(), strict=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> float:
        batch = batches[number % len(batches)]
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if gauge is not None and gauge.step(number) is None:
            raise RuntimeError("the step was not read")
        return float(loss.detach())

    return step


def main() -> None:
    """Take turns, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs=2, default=(8, 128), metavar=("SEQUENCES", "TOKENS"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    # Two models of one class live in this process: without these guards the second would run the code of the first.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch.set_num_threads(1)
    ids = torch.randint(0, 512, (4, *given.batch), generator=torch.Generator().manual_seed(1))
    kinds = {
        name: training(given.width, given.layers, ids, given.backend, watched=name == "watched") for name in _KINDS
    }
    seconds: dict[str, list[float]] = {name: [] for name in _KINDS}
    losses: dict[str, list[float]] = {name: [] for name in _KINDS}
    for number in range(given.steps + WARM_UP):
        for name in _KINDS if number % 2 else reversed(_KINDS):
            started = time.process_time()
            losses[name].append(kinds[name](number))
            seconds[name].append(time.process_time() - started)
    timed = {name: values[WARM_UP:] for name, values in seconds.items()}
    found = {
        **{key: value for key, value in vars(given).items() if key != "out"},
        "bare_seconds": statistics.median(timed["bare"]),
        "ratio": statistics.median(w / b for w, b in zip(timed["watched"], timed["bare"], strict=True)),
        "losses_equal": losses["bare"] == losses["watched"],
        "torch": torch.__version__,
    }
    print(json.dumps(found, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")


_KINDS = ("bare", "watched")

if __name__ == "__main__":
    main()
