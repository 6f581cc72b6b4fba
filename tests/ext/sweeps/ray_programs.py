"""Programs that start Ray, each run in a process of its own by the tests; they print one JSON object at the end.

``local``: a Ray on this machine, started and stopped by the sweep itself. ``hurt``: two nodes, of which a worker, then
a node, then the driver is killed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

import rankscope as rs
from tests.ext.sweeps.cluster import done_in, kill_a_worker, kill_driver, small_cluster, start_sweep, wait_for

SMALL: dict[str, Any] = {
    "models": ["init:tiny-bert", "init:tiny-gpt2"],
    "verbs": [{"measure": {"metrics": ["relative_residual"]}}],
    "inputs": {"sequences": 1, "tokens": 8},
}


def local(folder: Path) -> dict[str, Any]:
    """Two tasks that run, one that no node can hold, one that fails for a reason of its own."""
    models: list[Any] = [*SMALL["models"], {"model": "init:tiny-bert", "name": "huge", "memory": "900 TB"},
              {"model": "init:tiny-bert", "name": "wrong", "blocks": "nothing.*"}]  # fmt: skip
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten")
    models[1] = {"model": models[1], "inputs": {**SMALL["inputs"], "text": str(folder / "text.txt")}}
    status = rs.sweep({**SMALL, "models": models}, folder, workers=1)
    try:
        rs.sweep({**SMALL, "cpus": 500}, folder / "other", workers=1)
        refused = ""
    except rs.RankscopeError as error:
        refused = str(error)
    workers = rs.query(folder, "SELECT asked_bytes > peak_bytes AS fits FROM tasks WHERE state = 'done'").to_pylist()
    import ray

    return {**status.to_json(), "refused": refused, "fits": [row["fits"] for row in workers],
            "still up": ray.is_initialized()}  # fmt: skip


def hurt(folder: Path) -> dict[str, Any]:
    """Everything that can die dies once; then the sweep is started again."""
    plan, out = folder / "plan.yaml", folder / "out"
    plan.write_text(yaml.safe_dump({**SMALL, "seeds": list(range(30))}))
    killed: list[str] = []
    with small_cluster(2) as cluster:
        nodes = cluster.list_all_nodes()
        driver = start_sweep(plan, out, cluster.address)
        wait_for(lambda: done_in(out) >= 1 and any(kill_a_worker(node) for node in nodes), driver)
        killed.append(f"worker after {done_in(out)}")
        cluster.remove_node(nodes[-1], allow_graceful=False)
        killed.append(f"node after {done_in(out)}")
        before = done_in(out)
        wait_for(lambda: done_in(out) > before, driver)
        kill_driver(driver)
        before = done_in(out)
        killed.append(f"driver after {before}")
        code = start_sweep(plan, out, cluster.address).wait()
    return {**rs.sweep(plan, out, serial=True).to_json(), "code": code, "killed": killed, "before": before}


if __name__ == "__main__":
    print(json.dumps({"local": local, "hurt": hurt}[sys.argv[1]](Path(sys.argv[2]))))
