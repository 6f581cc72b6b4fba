"""Peak memory of ``rankscope measure --states`` on hidden states of the shape of an 8B model, with verdict and report.

Writes one safetensors file of ``tokens x layers x width`` in bfloat16, as vLLM writes it, piece by piece; runs the
command in a process of its own; records its peak resident memory.

    python scripts/states_memory.py --out docs/data/states_memory.json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import torch


def write(path: Path, tokens: int, layers: int, width: int) -> None:
    """A file of random states with a common vector that grows with depth."""
    size = tokens * layers * width * 2
    entries = {
        "hidden_states": {"dtype": "BF16", "shape": [tokens, layers, width], "data_offsets": [0, size]},
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [size, size + 8 * tokens]},
    }
    raw = json.dumps(entries).encode()
    random = torch.Generator().manual_seed(0)
    common = torch.randn(width, generator=random) * torch.arange(layers).unsqueeze(1) / layers
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _ in range(tokens):
            x = (torch.randn(layers, width, generator=random) + common).to(torch.bfloat16)
            file.write(x.view(torch.int16).numpy().tobytes())
        file.write(torch.arange(tokens).numpy().tobytes())


def main() -> None:
    """Write, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path, run = Path(scratch) / "states.safetensors", Path(scratch) / "run"
        write(path, given.tokens, given.layers, given.width)
        started = time.perf_counter()
        program = [sys.executable, "-m", "rankscope"]
        subprocess.run([*program, "measure", "--states", str(path), "--out", str(run), "--quiet"], check=True)
        report = Path(scratch) / "report.html"
        subprocess.run([*program, "report", str(run), "--out", str(report), "--quiet"], check=True)
        found = {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "shape": {"tokens": given.tokens, "layers": given.layers, "width": given.width, "dtype": "bfloat16"},
            "file_bytes": path.stat().st_size,
            "report_bytes": report.stat().st_size,
            "seconds": round(time.perf_counter() - started, 1),
            "threads": torch.get_num_threads(),
            # ru_maxrss is in KiB on Linux: the largest of the two processes.
            "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "verdict": json.loads((run / "run.json").read_text())["verdict"],
        }
    print(json.dumps(found, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
