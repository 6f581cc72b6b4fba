"""What reading norms in every step costs a compiled training: with and without a gauge, taking turns.

Run ``python -m benchmarks.graph_overhead`` (8 layers, width 512, inductor on the processor; compiling takes minutes),
``--width 64 --layers 2 --out tiny.json`` to try it. Both trainings advance one step each in turn; CPU time, medians of
paired ratios. Losses must be equal to the last bit. The times are written to ``docs/data/graph_overhead.json`` after
every step; a second start with the same setting adds the missing steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from rankscope.monitor import Gauge

WARM_UP = 2
KINDS = ("bare", "watched")
RECORD = Path(__file__).parents[1] / "docs" / "data" / "graph_overhead.json"


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


def earlier(path: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """The record of an earlier start with this setting, or an empty one."""
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text())
        if {key: record.get(key) for key in setting} == setting:
            return record
    return {**setting, "losses_equal": True, "seconds": {kind: [] for kind in KINDS}}


def main() -> None:
    """Take turns, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs=2, default=[8, 128], metavar=("SEQUENCES", "TOKENS"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    # Two models of one class live in this process: without these guards the second would run the code of the first.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch.set_num_threads(1)
    setting = {key: value for key, value in vars(given).items() if key not in ("out", "steps")}
    record = earlier(given.out, {**setting, "torch": torch.__version__})
    seconds = record["seconds"]
    missing = given.steps - len(seconds["bare"])
    print(f"{missing} of {given.steps} steps left; compiling comes first and takes 2 to 6 minutes", flush=True)
    ids = torch.randint(0, 512, (4, *given.batch), generator=torch.Generator().manual_seed(1))
    kinds = {kind: training(given.width, given.layers, ids, given.backend, watched=kind == "watched") for kind in KINDS}
    for number in range(missing + WARM_UP if missing > 0 else 0):
        taken, losses = {}, {}
        for kind in KINDS if number % 2 else reversed(KINDS):
            started = time.process_time()
            losses[kind] = kinds[kind](number)
            taken[kind] = time.process_time() - started
        record["losses_equal"] = record["losses_equal"] and losses["bare"] == losses["watched"]
        if number == WARM_UP - 1:
            print(f"compiled; about {missing * sum(taken.values()) / 60:.1f} minutes left", flush=True)
        if number < WARM_UP:
            continue
        for kind in KINDS:
            seconds[kind].append(round(taken[kind], 5))
        ratios = [watched / bare for watched, bare in zip(seconds["watched"], seconds["bare"], strict=True)]
        record.update(
            date=datetime.date.today().isoformat(),
            steps=len(ratios),
            bare_seconds=statistics.median(seconds["bare"]),
            ratio=round(statistics.median(ratios), 5),
        )
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key != "seconds"}, indent=1))


if __name__ == "__main__":
    main()
