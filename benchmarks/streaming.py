"""A model larger than memory: what streaming holds, what it costs, whether its values are those of the model in memory.

    python scripts/make_random_model.py llama-3b
    python -m benchmarks.streaming ~/.cache/rankscope-scale/llama-3b --checks --rounds 5
    python -m benchmarks.streaming ~/.cache/rankscope-scale/llama-8b --checks --no-whole --rounds 0

Peaks are VmHWM of a process of its own (mapped files count). ``--checks`` runs the model streamed and whole, holds the
rows against each other bit by bit, then kills a streamed run with signal 9 half-way and takes it up again. ``--rounds``
times, interleaved in one process: a bare loop that reads the shards with safetensors and runs the blocks, the same loop
with the next shard read in a thread, and ``measure(offload=True)`` with its default battery. Speeds are taken within a
round; their median, and in brackets their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rankscope import Inputs, Model
from rankscope.runs.run import Run, load_run

GIB = 2**30


def peak_bytes() -> int:
    words = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(words.split("VmHWM:")[1].split()[0])


def child(kind: str, given: argparse.Namespace) -> dict[str, Any]:
    """One run in this process: streamed, whole, or streamed until it kills itself half-way."""
    from rankscope.verbs.measure.run import measure

    if kind == "killed":
        _die_half_way(given.folder)
    started = time.perf_counter()
    shape = {"sequences": given.sequences, "tokens": given.tokens, "batch": given.batch}
    if kind == "whole":
        run = measure(given.folder, Inputs(**shape))
    else:
        work = given.out / "work" if kind in ("killed", "resumed") else None
        run = measure(Model(given.folder, offload=True, memory=given.memory, work=work), Inputs(**shape))
    run.save(given.out / kind)
    return {"seconds": time.perf_counter() - started, "peak": peak_bytes(), **dict(run.extra.get("stream", {}))}


def _die_half_way(folder: Path) -> None:
    from rankscope.ext.offload.schedule import BlockStage

    depth = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    own = BlockStage.through

    def through(stage: BlockStage, *words: Any, **options: Any) -> Any:
        if stage.number == depth // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(stage, *words, **options)

    BlockStage.through = through  # type: ignore[method-assign]


def in_a_process(kind: str, given: argparse.Namespace) -> dict[str, Any] | None:
    """What ``child`` says, or None of one that was killed."""
    words = [sys.executable, "-m", "benchmarks.streaming", str(given.folder), "--child", kind, "--out", str(given.out)]
    words += ["--sequences", str(given.sequences), "--tokens", str(given.tokens), "--batch", str(given.batch)]
    done = subprocess.run([*words, "--memory", given.memory], capture_output=True, text=True, check=False)
    if kind == "killed" and done.returncode == -signal.SIGKILL:
        return None
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def same_bits(one: Run, other: Run) -> bool:
    """Whether all rows are the same, values bit by bit."""
    left, right = (run.table["value"].to_numpy().view(np.int64) for run in (one, other))
    rest = [run.table.drop_columns("value") for run in (one, other)]
    return rest[0].equals(rest[1]) and bool((left == right).all())


def check(given: argparse.Namespace) -> None:
    streamed = in_a_process("streamed", given)
    assert streamed is not None
    print(f"streamed   peak {streamed['peak'] / GIB:5.2f} GiB   estimated {streamed['estimated_bytes'] / GIB:5.2f} GiB")
    print(f"           {streamed['blocks_read']} blocks read, {streamed['seconds']:.0f} s")
    if not given.no_whole:
        whole = in_a_process("whole", given)
        assert whole is not None
        print(f"whole      peak {whole['peak'] / GIB:5.2f} GiB   {whole['seconds']:.0f} s")
        same = same_bits(load_run(given.out / "streamed"), load_run(given.out / "whole"))
        rows = load_run(given.out / "whole").table.num_rows
        print(f"           {rows} rows, all bits equal to the streamed run: {same}")
    if in_a_process("killed", given) is not None:
        raise SystemExit("the run that was to be killed half-way was not")
    resumed = in_a_process("resumed", given)
    assert resumed is not None
    same = same_bits(load_run(given.out / "streamed"), load_run(given.out / "resumed"))
    print(f"resumed    at block {resumed['resumed_at']}, {resumed['blocks_read']} blocks read, all bits equal: {same}")


def bare_loop(folder: Path, ids: Any, batch: int, *, ahead: bool) -> Callable[[], object]:
    """Reads one shard after the other and runs the blocks of a Llama on all batches; no statistics."""
    import torch
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel

    with init_empty_weights(include_buffers=False):
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    table = "model.embed_tokens.weight"

    def read(number: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{number}."
        shard = load_file(folder / index[f"{prefix}self_attn.q_proj.weight"])
        return {name.removeprefix(prefix): tensor.clone() for name, tensor in shard.items() if name.startswith(prefix)}

    def shards(count: int) -> Iterator[dict[str, torch.Tensor]]:
        if not ahead:
            yield from map(read, range(count))
            return
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(read, 0)
            for number in range(count):
                found = coming.result()
                if number + 1 < count:
                    coming = reader.submit(read, number + 1)
                yield found

    def run() -> object:
        with torch.no_grad(), safe_open(folder / index[table], framework="pt") as file:
            rows = file.get_slice(table)
            states = [
                torch.stack([rows[int(i)] for i in part.flatten()]).view(*part.shape, -1) for part in ids.split(batch)
            ]
            places = torch.arange(ids.shape[1])[None]
            turns = model.rotary_emb(states[0], places)
            for block, weights in zip(model.layers, shards(len(model.layers)), strict=True):
                block.load_state_dict(weights, assign=True)
                states = [block(x, attention_mask=None, position_ids=places, position_embeddings=turns) for x in states]
                block.to("meta")
        return states

    return run


def race(given: argparse.Namespace) -> None:
    from rankscope.ext.offload.meta_model import open_meta_model
    from rankscope.models.inputs import prepare_inputs
    from rankscope.verbs.measure.run import measure

    shape = {"sequences": given.sequences, "tokens": given.tokens, "batch": given.batch}
    prepared = prepare_inputs(open_meta_model(given.folder).loaded, None, **shape)
    import torch

    ids = torch.cat([part.inputs["input_ids"] for part in prepared])
    contestants: dict[str, Callable[[], object]] = {
        "bare": bare_loop(given.folder, ids, given.batch, ahead=False),
        "bare, reading ahead": bare_loop(given.folder, ids, given.batch, ahead=True),
        # Without a budget, since the bare loops leave more in this process than it allows; peaks are ``--checks``.
        "measure, streamed": lambda: measure(Model(given.folder, offload=True), Inputs(**shape)),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(given.rounds + 1):
        # There and back again: what one leaves behind (heat, memory) may weigh on the next, whichever that is.
        for name in list(contestants)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            contestants[name]()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - started)
    for name, found in times.items():
        print(f"{name:22s} {statistics.median(found):7.2f} s", end="")
        for against in ("bare", "bare, reading ahead"):
            speeds = [other / own for other, own in zip(times[against], found, strict=True)]
            low, middle, high = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
            print(f"   {middle:5.2f} of {against} ({low:.2f} to {high:.2f})", end="")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--memory", default="3GiB")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--no-whole", action="store_true", help="leave out the run that holds the whole model")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", choices=("streamed", "whole", "killed", "resumed"))
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child, given)))
        return
    print(f"{given.folder.name}: {given.sequences} x {given.tokens} tokens, batches of {given.batch}, {given.memory}")
    with tempfile.TemporaryDirectory() as place:
        given.out = given.out or Path(place)
        if given.checks:
            check(given)
    if given.rounds:
        race(given)


if __name__ == "__main__":
    main()
