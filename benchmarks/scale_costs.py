"""What a block, a model and a hub cost at given rates; the assumptions are those of the page on scale."""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.scale_shapes import CHECKPOINTS, HUB, Shape

SEQUENCES, TOKENS = 8, 128
STORED = 2
"""Bytes per weight: bfloat16."""
NETWORK = 1.25e9
"""Bytes per second into one machine: 10 Gbit/s, assumed."""
LATENCY = 0.1
"""Seconds per range request, assumed."""
PARALLEL = 64
"""Range requests under way at a time on one machine, assumed."""
Rates = Mapping[str, float]


def forward_seconds(rates: Rates, shape: Shape) -> float:
    """One block on all sequences: two operations per weight and token, and the products of attention."""
    work = SEQUENCES * (2 * shape.active_block * TOKENS + 4 * TOKENS**2 * shape.width)
    return work / rates["flops_bfloat16"]


def battery_seconds(rates: Rates, shape: Shape) -> float:
    """The battery on one block: token metrics go with the width, attention metrics with the heads."""
    tokens = rates["battery_seconds_bfloat16"] * shape.width / rates["width"]
    heads = rates["attention_seconds_bfloat16"] * shape.heads / max(4, rates["width"] // 128)
    return SEQUENCES * (tokens + heads)


def read_seconds(rates: Rates, shape: Shape) -> float:
    """One block from a disk such as the measured one."""
    return STORED * shape.block / rates["read_cold_bytes_per_second"]


def block_seconds(rates: Rates, shape: Shape) -> float:
    """Reading goes on beside the arithmetic: the slower of the two counts."""
    return max(read_seconds(rates, shape), forward_seconds(rates, shape) + battery_seconds(rates, shape))


def resident(shape: Shape) -> float:
    """One block, the stream in and out in float32, attention probabilities of one sequence."""
    stream = 2 * 4 * SEQUENCES * TOKENS * shape.width
    return STORED * shape.block + stream + 12 * shape.heads * TOKENS**2


def result_rows(rates: Rates, shape: Shape) -> float:
    """Rows of one measurement."""
    per_block = rates["rows_per_block_and_sequence"] + rates["rows_per_head_and_sequence"] * shape.heads
    return SEQUENCES * shape.blocks * per_block


def header_bytes(rates: Rates, shape: Shape) -> float:
    """All headers of a checkpoint."""
    return rates["header_bytes_per_tensor"] * shape.tensors


def norms_exponent(rates: Rates) -> float:
    """How the time of these theorems grows with the width, between the two widths measured; at least as the bytes."""
    return max(2.0, math.log2(rates["weights_only_seconds_per_block"] / rates["weights_only_seconds_half_width"]))


def norms_seconds(rates: Rates, shape: Shape) -> float:
    """Theorems that read Q, K, V and O alone, all blocks, extrapolated in the width."""
    wider = shape.width / rates["weights_only_width"]
    return rates["weights_only_seconds_per_block"] * wider ** norms_exponent(rates) * shape.blocks


def hub_totals(rates: Rates) -> dict[str, tuple[float, float, float, float]]:
    """Per kind of question: bytes read, seconds of one machine's network, of its cores, and bytes of results."""
    found: dict[str, list[float]] = {"shapes and sizes (headers)": [0.0] * 4,
                                     "theorems from weights (Q, K, V, O)": [0.0] * 4,
                                     "measure (everything)": [0.0] * 4}  # fmt: skip
    for kind in HUB:
        shape, count = kind.shape, kind.share * CHECKPOINTS
        some = header_bytes(rates, shape) + STORED * shape.attention * shape.blocks
        whole = STORED * shape.parameters
        work = shape.blocks * (forward_seconds(rates, shape) + battery_seconds(rates, shape))
        costs = (
            (header_bytes(rates, shape), LATENCY / PARALLEL, 0.0, rates["record_bytes"]),
            (some, max(some / NETWORK, 4 * shape.blocks * LATENCY / PARALLEL), norms_seconds(rates, shape),
             rates["record_bytes"] + 12 * shape.blocks * rates["bytes_per_row"]),
            (whole, whole / NETWORK, work,
             rates["record_bytes"] + result_rows(rates, shape) * rates["bytes_per_row"]),
        )  # fmt: skip
        for total, cost in zip(found.values(), costs, strict=True):
            for place, value in enumerate(cost):
                total[place] += count * value
    return {name: (total[0], total[1], total[2], total[3]) for name, total in found.items()}
