"""From measured rates to the tables of the page "What it costs at scale"::

python -m benchmarks.scale_tables      # reads docs/data/rates.json, writes docs/data/scale_*.inc; at once
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale_costs import (
    STORED,
    TOKENS,
    Rates,
    battery_seconds,
    block_seconds,
    forward_seconds,
    header_bytes,
    hub_totals,
    norms_exponent,
    norms_seconds,
    read_seconds,
    resident,
    result_rows,
)
from benchmarks.scale_shapes import SHAPES, Shape

DATA = Path(__file__).parents[1] / "docs" / "data"


def words(seconds: float) -> str:
    """A duration as one reads it.

    Example:
        >>> words(90), words(7200), words(3e5), words(1e9)
        ('90 s', '2.0 h', '3.5 days', '31.7 years')
    """
    if seconds < 1:
        return f"{seconds:.2g} s"
    for limit, unit, size in ((600, "s", 1), (5400, "min", 60), (172800, "h", 3600), (3.2e7, "days", 86400)):
        if seconds < limit:
            found = seconds / size
            return f"{found:.0f} {unit}" if unit in ("s", "min") and found >= 10 else f"{found:.1f} {unit}"
    return f"{seconds / 31557600:,.1f} years"


def amount(count: float) -> str:
    """Bytes as one reads them.

    Example:
        >>> amount(3.2e9), amount(512)
        ('3.2 GB', '512 B')
    """
    for unit, size in (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def many(count: float) -> str:
    """A large number as one says it.

    Example:
        >>> many(1.63e6), many(3.2e10)
        ('1.6 million', '32 billion')
    """
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.2g} {name}" if count < 100 * size else f"{count / size:,.0f} {name}"
    return f"{count:,.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def rates_table(rates: Rates) -> str:
    """What was measured."""
    each = "8 x 128 tokens" if rates["tokens"] == TOKENS else f"8 x {rates['tokens']:.0f} tokens"
    rows = [
        ("safetensors read from disk", f"{amount(rates['read_cold_bytes_per_second'])}/s"),
        ("safetensors read from the page cache", f"{amount(rates['read_warm_bytes_per_second'])}/s"),
        (f"a Llama-like block of width {rates['width']:.0f}, {each}, bfloat16",
         f"{rates['flops_bfloat16'] / 1e9:.0f} GFLOP/s"),
        ("the same in float32", f"{rates['flops_float32'] / 1e9:.0f} GFLOP/s"),
        ("token battery beside it, per block and sequence", f"{1000 * rates['battery_seconds_bfloat16']:.1f} ms"),
        ("attention battery, per block and sequence", f"{1000 * rates['attention_seconds_bfloat16']:.1f} ms"),
        (f"theorems from Q, K, V, O alone, per block of width {rates['weights_only_width']:.0f}",
         f"{rates['weights_only_seconds_per_block']:.2f} s, growing as width^{norms_exponent(rates):.1f}"),
        ("rows per block and sequence, and per head besides",
         f"{rates['rows_per_block_and_sequence']:.0f} and {rates['rows_per_head_and_sequence']:.0f}"),
        ("bytes per row (Parquet), per record (JSON)", f"{rates['bytes_per_row']:.1f} and {rates['record_bytes']:.0f}"),
        ("header of safetensors, per tensor", f"{rates['header_bytes_per_tensor']:.0f} B"),
        ("results written, each with fsync and rename", f"{rates['keep_tasks_per_second']:.0f} tasks/s"),
        (f"a grouped query over {rates['query_files']:.0f} files, {rates['query_rows']:,.0f} rows",
         f"{rates['query_seconds']:.2f} s"),
    ]  # fmt: skip
    return table(("rate", "measured"), rows)


def models_table(rates: Rates) -> str:
    """One large model on one machine."""
    head = ("model", "parameters", "bytes", "a block", "read", "forward", "battery", "all blocks", "resident", "rows",
            "results")  # fmt: skip
    return table(head, (_model_cells(rates, shape) for shape in SHAPES))


def _model_cells(rates: Rates, shape: Shape) -> tuple[str, ...]:
    return (
        shape.name,
        f"{shape.parameters / 1e9:,.0f}B",
        amount(STORED * shape.parameters),
        amount(STORED * shape.block),
        words(read_seconds(rates, shape)),
        words(forward_seconds(rates, shape)),
        words(battery_seconds(rates, shape)),
        words(shape.blocks * block_seconds(rates, shape)),
        amount(resident(shape)),
        f"{result_rows(rates, shape):,.0f}",
        amount(result_rows(rates, shape) * rates["bytes_per_row"]),
    )


def reads_table(rates: Rates) -> str:
    """What of a checkpoint has to travel for each kind of question."""
    head = ("model", "headers", "Q, K, V, O", "of the whole", "ranges", "everything", "theorems from weights alone")
    return table(head, (_read_cells(rates, shape) for shape in SHAPES))


def _read_cells(rates: Rates, shape: Shape) -> tuple[str, ...]:
    some = STORED * shape.attention * shape.blocks
    return (
        shape.name,
        amount(header_bytes(rates, shape)),
        amount(some),
        f"{some / (STORED * shape.parameters):.1%}",
        f"{4 * shape.blocks:,}",
        amount(STORED * shape.parameters),
        words(norms_seconds(rates, shape)),
    )


def hub_table(rates: Rates) -> str:
    """Every checkpoint of a hub."""
    rows = []
    for name, (read, network, work, kept) in hub_totals(rates).items():
        machines = max(1.0, max(network, work) / (30 * 86400))
        rows.append((name, amount(read), words(network), words(work), f"{machines:,.0f}", amount(kept)))
    head = ("question", "read", "network of one machine", "cores of one machine", "machines for 30 days", "results")
    return table(head, rows)


def machine_words(rates: Mapping[str, Any]) -> str:
    """What it was measured on."""
    return (
        f"{rates['cores']:.0f} cores ({rates['machine']}), {rates['threads']:.0f} of them used, "
        f"{rates['memory_bytes'] / 2**30:.0f} GiB, torch {rates['torch']}, rankscope {rates['rankscope']}, "
        f"{rates['date']}.\n"
    )


TABLES = {"rates": rates_table, "models": models_table, "reads": reads_table, "hub": hub_table}


def written(rates: Mapping[str, Any]) -> dict[str, str]:
    """Every table by the name of its file."""
    tables = {f"scale_{name}.inc": make(rates) for name, make in TABLES.items()}
    return {**tables, "scale_machine.inc": machine_words(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of rates.json and of the tables")
    asked = parser.parse_args()
    for name, text in written(json.loads((asked.data / "rates.json").read_text(encoding="utf-8"))).items():
        (asked.data / name).write_text(text, encoding="utf-8")
        print(f"{name}\n{text}")


if __name__ == "__main__":
    main()
