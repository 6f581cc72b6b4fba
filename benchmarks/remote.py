"""A model read from a server on this machine at a limited speed, compared with the same model in a local folder.

    python scripts/make_random_model.py llama-3b
    python -m benchmarks.remote ~/.cache/rankscope-scale/llama-3b --bound  # writes docs/data/remote.json
    python -m benchmarks.remote FOLDER --gbit 1 --sequences 8 --tokens 128 --no-record

The server speaks the endpoints of the hub and is limited to ``--gbit`` over all connections. Both runs are processes of
their own, one after the other. Peak memory is VmHWM; peak disk is the largest size of the folder for temporary files
and the hub's cache, looked at ten times a second. The time is that of the call to ``measure``, and is compared with the
larger of the transfer (bytes read at the limit) and the local run. CPU time is that of the process without the server,
and says more than the time on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.streaming import peak_bytes, same_bits
from rankscope import Inputs, Model
from rankscope.runs.run import load_run

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "data" / "remote.json"


def child(given: argparse.Namespace) -> None:
    """One run in this process, with what it took on the last line."""
    from rankscope.ext.theory.bound.run import bound
    from rankscope.verbs.measure.run import measure

    measure("init:tiny-llama", Inputs(sequences=1, tokens=8))  # imports are not part of the comparison
    started, used = time.perf_counter(), time.process_time()
    if given.child == "bound":
        run = bound(given.folder, weights_only=True)
        facts = dict(run.extra["weights"])
    else:
        shape = {"sequences": given.sequences, "tokens": given.tokens, "batch": given.batch}
        run = measure(Model(given.folder, offload=True), Inputs(**shape))
        facts = dict(run.extra["offload"])
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    run.save(given.out)
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak_bytes(), **facts}))


def reads_only(given: argparse.Namespace) -> dict[str, Any]:
    """What ``bound --weights-only`` reads, without its arithmetic: bytes and requests compared with Q, K, V and O."""
    from huggingface_hub import constants

    from rankscope.ext.theory.lazy_blocks import lazy_model
    from rankscope.models.weight_files.shapes import shapes_of
    from tests.hub_server import Served, serving

    folder = Path(given.folder).expanduser()
    stated = {
        path.name: "0" * 64 for path in folder.glob("*.safetensors")
    }  # hashing them would take longer than reading
    with serving(Served(folder, bandwidth=given.gbit * 1e9 / 8, hashes=stated)) as served:
        constants.HF_HUB_OFFLINE, constants.ENDPOINT = False, served.address
        constants.HUGGINGFACE_CO_URL_TEMPLATE = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        lazy = lazy_model("hub:tiny", with_mlps=False)
        started, used = time.perf_counter(), time.process_time()
        blocks = sum(1 for _ in lazy.blocks())
        seconds, cpu = time.perf_counter() - started, time.process_time() - used
    assert lazy.folder.traffic is not None
    facts = {"date": date.today().isoformat(), "blocks": blocks, **lazy.folder.traffic.described}
    attention = shapes_of(folder).attention
    # The server is a thread of the same process here, so that its CPU time is in the figure.
    return {
        **facts,
        "attention_bytes": attention,
        "bytes_over_attention": facts["bytes_read"] / attention,
        "seconds": seconds,
        "cpu_seconds_with_server": cpu,
    }


def in_a_process(model: str, kind: str, out: Path, given: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    """What ``child`` says, and how large its temporary files became."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [sys.executable, "-m", "benchmarks.remote", model, "--child", kind, "--out", str(out)]
        words += ["--sequences", str(given.sequences), "--tokens", str(given.tokens), "--batch", str(given.batch)]
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": scratch, "TMPDIR": scratch}
        environment |= {"HF_HUB_OFFLINE": "0"}
        done = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        largest = [0]
        watching = threading.Thread(target=_watch, args=(done, Path(scratch), largest))
        watching.start()
        said, _ = done.communicate()
        watching.join()
    if done.returncode:
        raise SystemExit(f"{kind} ended with {done.returncode}")
    return {**json.loads(said.splitlines()[-1]), "peak_disk_bytes": largest[0]}


def _watch(process: subprocess.Popen[str], folder: Path, largest: list[int]) -> None:
    while process.poll() is None:
        sizes = []
        for path in folder.rglob("*"):
            try:
                sizes.append(path.stat().st_size)
            except OSError:  # removed meanwhile
                continue
        largest[0] = max(largest[0], sum(sizes))
        time.sleep(0.1)


def compared(given: argparse.Namespace) -> dict[str, Any]:
    """The local run, the remote run and the weights-only run, with the ratios."""
    limit = given.gbit * 1e9 / 8
    folder = Path(given.folder).expanduser()
    words = [sys.executable, "-m", "tests.hub_server", str(folder), str(limit)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as kept:
            local = in_a_process(str(folder), "local", Path(kept) / "local", given, endpoint)
            remote = in_a_process("hub:tiny", "remote", Path(kept) / "remote", given, endpoint)
            bound = in_a_process("hub:tiny", "bound", Path(kept) / "bound", given, endpoint) if given.bound else None
            same = same_bits(load_run(Path(kept) / "local"), load_run(Path(kept) / "remote"))
    finally:
        server.terminate()
        server.wait()
    from rankscope.models.weight_files.shapes import shapes_of

    sizes = shapes_of(folder)
    transfer = remote["bytes_read"] / limit
    found = {
        "date": date.today().isoformat(),
        "model": folder.name,
        "parameters": sizes.parameters,
        "weights_bytes": sizes.nbytes,
        "gbit_per_second": given.gbit,
        "sequences": given.sequences,
        "tokens": given.tokens,
        "rows_equal_bit_by_bit": same,
        "local": local,
        "remote": remote,
        "transfer_seconds": transfer,
        "bytes_over_weights": remote["bytes_read"] / sizes.nbytes,
        "time_over_larger": remote["seconds"] / max(transfer, local["seconds"]),
        "cpu_over_local": remote["cpu_seconds"] / local["cpu_seconds"],
    }
    if bound is not None:
        found |= {"bound": bound, "bound_bytes_over_attention": bound["bytes_read"] / sizes.attention}
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder")
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bound", action="store_true", help="also run bound --weights-only, which takes long")
    parser.add_argument("--reads", action="store_true", help="only count what bound --weights-only reads")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given)
        return
    before = json.loads(OUT.read_text(encoding="utf-8")) if OUT.is_file() else {}
    if given.reads:
        found = {**before, "weights_only_reads": reads_only(given)}
    else:
        found = compared(given)
        found |= {name: before[name] for name in ("weights_only_reads",) if name in before}
    print(json.dumps(found, indent=2))
    if not given.no_record:
        OUT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
