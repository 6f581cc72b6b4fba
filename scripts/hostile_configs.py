"""Mutated configurations through the folder route and the hub route: ``python -m scripts.hostile_configs [COUNT]``.

Each configuration of a small model is changed in one to three places. It is loaded as a local folder and as a model in
the hub's cache, each in a process of its own without a network. Both must give the same answer, a model or one of
rankscope's errors, within 20 s of processor time and 1 GiB. The result is docs/data/hostile_configs.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 20.0
LARGEST = 2**30
COMMIT = "c0ffee" + "0" * 34
FAMILIES = (
    "bert",
    "gpt2",
    "llama",
    "gpt-neo",
    "t5",
    "mixtral",
    "vit",
    "swin",
    "wav2vec2",
    "deberta-v2",
    "mamba",
    "clip",
)
NUMBERS = (0, -1, 1, 3, 7, 10**5, 45_000, 10**6, 10**9, 10**12, 2**63, 10**30, 1e9, float("1e308"), 0.5)
ODD = (None, True, "", "a/b", "../x", "evil/kernel", [], {}, [[]], {"a": 1}, [10**9] * 4, [2] * 100_000, "x" * 10**5)
EXTRA: dict[str, Any] = {
    "num_labels": 10**9,
    "id2label": {str(number): "x" for number in range(200_000)},
    "num_hidden_layers": 10**9,
    "backbone": "evil/backbone",
    "use_timm_backbone": False,
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil--evil.Evil"},
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "attn_implementation": "evil/kernel",
    "_attn_implementation": "evil/kernel",
    "transformers_weights": "other.safetensors",
    "model_type": "detr",
    "max_position_embeddings": 45_000,
    "dtype": "float128",
    "rope_parameters": {"rope_type": "yarn", "factor": 1e30},
    "text_config": {"model_type": "qwen2", "num_hidden_layers": 10**9},
}


def mutated(config: dict[str, Any], drawn: random.Random) -> str:
    """One configuration, changed in one to three places; now and then a text that is not JSON any more."""
    changed = json.loads(json.dumps(config))
    for _ in range(drawn.randint(1, 3)):
        kind = drawn.random()
        keys = sorted(changed)
        if kind < 0.5:
            numbers = [key for key in keys if type(changed[key]) in (int, float)]
            changed[drawn.choice(numbers or keys)] = drawn.choice(NUMBERS)
        elif kind < 0.7:
            changed[drawn.choice(keys)] = drawn.choice(ODD)
        elif kind < 0.95:
            key = drawn.choice(sorted(EXTRA))
            changed[key] = EXTRA[key]
        else:
            del changed[drawn.choice(keys)]
    text = json.dumps(changed)
    damage = drawn.random()
    if damage < 0.03:
        return "[" * 100_000
    if damage < 0.05:
        return text[: len(text) // 2]
    return '{"a":' * 50_000 + text if damage < 0.06 else text


def base_folders(place: Path, families: tuple[str, ...] = FAMILIES) -> dict[str, Path]:
    """Small models with weights, by family."""
    import rankscope
    from tests.tiny_presets import PRESETS

    found = {}
    for family in families:
        if f"tiny-{family}" in PRESETS:
            rankscope.load(f"init:tiny-{family}").model.save_pretrained(place / family)
            found[family] = place / family
    return found


def routes(base: Path, text: str, place: Path) -> tuple[str, str, Path]:
    """Specs of the same files as a folder and as a model in a hub's cache, and that cache."""
    cache = place / "cache"
    snapshot = cache / "models--owner--name" / "snapshots" / COMMIT
    for folder in (place / "folder", snapshot):
        shutil.copytree(base, folder)
        (folder / "config.json").write_text(text)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    return str(place / "folder"), "owner/name", cache


def answer(spec: str, cache: Path, hidden: tuple[Path, ...]) -> str:
    """What loading a model gives: its class and size, or the words of the error without paths."""
    from huggingface_hub import constants

    import rankscope
    from rankscope.errors import RankscopeError

    constants.HF_HUB_CACHE = str(cache)
    constants.HF_HUB_OFFLINE = True
    try:
        loaded = rankscope.load(spec).loaded
    except RankscopeError as error:
        said = str(error)
    except MemoryError:
        return "MemoryError"
    except Exception as error:  # noqa: BLE001  (what the script looks for)
        return f"NOT OURS {type(error).__name__}: {str(error)[:200]}"
    else:
        return f"{type(loaded.model).__name__} {loaded.parameters} {loaded.config_hash}"
    for path in sorted(hidden, key=lambda one: -len(str(one))):
        said = said.replace(str(path), "PLACE")
    return f"refused: {said}"


def watched(act: Callable[[], str]) -> dict[str, Any]:
    """The answer of a process of its own, with its processor time, growth in bytes and attempts to connect."""

    def child(out: Any) -> None:
        tried: list[str] = []
        sys.addaudithook(lambda event, given: tried.append(str(given)) if event == "socket.connect" else None)
        resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, began = _peak(), time.process_time()
        said = act()
        seconds = time.process_time() - began
        out.put({"answer": said, "seconds": seconds, "bytes": _peak() - before, "tried": tried})

    forking: Any = multiprocessing.get_context("fork")
    out = forking.Queue()
    process = forking.Process(target=child, args=(out,))
    process.start()
    try:
        found: dict[str, Any] = out.get(timeout=10 * LONGEST)
    except queue.Empty:  # it has not ended, or was killed
        found = {"answer": "NOT ENDED", "seconds": 10 * LONGEST, "bytes": 0, "tried": []}
    process.kill()
    process.join()
    return found


def _peak() -> int:
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) * 1024


def main() -> None:
    """Try ``COUNT`` configurations, 200 by default, and write the result."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    os.environ["HF_HUB_OFFLINE"] = "1"
    drawn, failures, results = random.Random(37), [], []
    with tempfile.TemporaryDirectory() as scratch:
        bases = base_folders(Path(scratch))
        for number in range(count):
            family = sorted(bases)[number % len(bases)]
            text = mutated(json.loads((bases[family] / "config.json").read_text()), drawn)
            place = Path(scratch) / str(number)
            folder, hub, cache = routes(bases[family], text, place)
            hidden = (Path(folder), cache / "models--owner--name" / "snapshots" / COMMIT)
            both = [watched(partial(answer, spec, cache, hidden)) for spec in (folder, hub)]
            wrong = _wrong(both)
            results += both
            if wrong:
                failures.append({"number": number, "family": family, "wrong": wrong, "config": text[:2000]})
                print(number, family, wrong, [one["answer"][:300] for one in both], text[:300], flush=True)
            shutil.rmtree(place)
    summary = {
        "configurations": count,
        "routes": ["folder", "hub"],
        "families": sorted(bases),
        "loaded": sum(not one["answer"].startswith("refused") for one in results),
        "refused": sum(one["answer"].startswith("refused") for one in results),
        "longest_seconds": round(max(one["seconds"] for one in results), 1),
        "largest_growth_mib": max(one["bytes"] for one in results) // 2**20,
        "connections": sum(len(one["tried"]) for one in results),
        "failures": failures,
        "reasons": Counter(_reason(one["answer"]) for one in results).most_common(12),
    }
    print(json.dumps({key: value for key, value in summary.items() if key != "failures"}, indent=1))
    if not failures and count >= 200:
        (ROOT / "docs" / "data" / "hostile_configs.json").write_text(json.dumps(summary, indent=1) + "\n")
    sys.exit(bool(failures))


def _reason(said: str) -> str:
    return " ".join(said.replace("PLACE", "").split()[:6]) if said.startswith("refused") else said.split()[0]


def _wrong(both: list[dict[str, Any]]) -> list[str]:
    found = [] if both[0]["answer"] == both[1]["answer"] else ["other answers"]
    for one in both:
        found += ["not ours"] if one["answer"].startswith(("NOT", "MemoryError")) else []
        found += ["too long"] if one["seconds"] > LONGEST else []
        found += ["too large"] if one["bytes"] > LARGEST else []
        found += ["connected"] if one["tried"] else []
    return found


if __name__ == "__main__":
    main()
