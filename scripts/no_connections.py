"""Every verb on every small preset from a local folder, with connections counted.

::

    python -m scripts.no_connections parts.jsonl                # writes docs/data/no_connections.json
    python -m scripts.no_connections parts.jsonl --backwards    # beside it, to be finished in half the time

Each model is saved to a folder and read from there, in a process of its own in which the hub counts as reachable
(``HF_HUB_OFFLINE=0``). An attempt to connect or to look up a name is refused and recorded. What a verb answers does not
matter here: a family that it refuses opens no connection either. The first argument is a file of finished parts, one
per line, after which a run that was stopped resumes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 1800.0
"""Seconds for one model; ten of processor time are usual, but a busy machine may give them slowly."""
INPUTS: dict[str, Any] = {"sequences": 1, "tokens": 8}
_BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
HOSTILE: dict[str, dict[str, Any]] = {
    "detr": {"model_type": "detr", "use_timm_backbone": False, "backbone": "owner/name", "backbone_config": None},
    "zoedepth": {"model_type": "zoedepth", "backbone": "owner/name", "backbone_config": None},
    "upernet": {"model_type": "upernet", "backbone": "owner/name", "use_timm_backbone": False},
    "mask2former": {"model_type": "mask2former", "backbone": "owner/name", "use_timm_backbone": False},
    "rt_detr": {"model_type": "rt_detr", "backbone": "owner/name", "use_timm_backbone": False},
    "dpt": {"model_type": "dpt", "backbone": "owner/name", "is_hybrid": False},
    "depth_anything": {"model_type": "depth_anything", "backbone": "owner/name"},
    "vitmatte": {"model_type": "vitmatte", "backbone": "owner/name"},
    "timm_wrapper": {"model_type": "timm_wrapper", "architecture": "hf-hub:owner/name"},
    "timm_backbone": {"model_type": "timm_backbone", "backbone": "hf-hub:owner/name", "use_pretrained_backbone": True},
    "bert with a kernel": {**_BERT, "x": [{"attn_implementation": "owner/name"}]},
    "bert with experts": {**_BERT, "experts_implementation": "owner/name"},
    "bert with code": {**_BERT, "auto_map": {"AutoModel": "owner/name--evil.Evil"}},
}
"""Configurations that name another repository."""


@contextmanager
def refusing_connections(tried: list[str]) -> Iterator[None]:
    """Refuse every connection to a network and every look-up of a name, and note it."""
    import socket

    def refuse(*words: Any, **more: Any) -> Any:
        tried.append(repr(words[-1] if words else more)[:200])
        raise OSError("no connections here")

    saved = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
    looking_up, creating = socket.getaddrinfo, socket.create_connection
    try:
        for name in saved:
            setattr(socket.socket, name, refuse)
        socket.getaddrinfo = socket.create_connection = refuse
        yield
    finally:
        for name, value in saved.items():
            setattr(socket.socket, name, value)
        socket.getaddrinfo, socket.create_connection = looking_up, creating


def verbs() -> dict[str, Callable[[str], object]]:
    """Every verb that reads a model, on small inputs."""
    import rankscope as rs

    return {
        "measure": lambda spec: rs.measure(spec, rs.Inputs(**INPUTS)),
        "measure --offload": lambda spec: rs.measure(rs.Model(spec, offload=True), rs.Inputs(**INPUTS)),
        "ablate": lambda spec: rs.ablate(spec, rs.Inputs(**INPUTS)),
        "exact": lambda spec: rs.exact(spec, rs.Inputs(**INPUTS)),
        "decompose": lambda spec: rs.decompose(spec, rs.Inputs(**INPUTS)),
        "bound": lambda spec: rs.bound(spec, rs.Inputs(**INPUTS)),
        "bound --weights-only": lambda spec: rs.bound(spec, weights_only=True),
        "remedy": lambda spec: rs.remedy(spec, rs.Inputs(**INPUTS), remedies=["stronger_skip"]),
        "doctor": lambda spec: rs.doctor(spec),
        "predict": lambda spec: rs.predict(spec, seeds=1, tokens=8, most_blocks=2),
    }


def attempts(spec: str, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The attempts to connect of each verb, and how each ended."""
    tried: list[str] = []
    ended: dict[str, str] = {}
    with refusing_connections(tried):
        for name, act in verbs().items():
            if names is not None and name not in names:
                continue
            before = len(tried)
            try:
                act(spec)
                ended[name] = "answered"
            except Exception as error:  # noqa: BLE001  (only connections matter here)
                ended[name] = type(error).__name__
            if len(tried) > before:
                ended[name] += f", tried {tried[before:]}"
    return {"tried": tried, "ended": ended}


def _in_a_process(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    forking: Any = multiprocessing.get_context("fork")
    out = forking.Queue()
    process = forking.Process(target=lambda: out.put(act()))
    process.start()
    try:
        found: dict[str, Any] = out.get(timeout=LONGEST)
    except queue.Empty:
        found = {"tried": [], "ended": {}, "late": True}
    process.kill()
    process.join()
    return found


def main() -> None:
    """Try all presets that have not been tried and write the result."""
    os.environ["HF_HUB_OFFLINE"] = "0"
    import rankscope
    from tests.tiny_presets import TINY_PRESETS

    parts = Path(sys.argv[1])
    names = [*HOSTILE, *sorted(TINY_PRESETS)]
    with tempfile.TemporaryDirectory() as scratch:

        def of_a_preset(name: str) -> dict[str, Any]:
            rankscope.load(f"init:{name}").model.save_pretrained(Path(scratch) / name)
            return attempts(str(Path(scratch) / name))

        def of_a_config(name: str) -> dict[str, Any]:
            folder = Path(scratch) / name
            rankscope.load("init:tiny-bert").model.save_pretrained(folder)
            (folder / "config.json").write_text(json.dumps(HOSTILE[name]))
            found = [attempts(spec, ("measure", "predict")) for spec in (str(folder), f"init:{folder}")]
            return {"tried": found[0]["tried"] + found[1]["tried"], "ended": found[0]["ended"]}

        of_a_preset("tiny-bert")  # imports what the processes share
        for name in reversed(names) if "--backwards" in sys.argv else names:
            if name in _finished(parts):
                continue
            found = _in_a_process(partial(of_a_config if name in HOSTILE else of_a_preset, name))
            with parts.open("a") as stream:
                stream.write(json.dumps({"name": name, **found}) + "\n")
            print(name, found, flush=True)
            _write(_finished(parts), len(names) - len(HOSTILE))
    sys.exit(any(found["tried"] for found in _finished(parts).values()))


def _finished(parts: Path) -> dict[str, dict[str, Any]]:
    lines = parts.read_text().splitlines() if parts.exists() else []
    return {found.pop("name"): found for found in map(json.loads, lines)}


def _write(results: dict[str, dict[str, Any]], presets: int) -> None:
    ended = [end for found in results.values() for end in found["ended"].values()]
    summary = {
        "date": date.today().isoformat(),
        "presets": presets,
        "tried": sum(name not in HOSTILE and not found.get("late") for name, found in results.items()),
        "hostile_configurations": sum(name in HOSTILE for name in results),
        "calls": len(ended),
        "answered": ended.count("answered"),
        "refused_or_failed": {word: ended.count(word) for word in sorted({*ended} - {"answered"})},
        "not_finished_in_time": sorted(name for name, found in results.items() if found.get("late")),
        "connections": {name: found["tried"] for name, found in results.items() if found["tried"]},
    }
    (ROOT / "docs" / "data" / "no_connections.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
