"""The rates that the page "What it costs at scale" is computed from, measured on this machine.

Reading safetensors (cold and warm), one Llama-like block in bfloat16 and float32, the battery beside it, the norms of
the theorems that need weights alone, bytes and rows of results, headers, keeping and querying results. Writes
``docs/data/rates.json``; ``python -m benchmarks.scale_tables`` makes the tables of the page from it. On a quiet
machine, with about 3 GB of memory and of disk::

    python -m benchmarks.rates && python -m benchmarks.scale_tables      # about five minutes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

import rankscope as rs
from rankscope._headers import read_header
from rankscope.ext.sweeps.results import RECORD, ROWS, Results
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS
from rankscope.models.weight_files.folders import LocalFolder, stored_tensors

ROOT = Path(__file__).parents[1]
RATES = ROOT / "docs" / "data" / "rates.json"
SEQUENCES, TOKENS = 8, 128


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """After one turn that does not count."""
    work()
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def reading(folder: Path, gigabytes: float, rounds: int) -> dict[str, float]:
    """Bytes per second of reading every tensor of a safetensors file into memory, from disk and from the page cache."""
    path = folder / "read.safetensors"
    count = max(1, int(gigabytes * 1e9 / 2 / 2**25))
    save_file({f"layer.{i}.weight": torch.randint(0, 9, (2**25,)).to(torch.bfloat16) for i in range(count)}, path)
    size, place = path.stat().st_size, torch.zeros(2**25, dtype=torch.bfloat16)

    def read(cold: bool) -> float:
        if cold:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        for stored in stored_tensors(LocalFolder(folder)).values():
            stored.read_into(place)
        return size / (time.perf_counter() - started)

    rates = {"cold": [read(cold=True) for _ in range(rounds)], "warm": [read(cold=False) for _ in range(rounds)]}
    path.unlink()
    return {f"read_{name}_bytes_per_second": statistics.median(found) for name, found in rates.items()}


def llama(width: int, blocks: int, dtype: torch.dtype) -> torch.nn.Module:
    """Blocks of the shape of Llama 3 8B, or narrower ones of the same proportions, without embeddings to speak of."""
    from transformers import LlamaConfig, LlamaModel

    heads = max(4, width // 128)
    config = LlamaConfig(hidden_size=width, intermediate_size=width * 7 // 2, num_attention_heads=heads, vocab_size=256,
                         num_key_value_heads=max(1, heads // 4), num_hidden_layers=blocks)  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return LlamaModel(config).eval()
    finally:
        torch.set_default_dtype(before)


def block_rates(width: int, rounds: int) -> dict[str, float]:
    """Floating-point operations per second of a block, and what the default battery adds to it per sequence."""
    found: dict[str, float] = {"width": width, "tokens": TOKENS}
    ids = torch.randint(3, 250, (SEQUENCES, TOKENS))
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        torch.manual_seed(0)
        model = llama(width, 1, dtype)
        weights = sum(parameter.numel() for parameter in model.layers.parameters())
        work = 2 * weights * SEQUENCES * TOKENS + 4 * SEQUENCES * TOKENS**2 * width
        with torch.no_grad():
            bare = median_seconds(lambda: model(input_ids=ids, use_cache=False), rounds)  # noqa: B023
        inputs = rs.Inputs(ids, batch=SEQUENCES)
        tokens, heads = list(DEFAULT_TOKEN_METRICS), list(DEFAULT_ATTENTION_METRICS)
        measured = median_seconds(partial(rs.measure, model, inputs, sites=["block.out"], metrics=tokens), rounds)
        attention = median_seconds(partial(rs.measure, model, inputs, sites=["attention.probs"], metrics=heads), rounds)
        found[f"flops_{name}"] = work / bare
        found[f"battery_seconds_{name}"] = max(0.0, measured - bare) / SEQUENCES
        found[f"attention_seconds_{name}"] = max(0.0, attention - bare) / SEQUENCES
    return found


def weights_only(folder: Path, width: int) -> dict[str, float]:
    """Seconds per block of the theorems that read Q, K, V and O alone, at a width and at half of it; header bytes."""
    blocks = 2
    seconds = {}
    for wide in (width // 2, width):
        torch.manual_seed(0)
        place = folder / f"width-{wide}"
        llama(wide, blocks, torch.float32).save_pretrained(place)
        seconds[wide] = median_seconds(lambda: rs.bound(str(place), weights_only=True), 1) / blocks  # noqa: B023
    header = read_header(next(place.glob("*.safetensors"))).entries
    return {
        "weights_only_seconds_per_block": seconds[width],
        "weights_only_seconds_half_width": seconds[width // 2],
        "weights_only_width": width,
        "header_bytes_per_tensor": len(json.dumps(header, separators=(",", ":"))) / (len(header) - 1),
    }


def results(folder: Path) -> dict[str, float]:
    """Rows per block and sequence, bytes per row and per record."""
    plan = {"models": ["init:tiny-llama"], "verbs": ["measure"], "inputs": {"sequences": SEQUENCES, "tokens": 32}}
    rs.sweep(plan, folder / "one", serial=True)
    (path,) = (folder / "one" / ROWS).iterdir()
    (record,) = Results.at(folder / "one").contents().records.values()
    blocks, heads = 3, 4
    split = "SELECT count(*) FILTER (head IS NULL) AS tokens, count(*) FILTER (head IS NOT NULL) AS heads FROM rows"
    counted = rs.query(folder / "one", split).to_pylist()[0]
    columns = pq.ParquetFile(path).metadata.row_group(0)
    text = sum(
        columns.column(n).total_compressed_size
        for n in range(columns.num_columns)
        if columns.column(n).path_in_schema == RECORD
    )
    return {
        "rows_per_block_and_sequence": counted["tokens"] / (blocks * SEQUENCES),
        "rows_per_head_and_sequence": counted["heads"] / (blocks * heads * SEQUENCES),
        "bytes_per_row": (path.stat().st_size - text) / record["rows"],
        "record_bytes": float(text),
    }


def machine() -> dict[str, Any]:
    """What it was measured on; no host name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(), "memory_bytes": memory,
            "machine": platform.machine(), "torch": torch.__version__, "rankscope": rs.__version__}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096, help="of the block that is timed")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="to read")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RATES)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answer = {"date": date.today().isoformat(), **machine(), **reading(folder, asked.gigabytes, asked.rounds),
                  **block_rates(asked.width, asked.rounds), **weights_only(folder, min(asked.width, 1024)),
                  **results(folder)}  # fmt: skip
    asked.out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
