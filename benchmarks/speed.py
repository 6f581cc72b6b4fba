"""The figures of the page on speed: what measuring costs on one and on two threads, recorded in one go.

Every ratio is the median over rounds, with its quartiles; in each round a contestant runs next to a bare pass. Run it
on a quiet machine; it takes about fifteen minutes and 8 GB of memory, and writes ``docs/data/speed.json`` and the
tables ``docs/data/speed*.inc``::

    python -m benchmarks.speed

``--flames PICTURE`` draws where the default token metrics of one site spend their time, from samples of the Python
stack, as an SVG; functions of torch are part of the function that calls them.
"""

from __future__ import annotations

import argparse
import datetime
import html
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import large_shapes, overhead
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS, METRICS, NORM_METRICS, evaluate
from rankscope.models.inputs import Batch
from rankscope.stream.viewing import view_of
from rankscope.verbs.pending import PendingReadings

DATA = Path(__file__).parents[1] / "docs" / "data"
LABELS = {
    "norms": "norm metrics after every block",
    "tokens": "default token metrics after every block",
    "attention": "the same and the default attention metrics",
    "svdvals": "`output_hidden_states` and `svdvals`",
    "nnsight": "nnsight: blocks saved, `svdvals`",
    "transformer_lens": "TransformerLens: `run_with_cache`, `svdvals`",
}
PEERS = {"nnsight": "nnsight saved blocks + svdvals", "transformer_lens": "TransformerLens run_with_cache + svdvals"}
OWN_FORWARD = {"transformer_lens": "TransformerLens bare (with its LM head)"}
"""Peers that wrap the model, and whose time is relative to their own forward pass, not to that of the bare model."""
SHAPES = ("vit-large:16x257", "llama-7b:1x512", "llama-7b:1x2048")


def llama(tokens: int) -> tuple[torch.nn.Module, Batch]:
    """Four of the 16 blocks of a Llama of 1B shape, with random weights, in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=4, vocab_size=1000,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config).eval()
    return model, Batch({"input_ids": torch.randint(0, 1000, (1, tokens))}, None, 0, 1)


def ratios(model: torch.nn.Module, batch: Batch, rounds: int) -> dict[str, Any]:
    """Seconds of the bare forward, and the time of each way to measure relative to the one beside it."""
    everything = (*DEFAULT_TOKEN_METRICS, *DEFAULT_ATTENTION_METRICS)
    with torch.no_grad():
        view = view_of(model, batch)
        ids = batch.inputs["input_ids"]
        peers = overhead.nnsight(model, ids) | overhead.transformer_lens(model, ids)

        def bare() -> object:
            return batch.run(model)

        contestants = {
            "norms": (overhead.rankscope_pass(view, batch, NORM_METRICS, ("block.out",)), bare),
            "tokens": (overhead.rankscope_pass(view, batch, DEFAULT_TOKEN_METRICS, ("block.out",)), bare),
            "attention": (overhead.rankscope_pass(view, batch, everything, ("block.out", "attention.probs")), bare),
            "svdvals": (overhead.hidden_states_and_svd(model, ids), bare),
        }
        for name, contestant in PEERS.items():
            if contestant in peers:
                contestants[name] = peers[contestant], peers.get(OWN_FORWARD.get(name, ""), bare)
        times = overhead.contest(contestants, rounds)
    found: dict[str, Any] = {"bare_seconds": round(statistics.median(times["norms"].bare), 3)}
    return found | {name: pairs.ratio() for name, pairs in times.items()}


def shape_ratios(shape: str, rounds: int) -> dict[str, dict[str, float]]:
    """Wall time of the metrics after one large block, relative to the block."""
    name, sequences, tokens = large_shapes.sizes(shape)
    with torch.no_grad():
        forward, width = large_shapes.block(name, torch.float32, tokens)
        x = torch.randn(sequences, tokens, width) + torch.randn(width)
        batteries = {"norms": NORM_METRICS, "tokens": DEFAULT_TOKEN_METRICS}
        contestants = {
            key: (partial(large_shapes.battery, names, x, None), partial(forward, x))
            for key, names in batteries.items()
        }
        times = overhead.contest(contestants, rounds)
    return {key: pairs.ratio() for key, pairs in times.items()}


def site_seconds(rounds: int) -> float:
    """Wall time of the default token metrics per site, 12 sites of 8 x 128 x 768 as one pass evaluates them; median."""
    torch.manual_seed(0)
    sites = [torch.randn(8, 128, 768) + torch.randn(768) for _ in range(12)]
    specs = [METRICS[name] for name in DEFAULT_TOKEN_METRICS]
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        readings = PendingReadings()
        for x in sites:
            readings.evaluate(specs, Tokens(x), float_floor(x.dtype), lambda *_: None)
        readings.settle()
        times.append((time.perf_counter() - start) / len(sites))
    return statistics.median(times[2:])


def one_site() -> Any:
    torch.manual_seed(0)
    x = torch.randn(8, 128, 768) + torch.randn(768)
    specs = [METRICS[name] for name in DEFAULT_TOKEN_METRICS]
    return lambda: evaluate(specs, Tokens(x), float_floor(x.dtype))


def of_threads(threads: int, rounds: int) -> dict[str, Any]:
    """All ratios with this number of threads."""
    torch.set_num_threads(threads)
    return {
        "BERT-base, 8 x 128": ratios(*overhead.bert_base(8, 128), rounds),
        "4 blocks of a Llama of 1B shape, 1 x 512": ratios(*llama(512), max(1, rounds // 2)),
        "site_seconds": round(site_seconds(2 * rounds), 5),
        "shapes": {shape: shape_ratios(shape, max(3, rounds // 2)) for shape in SHAPES},
    }


def amdahl(one: float, two: float) -> dict[str, float]:
    """Speed of the metric part on more threads, if what two threads leave is serial: an estimate, not measured."""
    serial = min(1.0, max(0.0, 2.0 * two / one - 1.0))
    return {
        "one_to_two": round(one / two, 2),
        "serial_share": round(serial, 3),
        **{str(n): round(1.0 / (serial + (1.0 - serial) / n), 2) for n in (8, 16)},
    }


def spread(ratio: Mapping[str, float]) -> str:
    """A median with its quartiles."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def tables(facts: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page."""
    one, two = facts["threads"]["1"], facts["threads"]["2"]
    lines = ["| model | | one thread | two threads |", "|---|---|---|---|"]
    for model in (name for name in one if name not in ("site_seconds", "shapes")):
        lines.append(f"| {model} | bare forward | {one[model]['bare_seconds']} s | {two[model]['bare_seconds']} s |")
        lines += [
            f"| | {label} | {spread(one[model][key])} | {spread(two[model][key])} |"
            for key, label in LABELS.items()
            if key in one[model]
        ]
    shapes = ["| one block | | one thread | two threads |", "|---|---|---|---|"]
    for shape in one["shapes"]:
        shapes += [
            f"| {shape if key == 'norms' else ''} | {LABELS[key]} | {spread(one['shapes'][shape][key])} | "
            f"{spread(two['shapes'][shape][key])} |"
            for key in ("norms", "tokens")
        ]
    gauge = ["| training | warm reading | step that reads norms |", "|---|---|---|"]
    for model, row in facts["gauge"].items():
        if isinstance(row, dict):
            gauge.append(f"| {model} | {row['reading_over_step']:.2f} | {row['step_with_norms_over_step']:.3f} |")
    named = {"speed.inc": lines, "speed_shapes.inc": shapes, "speed_gauge.inc": gauge}
    return {name: "\n".join(table) + "\n" for name, table in named.items()}


def flames(picture: Path, seconds: float) -> None:
    """Sample the Python stack of the main thread, and draw how often each function was in it."""
    torch.set_num_threads(1)
    run, main, done, stacks = one_site(), threading.get_ident(), threading.Event(), Counter[tuple[str, ...]]()

    def sample() -> None:
        while not done.wait(0.001):
            frame, names = sys._current_frames().get(main), []
            while frame is not None:
                if "rankscope" in frame.f_code.co_filename and "benchmarks" not in frame.f_code.co_filename:
                    names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
                frame = frame.f_back
            if names:
                stacks[tuple(reversed(names))] += 1

    run()
    watcher = threading.Thread(target=sample)
    watcher.start()
    end, rounds, used = time.monotonic() + seconds, 0, time.process_time()
    while time.monotonic() < end:
        run()
        rounds += 1
    used = (time.process_time() - used) / rounds
    done.set()
    watcher.join()
    picture.write_text(drawn(stacks, f"{1e3 * used:.0f} ms of processor time per site, {sum(stacks.values())} samples"))


def drawn(stacks: Mapping[tuple[str, ...], int], title: str, width: int = 1100, height: int = 18) -> str:
    """The stacks as an icicle: callers above, width by samples."""
    boxes: list[str] = []
    total, deepest = sum(stacks.values()), max(map(len, stacks))

    def draw(rows: list[tuple[tuple[str, ...], int]], depth: int, left: float) -> None:
        parts: dict[str, list[tuple[tuple[str, ...], int]]] = {}
        for stack, count in rows:
            if len(stack) > depth:
                parts.setdefault(stack[depth], []).append((stack, count))
        for name, own in sorted(parts.items()):
            size = width * sum(count for _, count in own) / total
            shade = 70 + sum(map(ord, name)) % 20
            label = html.escape(name if size > 7 * len(name) else name[: int(size / 7)])
            y = (depth + 1) * height
            boxes.append(
                f'<g><title>{html.escape(name)} {100 * size / width:.1f}%</title><rect x="{left:.1f}" y="{y}" '
                f'width="{max(0.5, size - 0.5):.1f}" height="{height - 1}" fill="hsl(28,80%,{shade}%)"/>'
                f'<text x="{left + 2:.1f}" y="{y + 13}" font-size="11" font-family="monospace">{label}</text></g>'
            )
            draw(own, depth + 1, left)
            left += size

    draw(list(stacks.items()), 0, 0.0)
    tall = (deepest + 2) * height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" width="{width}" height="{tall}">'
    return f'{head}<text x="2" y="13" font-size="12" font-family="sans-serif">{title}</text>{"".join(boxes)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="print the ratios of this number of threads only")
    parser.add_argument("--flames", type=Path)
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()
    if args.flames:
        flames(args.flames, seconds=10.0)
        return
    if args.threads:
        print(json.dumps(of_threads(args.threads, args.rounds)))
        return
    from benchmarks import monitor_overhead

    facts: dict[str, Any] = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "threads": {}}
    for threads in (1, 2):
        words = [sys.executable, "-m", "benchmarks.speed", "--threads", str(threads), "--rounds", str(args.rounds)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        facts["threads"][str(threads)] = json.loads(done.stdout.splitlines()[-1])
        print(f"{threads} threads: {json.dumps(facts['threads'][str(threads)])}", flush=True)
    facts["metric_part"] = amdahl(*(facts["threads"][number]["site_seconds"] for number in ("1", "2")))
    facts["gauge"] = monitor_overhead.ratios(min(5, args.rounds))
    (args.out / "speed.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name, table in tables(facts).items():
        (args.out / name).write_text(table)
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
