"""A block of the shape of DeepSeek-V3 (256 routed experts), streamed in less memory than one dense read of it.

    python -m benchmarks.experts                           # 23 GB of weights on disk; writes docs/data/experts.json
    python -m benchmarks.experts --experts 8 --no-record   # the same widths with fewer experts, 1.1 GB
    python -m benchmarks.experts --merged --server         # experts as one stored tensor, read over HTTP by range

A block without experts comes first, as in the model. The weights are random: one block of numbers, shifted by the
number of the expert, so that writing takes as long as the disk. Peak memory is VmHWM of a process of its own. With at
most 16 experts the block is also read whole, and the rows of both runs are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.streaming import peak_bytes, same_bits
from rankscope import Inputs, Model
from rankscope.runs.run import load_run

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "data" / "experts.json"
WIDTH, INNER, HEADS, VOCABULARY = 7168, 2048, 128, 1024
MOST_COMPARED = 16
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": WIDTH,
    "moe_intermediate_size": INNER,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tensors(experts: int, merged: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint, as DeepSeek-V3 stores them, or with the experts as one tensor."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for block in ("model.layers.0", "model.layers.1"):
        found |= {
            f"{block}.input_layernorm.weight": (WIDTH,),
            f"{block}.post_attention_layernorm.weight": (WIDTH,),
            f"{block}.self_attn.q_a_proj.weight": (1536, WIDTH),
            f"{block}.self_attn.q_a_layernorm.weight": (1536,),
            f"{block}.self_attn.q_b_proj.weight": (HEADS * 192, 1536),
            f"{block}.self_attn.kv_a_proj_with_mqa.weight": (576, WIDTH),
            f"{block}.self_attn.kv_a_layernorm.weight": (512,),
            f"{block}.self_attn.kv_b_proj.weight": (HEADS * 256, 512),
            f"{block}.self_attn.o_proj.weight": (WIDTH, HEADS * 128),
        }
    for mlp in ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts"):
        found |= {
            f"{mlp}.gate_proj.weight": (INNER, WIDTH),
            f"{mlp}.up_proj.weight": (INNER, WIDTH),
            f"{mlp}.down_proj.weight": (WIDTH, INNER),
        }
    found[f"{block}.mlp.gate.weight"] = (experts, WIDTH)
    found[f"{block}.mlp.gate.e_score_correction_bias"] = (experts,)
    if merged:
        found[f"{block}.mlp.experts.gate_up_proj"] = (experts, 2 * INNER, WIDTH)
        found[f"{block}.mlp.experts.down_proj"] = (experts, WIDTH, INNER)
    else:
        for number in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = (WIDTH, INNER) if name == "down_proj" else (INNER, WIDTH)
                found[f"{block}.mlp.experts.{number}.{name}.weight"] = shape
    return found


def write(folder: Path, experts: int, merged: bool) -> int:
    """Write the checkpoint as one file; returns the bytes of the block's tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = min(8, experts // 2)
    config = {**CONFIG, "n_routed_experts": experts, "n_group": groups, "topk_group": max(1, groups // 2)}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shapes = tensors(experts, merged)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        word, size = ("F32", 4) if name.endswith("bias") else ("BF16", 2)
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": word, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            for piece in _numbers(name, shape):
                view = memoryview(piece.contiguous().view(torch.uint8).numpy().reshape(-1))
                while view:
                    view = view[file.write(view) :]
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for n, entry in header.items() if "layers.1" in n)


def _numbers(name: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """The numbers of one tensor, an expert at a time."""
    if name.endswith("bias"):
        yield torch.zeros(shape)
    elif len(shape) == 1:
        yield torch.ones(shape, dtype=torch.bfloat16)
    else:
        base = _base()
        for part in range(math.prod(shape[:-2])):
            start = (sum(name.encode()) + 7919 * part) % (1 << 21)
            count = math.prod(shape[-2:])
            yield base.roll(start).repeat(-(-count // len(base)))[:count]


@cache
def _base() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(1 << 22, generator=generator) * 0.02).to(torch.bfloat16)


def child(given: argparse.Namespace) -> None:
    """One run in this process, with what it took on the last line."""
    from rankscope.verbs.measure.run import measure

    shape = {"sequences": given.sequences, "tokens": given.tokens, "batch": given.sequences, "random_tokens": True}
    memory = None if given.child == "dense" else given.memory
    started, used = time.perf_counter(), time.process_time()
    run = measure(Model(given.folder, offload=True, memory=memory), Inputs(**shape))
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    run.save(given.out)
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak_bytes(), **run.extra["offload"]}))


def in_a_process(kind: str, model: str, out: Path, given: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    """What ``child`` says."""
    words = [sys.executable, "-m", "benchmarks.experts", "--child", kind, "--folder", model, "--out", str(out)]
    words += ["--sequences", str(given.sequences), "--tokens", str(given.tokens), "--memory", given.memory]
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(out.parent / "hf")}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compared(given: argparse.Namespace) -> dict[str, Any]:
    """The block by expert, and whole if it is small."""
    folder = Path(given.folder or tempfile.mkdtemp(prefix="rankscope-experts-")).expanduser()
    server = None
    try:
        block = write(folder, given.experts, given.merged)
        model, endpoint = str(folder), "http://127.0.0.1"
        if given.server:
            words = [sys.executable, "-m", "tests.hub_server", str(folder), "0"]
            server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert server.stdout is not None
            model, endpoint = "hub:tiny", server.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as kept:
            by_expert = in_a_process("experts", model, Path(kept) / "experts", given, endpoint)
            same = None
            if given.experts <= MOST_COMPARED:
                in_a_process("dense", str(folder), Path(kept) / "dense", given, endpoint)
                same = same_bits(load_run(Path(kept) / "dense"), load_run(Path(kept) / "experts"))
    finally:
        if server is not None:
            server.terminate()
            server.wait()
        if given.folder is None:
            shutil.rmtree(folder)
    return {
        "date": date.today().isoformat(),
        "experts": given.experts,
        "stored": "merged" if given.merged else "one by one",
        "from": "server" if given.server else "folder",
        "tokens": given.sequences * given.tokens,
        "block_bytes": block,
        "rows_equal_dense_bit_by_bit": same,
        "run": by_expert,
        "peak_over_block": by_expert["peak_bytes"] / block,
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--merged", action="store_true", help="experts as one stored tensor")
    parser.add_argument("--server", action="store_true", help="read from a server on this machine")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--folder", default=None, help="where to write the weights, and keep them")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given)
        return
    found = compared(given)
    print(json.dumps(found, indent=2))
    if not given.no_record:
        before = json.loads(OUT.read_text(encoding="utf-8")) if OUT.is_file() else []
        kinds = ("experts", "stored", "from")
        others = [one for one in before if [one[kind] for kind in kinds] != [found[kind] for kind in kinds]]
        OUT.write_text(json.dumps([*others, found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
