"""Estimates the memory of a task: weights from the sizes of files or the meta device, activations from the shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope._files import read_regular
from rankscope.models.loading.config import LARGEST_CONFIG
from rankscope.runs.plain_json import parse_json
from rankscope.verbs._spec import VERBS

PROCESS = 900 * 2**20
"""A worker with torch and transformers imported and no model, plus memory that it never returns to the system."""
SLACK = 1.5
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "hidden_dim")
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class TaskSize:
    """The sizes that determine memory use.

    Attributes:
        parameters: number of parameters.
        weight_bytes: size of the stored weights.
        width: width of the residual stream.
        heads: heads per block.
        inner: width inside the MLP.
    """

    parameters: int
    weight_bytes: int
    width: int
    heads: int
    inner: int


def size_of_folder(folder: Path) -> TaskSize | None:
    """The size of the model in a folder, from the sizes of its files and config.json; no weights are read.

    Returns:
        None without weights that are stored as they are computed with; those of GGUF files are not.
    """
    stored = [sum(path.stat().st_size for path in folder.glob(one)) for one in ("*.safetensors", "pytorch_model*.bin")]
    try:
        config = parse_json(read_regular(folder / "config.json", LARGEST_CONFIG))
    except (ValueError, OSError):
        return None  # the task itself will report what is wrong with it
    weight_bytes = stored[0] or stored[1]
    if not weight_bytes or not isinstance(config, dict):
        return None
    each = BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4)
    return sized(config, weight_bytes // each, weight_bytes)


def size_on_meta(spec: str, model_class: str | None) -> TaskSize:
    """The size of the model that ``init:`` would build, counted on the meta device, which allocates no data."""
    from rankscope.models.loading import load
    from rankscope.models.loading.affording import on_meta

    with on_meta():
        loaded = load(spec, model_class=model_class)
    config = {} if loaded.config is None else loaded.config.to_dict()
    return sized(config, loaded.parameters, 4 * loaded.parameters)


def sized(config: Mapping[str, Any], parameters: int, weight_bytes: int) -> TaskSize:
    """A size with the widths of a configuration, looked up under their common names; guessed if it has none."""
    nested = [config, *(part for part in config.values() if isinstance(part, Mapping))]

    def first(names: tuple[str, ...], otherwise: int) -> int:
        sizes = (part[name] for part in nested for name in names if type(part.get(name)) is int and part[name] > 0)
        return max(sizes, default=otherwise)

    width = first(WIDTHS, max(1, math.isqrt(max(1, parameters // 12))))
    return TaskSize(parameters, weight_bytes, width, first(HEADS, max(1, width // 64)), first(INNER, 4 * width))


def memory_for(size: TaskSize | None, facts: Mapping[str, Any]) -> int:
    """Bytes to reserve for a task. Heuristic: meant to overestimate, but not by much.

    Weights (for ``exact`` also in float64), activations of one block for one batch (stream, MLP, and attention
    probabilities in their dtype and in float64), times 1.5, plus the process itself.

    Example:
        >>> small = TaskSize(parameters=46_400, weight_bytes=185_600, width=32, heads=4, inner=64)
        >>> facts = {"verb": "measure", "dtype": None, "inputs": {"batch": 4, "sequences": 4, "tokens": 64}}
        >>> memory_for(small, facts) // 2**20
        902
    """
    verb = VERBS[facts["verb"]]
    if size is None or verb.subject == "design":
        return PROCESS
    inputs, exact = facts["inputs"], verb.is_float64
    tokens, sequences = inputs["tokens"], min(inputs["batch"], inputs["sequences"]) if verb.takes("batch") else 1
    held = BYTES.get(str(facts["dtype"]), size.weight_bytes / max(1, size.parameters))
    # exact keeps a float64 copy of the weights, and each activation as base, deviation and scale.
    weights = size.parameters * (held + 8 if exact else held)
    number = 3 * 8 if exact else max(held, 4)
    stream = sequences * tokens * (8 * size.width + 3 * size.inner) * number
    attention = sequences * size.heads * tokens**2 * (2 * number + 8)
    return int(PROCESS + SLACK * (weights + stream + attention))
