"""Configurations of small models, each changed in one to three places, as a local folder and in the hub's cache.

Both routes must give the same answer, a model or one of rankscope's errors, within 20 s of processor time.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

LONGEST = 20.0
COMMIT = "c0ffee" + "0" * 34
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


def base_folders(place: Path, families: tuple[str, ...]) -> dict[str, Path]:
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
    except Exception as error:  # noqa: BLE001  (what the test looks for)
        return f"NOT OURS {type(error).__name__}: {str(error)[:200]}"
    else:
        return f"{type(loaded.model).__name__} {loaded.parameters} {loaded.config_hash}"
    for path in sorted(hidden, key=lambda one: -len(str(one))):
        said = said.replace(str(path), "PLACE")
    return f"refused: {said}"
