"""Compare 1,000 to 100,000 inputs with each other: memory, and agreement with a computation over all of them at once.

Each size runs in a process of its own, so that its peak memory is its own. Inputs are drawn batch by batch and not
kept. Writes ``docs/data/many_inputs.json``.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

SIZES = (1_000, 10_000, 100_000)
BATCH, TOKENS, WIDTH, BLOCKS, VOCABULARY = 100, 8, 32, 2, 200
TARGET = Path(__file__).resolve().parents[1] / "docs/data/many_inputs.json"
CHECKED = ("relative_residual", "effective_rank", "centred_effective_rank", "centred_stable_rank", "alpha_req")


def compare(inputs: int, *, keep_all: bool) -> dict[str, Any]:
    """The values between so many inputs; with ``keep_all``, also those of all vectors at once, and how far they are."""
    from transformers import BertConfig, BertModel

    from rankscope.metrics import METRICS
    from rankscope.models.inputs import Batch
    from rankscope.runs.rows import RowWriter
    from rankscope.stream import SiteSelection, trace, view_of
    from rankscope.verbs.between_inputs import InputsReader, Pooling
    from rankscope.verbs.reader import SiteReader

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=TOKENS,
    )
    model = BertModel(config, add_pooling_layer=False).eval().double()
    generator = torch.Generator().manual_seed(1)

    def batch(first: int) -> Batch:
        ids = torch.randint(5, VOCABULARY, (BATCH, TOKENS), generator=generator)
        return Batch({"input_ids": ids}, None, first, BATCH)

    writer = RowWriter()
    reader = SiteReader((), "content", writer)
    specs = [METRICS[name] for name in CHECKED]
    between = InputsReader(reader, [Pooling("mean")], specs, inputs=inputs, blocks=BLOCKS)
    view = view_of(model, batch(0))
    every: list[torch.Tensor] = []
    held, before, started = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with torch.no_grad(), trace(view, SiteSelection.parse(["block.out"]), between):
        for first in range(0, inputs, BATCH):
            part = batch(first)
            reader.start(part)
            between.start(part)
            found = part.run(model).last_hidden_state
            held = max(held, between.bytes_held)
            between.commit(writer)
            if keep_all:
                every.append(found.mean(1))
    facts: dict[str, Any] = {
        "inputs": inputs,
        "kept_bytes": held,
        "peak_growth_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    if keep_all:
        last = {p.metric: float(p.values[0]) for p in writer.pieces if p.layer == BLOCKS - 1}
        want = {name: float(METRICS[name].function(torch.cat(every))) for name in CHECKED}  # type: ignore[arg-type]
        facts["values"] = last
        facts["largest_relative_difference"] = max(abs(last[name] / want[name] - 1) for name in CHECKED)
    return facts


def main(words: list[str]) -> int:
    """All sizes, or one."""
    if words:
        print(json.dumps(compare(int(words[0]), keep_all=words[1:] == ["all"])))
        return 0
    found = []
    for size in SIZES:
        runs = [[sys.executable, __file__, str(size), *more] for more in ([], ["all"])]
        alone, checked = (json.loads(subprocess.run(run, capture_output=True, check=True).stdout) for run in runs)
        found.append({**checked, **alone})
        print(found[-1])
    TARGET.write_text(json.dumps({"date": date.today().isoformat(), "sizes": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
