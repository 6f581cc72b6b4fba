"""Write a random Llama-like model as sharded bfloat16 safetensors, one block at a time, without ever holding it.

    python scripts/make_random_model.py llama-3b            # 3.2e9 parameters, 6.4 GB, into the cache folder
    python scripts/make_random_model.py llama-8b            # 8.0e9 parameters, 16 GB
    python scripts/make_random_model.py tiny --out folder   # a few kilobytes, to try it

Shapes and vocabulary are those of Llama 3.2 3B and Llama 3.1 8B; the weights are independent N(0, 0.02^2) numbers drawn
from a seed and the tensor's name (norms are ones), so that the files are the same whenever they are written. A shard
that is already whole is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, int | bool | float]] = {
    "llama-3b": {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}
FURTHER = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def cache_folder() -> Path:
    """Where these models lie unless told otherwise; never inside a checkout."""
    return Path(os.environ.get("RANKSCOPE_SCALE_CACHE", "~/.cache/rankscope-scale")).expanduser()


def shards(shape: dict[str, int | bool | float]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of one file after the other: a block each, the rest in the last."""
    width, inner = int(shape["hidden_size"]), int(shape["intermediate_size"])
    keys = width // int(shape["num_attention_heads"]) * int(shape["num_key_value_heads"])
    for number in range(int(shape["num_hidden_layers"])):
        block = f"model.layers.{number}"
        yield {
            f"{block}.input_layernorm.weight": (width,),
            f"{block}.mlp.down_proj.weight": (width, inner),
            f"{block}.mlp.gate_proj.weight": (inner, width),
            f"{block}.mlp.up_proj.weight": (inner, width),
            f"{block}.post_attention_layernorm.weight": (width,),
            f"{block}.self_attn.k_proj.weight": (keys, width),
            f"{block}.self_attn.o_proj.weight": (width, width),
            f"{block}.self_attn.q_proj.weight": (width, width),
            f"{block}.self_attn.v_proj.weight": (keys, width),
        }
    rest: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (int(shape["vocab_size"]), width),
        "model.norm.weight": (width,),
    }
    if not shape["tie_word_embeddings"]:
        rest["lm_head.weight"] = (int(shape["vocab_size"]), width)
    yield rest


def drawn(name: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    """The numbers of one tensor, some rows at a time."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    found = torch.empty(size, dtype=torch.bfloat16)
    for start in range(0, size[0], 4096):
        rows = found[start : start + 4096]
        rows.copy_(torch.randn(rows.shape, generator=generator) * 0.02)
    return found


def write(name: str, out: Path, seed: int) -> int:
    """Write the folder; returns the number of parameters."""
    shape = SHAPES[name]
    out.mkdir(parents=True, exist_ok=True)
    parts = list(shards(shape))
    index: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, start=1):
        file = out / f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        size = 2 * sum(torch.Size(axes).numel() for axes in part.values())
        if not (file.is_file() and file.stat().st_size > size):
            partial = file.with_suffix(".partial")
            save_file({word: drawn(word, axes, seed) for word, axes in part.items()}, str(partial), {"format": "pt"})
            os.replace(partial, file)
        index |= dict.fromkeys(part, file.name)
        total += size
    (out / "config.json").write_text(json.dumps({**FURTHER, **shape}, indent=2) + "\n", encoding="utf-8")
    facts = {"metadata": {"total_size": total}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return total // 2


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, default=None, help="folder; by default below ~/.cache/rankscope-scale")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    out = given.out or cache_folder() / given.name
    print(f"{write(given.name, out, given.seed):,} parameters in {out}")


if __name__ == "__main__":
    main()
