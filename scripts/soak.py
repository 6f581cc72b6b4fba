"""Thousands of measures in one process, over many families and under random surgery: does anything pile up or stay?

After every measure the model must carry no hook, the process no mode and no more open files, and the weights must be
equal to their start to the bit; resident memory is written down. The figures go to ``docs/data/soak.json``::

    python scripts/soak.py --measures 2000 --seconds 3600
    python scripts/soak.py --measures 40 --seconds 0      # a look at it
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import rankscope as rs
from rankscope.errors import UnsupportedOperationError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import LoadedModel, load

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "data" / "soak.json"
FAMILIES = (
    "bert",
    "albert",
    "roberta",
    "distilbert",
    "electra",
    "modernbert",
    "deberta-v2",
    "gpt2",
    "opt",
    "gpt-neox",
    "bloom",
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "mixtral",
    "gpt-oss",
    "mamba",
    "t5",
    "vit",
    "dinov2",
    "xlnet",
)
SURGERY: tuple[dict[str, Any], ...] = (
    {},
    {"skip": 0.0},
    {"skip": 0.5},
    {"attention_skip": 0.0, "mlp_skip": 0.9},
    {"mlp": "drop"},
    {"norm": "identity"},
    {"norm": "rms"},
    {"mask": "causal"},
    {"mask": "window(1)", "mask_mode": "intersect"},
    {"temperature": 2.0},
    {"attention": "uniform"},
    {"attention": "centred"},
    {"heads": 0, "layers": 0},
)
SITES = ("block.in", "block.out", "attention.sum", "mlp.sum", "attention.probs", "final")
SAMPLES = 100


def fingerprint(model: nn.Module) -> str:
    """Every parameter and buffer, to the bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hooks_on(model: nn.Module) -> int:
    """Hooks of every kind on every module."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


def modes() -> int:
    """Function and dispatch modes that are in force."""
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()


def main() -> None:
    """Run, check after each measure, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measures", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="go on at least so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paced", action="store_true", help="spread the measures over the time, with rests between")
    parser.add_argument("--out", type=Path, default=FIGURES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chance, process = random.Random(options.seed), psutil.Process()
    models = {name: load(f"init:tiny-{name}") for name in FAMILIES}
    starts = {name: (fingerprint(one.model), hooks_on(one.model), output_of(one)) for name, one in models.items()}
    started, samples, counts = time.perf_counter(), [], {"measured": 0, "refused": 0}
    while counts["measured"] < options.measures or time.perf_counter() - started < options.seconds:
        name = chance.choice(FAMILIES)
        counts["measured" if one_measure(models[name], chance) else "refused"] += 1
        check(name, models[name], starts[name])
        due = started + options.seconds * counts["measured"] / options.measures
        if options.paced and due > time.perf_counter():
            time.sleep(due - time.perf_counter())
        if sum(counts.values()) % SAMPLES == 0:
            resident, files = process.memory_info().rss / 2**20, process.num_fds()
            samples.append([round(time.perf_counter() - started), counts["measured"], round(resident, 1), files])
            write(options.out, samples, counts, options.seed)
            print(samples[-1], flush=True)
    for name, one in models.items():
        if not torch.equal(output_of(one), starts[name][2]):
            raise SystemExit(f"{name} answers otherwise than at its start.")
    write(options.out, samples, counts, options.seed, finished=True)


def one_measure(loaded: LoadedModel, chance: random.Random) -> bool:
    """A measure under surgery drawn at random; False where this family cannot undergo it."""
    surgery = chance.choice(SURGERY)
    sites = chance.sample(SITES, chance.randint(1, 4))
    few = {"sequences": chance.randint(1, 3), "tokens": chance.choice((4, 8, 16)), "batch": chance.randint(1, 2)}
    try:
        with rs.operate(loaded.model, rs.Surgery(**surgery)):
            rs.measure(loaded.model, rs.Inputs(**few), sites=["block.out", *sites], null=chance.random() < 0.1)
    except UnsupportedOperationError:
        return False
    return True


def check(name: str, loaded: LoadedModel, start: tuple[str, int, Any]) -> None:
    """Nothing stayed on the model or in the process, and no weight moved."""
    if hooks_on(loaded.model) != start[1]:
        raise SystemExit(f"{name}: {hooks_on(loaded.model)} hooks, {start[1]} at the start.")
    if modes():
        raise SystemExit(f"{name}: {modes()} modes are still in force.")
    if fingerprint(loaded.model) != start[0]:
        raise SystemExit(f"{name}: the weights have changed.")


def output_of(loaded: LoadedModel) -> torch.Tensor:
    """What the model answers to its sample input."""
    batch = prepare_inputs(
        loaded, None, sequences=1, tokens=8, batch=1, tokens_policy="content", seed=0, random_tokens=True
    )[0]
    with torch.no_grad():
        found = batch.run(loaded.model)
    return found[0] if not isinstance(found, torch.Tensor) else found


def write(place: Path, samples: list[Any], counts: dict[str, int], seed: int, *, finished: bool = False) -> None:
    """The figures so far; memory is compared between the second tenth and the last tenth."""
    tenth = max(1, len(samples) // 10)
    middle = [
        sum(sample[2] for sample in part) / len(part) for part in (samples[tenth : 2 * tenth], samples[-tenth:]) if part
    ]
    facts = {
        "date": date.today().isoformat(),
        "families": len(FAMILIES),
        **counts,
        "seed": seed,
        "finished": finished,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        "resident_growth": round(middle[-1] / middle[0] - 1, 4) if len(middle) == 2 else None,
        "columns": ["seconds", "measured", "resident MiB", "open files"],
        "samples": samples,
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
