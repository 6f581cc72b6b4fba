"""What the default token battery costs beside the block it measures, at the shapes of large models.

CPU time of one thread; the block and the batteries run in turn in one process, and medians over the rounds are
compared. "exact" is the battery with ``spectra="exact"``. The extra memory is the largest resident set while the
battery runs, above that before it. Run it with::

    python -m benchmarks.large_shapes --exact      # prints how long it will take; 4 GB of memory

Each row is written to ``docs/data/large_shapes.json`` when it is done; a second start goes on after the last row.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Spectra, Tokens
from rankscope.metrics import DEFAULT_TOKEN_METRICS, METRICS, NORM_METRICS, evaluate, is_left_out

SHAPES = (
    "bert-base:8x128",
    "vit-large:16x257",
    "llama-7b:1x512",
    "llama-7b:1x2048",
    "llama-7b:1x4096",
    "llama-7b:1x8192",
)
RECORD = Path(__file__).parents[1] / "docs" / "data" / "large_shapes.json"


def block(name: str, dtype: torch.dtype, tokens: int) -> tuple[Callable[[Tensor], object], int]:
    """One block with random weights, and its width."""
    import transformers

    made: nn.Module
    if name == "llama-7b":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = transformers.LlamaConfig(attn_implementation="sdpa")
        made = LlamaDecoderLayer(config, 0).to(dtype).eval()
        places = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=dtype), torch.arange(tokens)[None])
        return lambda x: made(x, position_embeddings=places), config.hidden_size
    if name == "bert-base":
        from transformers.models.bert.modeling_bert import BertLayer

        made = BertLayer(transformers.BertConfig(attn_implementation="sdpa"))
        made = made.to(dtype).eval()
        return made, 768
    from transformers.models.vit.modeling_vit import ViTLayer

    made = ViTLayer(
        transformers.ViTConfig(
            hidden_size=1024, intermediate_size=4096, num_attention_heads=16, attn_implementation="sdpa"
        )
    )
    made = made.to(dtype).eval()
    return made, 1024


def battery(names: tuple[str, ...], x: Tensor, spectra: Spectra | None) -> None:
    """As a reader evaluates it."""
    view = Tokens(x, spectra=spectra)
    evaluate([METRICS[name] for name in names if not is_left_out(METRICS[name], view)], view, float_floor(x.dtype))


def seconds(run: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def extra_memory(run: Callable[[], object]) -> int:
    """Most resident bytes during a call, above those before it."""
    ctypes.CDLL(None).malloc_trim(0)  # else glibc hands out memory that earlier calls freed, and nothing is seen
    before, most, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return max(0, most - before)


def sizes(shape: str) -> tuple[str, int, int]:
    """The block, sequences and tokens that a shape names."""
    name, size = shape.split(":")
    sequences, tokens = size.split("x")
    return name, int(sequences), int(tokens)


def estimate(shape: str, dtype: torch.dtype, rounds: int, *, exact: bool) -> float:
    """Seconds a row will take, from the flops of the block, the rate of one product, and ratios of earlier runs."""
    name, sequences, tokens = sizes(shape)
    weights, width = {"llama-7b": (202e6, 4096), "bert-base": (7.1e6, 768), "vit-large": (12.6e6, 1024)}[name]
    flops = sequences * tokens * (2 * weights + 4 * tokens * width)
    factor = torch.ones(1024, width, dtype=dtype), torch.ones(width, 1024, dtype=dtype)
    factor[0] @ factor[1]
    one = flops / (2 * 1024 * 1024 * width / seconds(lambda: factor[0] @ factor[1]))
    return one * (2 + rounds * (2 if exact else 1.3))


def measured(shape: str, dtype: torch.dtype, rounds: int, *, exact: bool) -> dict[str, Any]:
    """Ratios to the bare block."""
    name, sequences, tokens = sizes(shape)
    forward, width = block(name, dtype, tokens)
    x = (torch.randn(sequences, tokens, width) + torch.randn(width)).to(dtype)
    runs: dict[str, Callable[[], object]] = {
        "block": lambda: forward(x),
        "norm metrics": lambda: battery(NORM_METRICS, x, None),
        "default": lambda: battery(DEFAULT_TOKEN_METRICS, x, None),
    }
    if exact:
        runs["exact"] = lambda: battery(DEFAULT_TOKEN_METRICS, x, "exact")
    with torch.no_grad():
        times: dict[str, list[float]] = {key: [] for key in runs}
        for _ in range(rounds):
            for key, run in runs.items():
                times[key].append(seconds(run))
        middle = {key: statistics.median(values) for key, values in times.items()}
        memory = {key: extra_memory(runs[key]) / 2**20 for key in ("block", "default")}
    return {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "block_seconds": round(middle["block"], 3),
        **{key: round(value / middle["block"], 3) for key, value in middle.items() if key != "block"},
        "estimated": Tokens(x, spectra=None).has_estimated_spectra,
        "seconds": {key: [round(value, 4) for value in values] for key, values in times.items()},
        "block_mib": round(memory["block"]),
        "extra_mib": round(memory["default"]),
    }


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exact", action="store_true", help="also the exact battery")
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    setting = {"torch": torch.__version__, "rounds": args.rounds, "exact": args.exact}
    rows: list[dict[str, Any]] = []
    if args.out.exists():
        earlier = json.loads(args.out.read_text())
        if {key: earlier.get(key) for key in setting} == setting:
            rows = earlier["rows"]
    done = {(row["shape"], row["dtype"]) for row in rows}
    left = [(shape, dtype) for shape in args.shapes for dtype in args.dtypes if (shape, dtype) not in done]
    expected = sum(estimate(shape, getattr(torch, dtype), args.rounds, exact=args.exact) for shape, dtype in left)
    print(
        f"{len(left)} of {len(args.shapes) * len(args.dtypes)} rows left, about {expected / 60:.0f} minutes", flush=True
    )
    for shape, dtype in left:
        started = time.perf_counter()
        rows.append(measured(shape, getattr(torch, dtype), args.rounds, exact=args.exact))
        facts = {"date": datetime.date.today().isoformat(), **setting, "rows": rows}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")
        print(f"{time.perf_counter() - started:.0f} s: {json.dumps(rows[-1])}", flush=True)


if __name__ == "__main__":
    main()
