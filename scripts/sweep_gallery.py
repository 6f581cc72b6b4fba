"""The sweep of the documentation: real and random models on a Ray cluster of three nodes that is hurt on the way.

While it runs, a worker and then a node are killed, then the driver itself with ``kill -9``; it is started again, and
every row is there exactly once and equal to that of a serial run. Writes the atlas page to ``docs/_static/sweep`` and
what happened to ``docs/data/sweep.json``::

    python -m scripts.sweep_gallery --folder /tmp/gallery      # about ten minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from scripts.sweep_cluster import done_in, kill_a_worker, kill_driver, small_cluster, start_sweep, wait_for

import rankscope as rs
from rankscope._files import cache_folder
from rankscope.models.pretrained import PRETRAINED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "_static" / "sweep" / "atlas.html"
FACTS = ROOT / "docs" / "data" / "sweep.json"
WORDS = ROOT / "docs" / "data" / "sweep.inc"
PRESETS = (
    "bert",
    "roberta",
    "albert",
    "gpt2",
    "llama",
    "qwen3",
    "gemma2",
    "modernbert",
    "t5",
    "vit",
    "xlnet",
    "mixtral",
)
STEPS = (0, 25, 50, 100, 150, 200, 300, 400)
COORDINATES = (
    "verb, model, checkpoint, variant, seed, metric, site, stack, layer, head, sequence, mask, weights, arithmetic"
)


def train_checkpoints(folder: Path) -> list[str]:
    """A GPT-2 of six blocks learns the built-in sample text by heart; a checkpoint now and then."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from rankscope.models.inputs import prepare_inputs

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_embd=64, n_layer=6, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    ids = prepare_inputs(rs.load(model).loaded, None, sequences=16, tokens=64, batch=16)[0].inputs["input_ids"]
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    places = []
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            places.append(str(folder / f"checkpoint-{step}"))
            model.save_pretrained(places[-1])
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return places


def plan_of(folder: Path) -> dict[str, Any]:
    """Twelve random models, the trained ones that are in the cache, and one training run."""
    few = ("measure", "ablate")
    models: list[dict[str, Any]] = [{"model": f"init:tiny-{name}", "name": f"tiny-{name}"} for name in PRESETS]
    models[PRESETS.index("vit")]["verbs"] = list(few)
    models[PRESETS.index("xlnet")]["verbs"] = list(few)
    for name, entry in PRETRAINED.items():
        if (cache_folder() / name / "model.safetensors").is_file():
            own = {"texts": list(entry.texts)} if entry.texts else {}
            models.append({"model": str(cache_folder() / name), "name": name, "verbs": list(few),
                           "inputs": {**own, "sequences": 4, "tokens": 64}})  # fmt: skip
    models.append({"name": "small-gpt2", "checkpoints": train_checkpoints(folder / "training"), "verbs": ["measure"]})
    return {
        "models": models,
        "verbs": ["measure", {"ablate": {"variants": ["pure", "+skip", "full"]}}, "exact"],
        "variants": ["full", "pure"],
        "inputs": {"sequences": 4, "tokens": 32},
    }


def hurt(cluster: Any, driver: subprocess.Popen[bytes], out: Path, total: int) -> list[dict[str, Any]]:
    """Kill a worker, a node and the driver, each while tasks run; what was done to whom, and when."""
    nodes = cluster.list_all_nodes()
    done: list[dict[str, Any]] = []
    wait_for(lambda: done_in(out) >= total // 6, driver)
    wait_for(lambda: any(kill_a_worker(node) for node in nodes), driver)
    done.append({"killed": "a worker at work", "tasks done": done_in(out)})
    wait_for(lambda: done_in(out) >= total // 3, driver)
    cluster.remove_node(nodes[-1], allow_graceful=False)
    done.append({"killed": "a node", "tasks done": done_in(out)})
    wait_for(lambda: done_in(out) >= total // 2, driver)
    kill_driver(driver)
    done.append({"killed": "the driver (kill -9)", "tasks done": done_in(out)})
    return done


def checked(out: Path, serial: Path) -> dict[str, int]:
    """Rows in all, rows that are there twice, and rows that differ from the serial run; by query."""
    twice = f"SELECT {COORDINATES}, count(*) AS n FROM rows GROUP BY ALL HAVING n > 1"
    keyed = f"SELECT task, {COORDINATES}, value, status FROM rows ORDER BY ALL"
    one, other = rs.query(out, keyed), rs.query(serial, keyed)
    tasks = "SELECT count(*) AS n, count(DISTINCT task) AS tasks FROM rows"
    found = rs.query(out, tasks).to_pylist()[0]
    differ = one.num_rows if one.num_rows != other.num_rows else sum(
        a != b for a, b in zip(_comparable(one), _comparable(other), strict=True)
    )  # fmt: skip
    return {"rows": found["n"], "tasks with rows": found["tasks"], "rows twice": rs.query(out, twice).num_rows,
            "rows that differ from a serial run": differ}  # fmt: skip


def _comparable(table: Any) -> list[tuple[Any, ...]]:
    """Rows as tuples in which an undefined value equals itself."""
    return [tuple(repr(value) if isinstance(value, float) else value for value in row.values())
            for row in table.to_pylist()]  # fmt: skip


def sentences(facts: dict[str, Any]) -> str:
    """What happened, in words, for the documentation."""
    killed = "; ".join(f"{event['killed']} after {event['tasks done']} tasks" for event in facts["events"])
    return (
        f"{facts['tasks']} tasks over {facts['models']} models on a Ray cluster of {facts['nodes']} nodes (one machine "
        f"with two cores, {facts['date']}). Killed on the way: {killed}. Started again, it ended with "
        f"{facts['tasks with rows']} tasks and {facts['rows']:,} rows, {facts['rows twice']} of them twice, and "
        f"{facts['rows that differ from a serial run']} different from those of a serial run.\n"
    )


def write_page(folder: Path) -> None:
    """The atlas of a sweep in ``folder``, as the documentation shows it."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    rs.atlas("families", PAGE, title="An atlas of small models")


def main() -> None:
    """Run it all; leave with an error if a row is missing, double or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--page-only", action="store_true", help="only write the page, from a folder that is there")
    asked = parser.parse_args()
    if not asked.page_only:
        shutil.rmtree(asked.folder, ignore_errors=True)
        asked.folder.mkdir(parents=True)
        _run(asked.folder.resolve())
    write_page(asked.folder.resolve())


def _run(folder: Path) -> None:
    plan, out, serial = folder / "plan.yaml", folder / "families", folder / "serial"
    plan.write_text(yaml.safe_dump(plan_of(folder), sort_keys=False), encoding="utf-8")
    from rankscope.ext.sweeps.plan import plan_of as read_plan
    from rankscope.ext.sweeps.tasks import tasks_of

    tasks = list(tasks_of(read_plan(plan)))
    models = {task.facts["model"] for task in tasks}
    print(f"{len(tasks)} tasks over {len(models)} models", flush=True)
    started = time.perf_counter()
    with small_cluster(3) as cluster:
        first = start_sweep(plan, out, cluster.address)
        events = hurt(cluster, first, out, len(tasks))
        print(*events, sep="\n", flush=True)
        again = start_sweep(plan, out, cluster.address)
        code = again.wait()
    seconds = time.perf_counter() - started
    status = rs.sweep(plan, out, serial=True)  # nothing is left to run: the status
    print(status)
    rs.sweep(plan, serial, serial=True, progress=True)
    found = checked(out, serial)
    facts = {"date": date.today().isoformat(), "tasks": len(tasks), "models": len(models), "nodes": 3, "events": events,
             "exit code of the second driver": code, "seconds": round(seconds, 1), **found,
             "counts": dict(status.counts)}  # fmt: skip
    FACTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    WORDS.write_text(sentences(facts), encoding="utf-8")
    print(json.dumps(facts, indent=1))
    if found["rows twice"] or found["rows that differ from a serial run"] or found["tasks with rows"] != len(tasks):
        raise SystemExit("not every row is there exactly once")


if __name__ == "__main__":
    main()
