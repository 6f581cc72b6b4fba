"""Run the ten training loops of ``examples/watch`` as they are and with the one line that watches them, and compare.

Each loop runs twice in a process of its own, with the lines of rankscope and without, and the final weights are
compared bit by bit. What was read, and the diff of each loop, goes to ``docs/data/monitor``. A host that is not
installed is skipped, and what is recorded of it stays. Nothing is downloaded::

    python scripts/watch_hosts.py
    python scripts/watch_hosts.py --only nanogpt --nanogpt CHECKOUT   # of github.com/karpathy/nanoGPT
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
LOOPS = ROOT / "examples" / "watch"
OUT = ROOT / "docs" / "data" / "monitor" / "hosts.json"
STEPS = 12


@dataclass(frozen=True)
class Host:
    """A loop: its title on the page, its file, the package that it needs, and what to import before it is forked."""

    title: str
    file: str
    package: str
    module: str = "transformers"


HOSTS = {
    "plain": Host("A loop of your own", "plain_loop.py", "torch"),
    "nanogpt": Host("nanoGPT's `train.py`", "train.py", "torch"),
    "keras-like": Host("A class with `compile` and `fit`, as in Keras", "keras_like_loop.py", "torch"),
    "trainer": Host("`transformers.Trainer`", "trainer_loop.py", "transformers"),
    "lightning": Host("Lightning", "lightning_loop.py", "lightning", "lightning"),
    "accelerate": Host("accelerate", "accelerate_loop.py", "accelerate", "accelerate"),
    "trl": Host("TRL", "trl_loop.py", "trl", "trl.trainer.sft_trainer"),
    "sentence-transformers": Host(
        "sentence-transformers", "sentence_transformers_loop.py", "sentence-transformers", "sentence_transformers"
    ),
    "composer": Host("Composer", "composer_loop.py", "mosaicml", "composer"),
    "olmo-core": Host("OLMo-core", "olmo_core_loop.py", "ai2-olmo-core", "olmo_core.train"),
    "torchtitan": Host("A loop with the shape of torchtitan's", "torchtitan_shape_loop.py", "torch"),
}


def without(source: str) -> str:
    """The loop before the line was added."""
    lines = source.splitlines(keepends=True)
    found = []
    for line in lines:
        if "rankscope" in line and line.lstrip().startswith("import"):
            if found and not found[-1].strip() and lines[lines.index(line) - 1].strip() == "":
                found.pop()
            continue
        if "rs.watch(" in line:
            continue
        found.append(line)
    return "".join(found)


def nanogpt(checkout: Path) -> str:
    """``train.py`` with the line, where the model was wrapped and compiled and training begins."""
    source = (checkout / "train.py").read_text()
    place, first = "# training loop\n", "import torch\n"
    assert source.count(place) == 1
    assert source.count(first) == 1
    source = source.replace(place, f"watch = rs.watch(model, optimizer)\n\n{place}")
    return source.replace(first, f"{first}import rankscope as rs\n")


def diff(name: str, source: str) -> str:
    """What the line changes, as a unified diff with little context."""
    file = HOSTS[name].file
    lines = difflib.unified_diff(
        without(source).splitlines(), source.splitlines(), f"a/{file}", f"b/{file}", lineterm="", n=2
    )
    return "\n".join(lines) + "\n"


def run(file: Path, arguments: Sequence[str]) -> None:
    """Run a loop in this process, and write what it left: a hash of the weights, and what was read."""
    torch.set_num_threads(1)
    os.chdir(file.parent)
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.parent))
    found = runpy.run_path(str(file), run_name="__main__")
    model, watch = found["model"], found.get("watch", getattr(found.get("trainer"), "watch", None))
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    told: dict[str, Any] = {"weights": hashlib.sha256(bits).hexdigest()}
    if watch is not None:
        history = watch.history
        told |= {
            "line": repr(watch),
            "readings": len(history),
            "losses": int(history["loss"].notna().sum()) if "loss" in history else 0,
            "alarms": [alarm.name for alarm in watch.alarms],
        }
    Path("told.json").write_text(json.dumps(told))


def in_process(source: str, file: str, beside: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a source in a folder and a process of its own, forked so that imports are paid once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for other in beside.glob("*.py"):
            (folder / other.name).write_text(other.read_text())
        if (beside / "data").exists():
            prepare_text(folder)
        (folder / file).write_text(source)
        process = torch.multiprocessing.get_context("fork").Process(target=run, args=(folder / file, arguments))
        process.start()
        process.join()
        assert process.exitcode == 0, f"{file} failed"
        return dict(json.loads((folder / "told.json").read_text()))


def prepare_text(folder: Path) -> None:
    """The built-in sample text by characters, as nanoGPT's ``prepare.py`` would write it."""
    import numpy as np

    from rankscope.models.inputs.text import sample_text

    text = sample_text()
    names = {letter: number for number, letter in enumerate(sorted(set(text)))}
    data = folder / "data" / "sample"
    data.mkdir(parents=True)
    for part in ("train", "val"):
        np.array([names[letter] for letter in text], dtype=np.uint16).tofile(data / f"{part}.bin")


NANOGPT = [
    "--dataset=sample", "--device=cpu", "--compile=False", "--dtype=float32", "--n_layer=3", "--n_head=2",
    "--n_embd=32", "--block_size=32", "--batch_size=8", "--gradient_accumulation_steps=2", "--max_iters=12",
    "--eval_interval=100", "--eval_iters=1", "--always_save_checkpoint=False", "--dropout=0.0",
]  # fmt: skip


def source_of(name: str, checkout: Path | None) -> str:
    """A loop with its line."""
    if name == "nanogpt":
        assert checkout is not None
        return nanogpt(checkout)
    return (LOOPS / HOSTS[name].file).read_text()


def seen(name: str, checkout: Path | None) -> dict[str, Any]:
    """Run one loop with and without the line."""
    host, source = HOSTS[name], source_of(name, checkout)
    beside, arguments = (LOOPS, []) if checkout is None or name != "nanogpt" else (checkout, NANOGPT)
    watched = in_process(source, host.file, beside, arguments)
    bare = in_process(without(source), host.file, beside, arguments)
    same = watched.pop("weights") == bare["weights"]
    return {
        "date": date.today().isoformat(),
        "version": f"{host.package} {version(host.package)}",
        "diff": diff(name, source),
        "weights_are_those_without_the_line": same,
        **watched,
    }


def page(told: dict[str, Any]) -> str:
    """The diffs, each with what was seen."""
    lines = ["| loop | run with | readings | with the loss | weights as without the line |", "|---|---|---|---|---|"]
    for name, facts in told.items():
        if "readings" not in facts:
            lines.append(f"| {HOSTS[name].title} | not run yet | | | |")
            continue
        same = "same bits" if facts["weights_are_those_without_the_line"] else "**differ**"
        title, loss = HOSTS[name].title, f"{facts['losses']} of {facts['readings']}"
        lines.append(f"| {title} | {facts['version']} | {facts['readings']} | {loss} | {same} |")
    for name, facts in told.items():
        lines += ["", f"**{HOSTS[name].title}**", "", "```diff", facts["diff"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def write(told: dict[str, Any], out: Path) -> None:
    """The record, and the table and diffs of the page."""
    ordered = {name: told[name] for name in HOSTS if name in told}
    out.write_text(json.dumps(ordered, indent=1) + "\n")
    out.with_suffix(".inc").write_text(page(ordered))


def main() -> None:
    """Run what is installed, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=HOSTS, nargs="+", default=tuple(HOSTS))
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--diffs", action="store_true", help="write the diffs, and run nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    told = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only:
        if name == "nanogpt" and options.nanogpt is None:
            print("nanogpt: no checkout was given")
            continue
        told.setdefault(name, {})["diff"] = diff(name, source_of(name, options.nanogpt))
        write(told, options.out)
        try:
            version(HOSTS[name].package)
        except PackageNotFoundError:
            print(f"{name}: {HOSTS[name].package} is not installed")
            continue
        if options.diffs:
            continue
        importlib.import_module(HOSTS[name].module)
        told[name] = seen(name, options.nanogpt)
        print(f"{name}: {json.dumps({key: value for key, value in told[name].items() if key != 'diff'})}", flush=True)
        write(told, options.out)


if __name__ == "__main__":
    main()
