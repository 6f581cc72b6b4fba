"""Installs the wheel into fresh environments as users have them, and measures, watches and reports in each.

    python scripts/fresh_environments.py [--only NAME ...]

One environment has torch and nothing of transformers; the others have a release of transformers from both ends of the
range. Writes ``docs/data/environments.json``, with the date, what was installed, how long it took and what was printed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs/data/environments.json"
ENVIRONMENTS = {
    "torch alone": (),
    "transformers 4.45": ("transformers==4.45.2", "safetensors"),
    "transformers 4.57": ("transformers==4.57.1", "safetensors"),
}
TORCH = re.findall(r"^torch==\S+|^numpy==\S+", (ROOT / "constraints/ci.txt").read_text(), re.MULTILINE)
NAMED = ("torch", "transformers", "huggingface-hub", "huggingface_hub", "numpy", "pyarrow")
OWN = """
import time, torch
from torch import nn
began = time.perf_counter()
import rankscope as rs
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
run = rs.measure(encoder, torch.randn(4, 16, 32))
print("first number:", round(time.perf_counter() - began, 2), "s after import torch")
print("measure:", str(run.verdict).split(":")[0])
print("doctor:", str(rs.doctor(encoder, torch.randn(4, 16, 32))).splitlines()[0])
optimizer = torch.optim.AdamW(encoder.parameters(), 1e-3)
with rs.watch(encoder, optimizer) as watch:
    for _ in range(20):
        loss = watch.loss(encoder(torch.randn(8, 16, 32)).square().mean())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
print(watch)
run.save("run")
rs.report(["run"], "page.html")
print("report:", __import__("os").path.getsize("page.html") > 10_000)
"""
FROM_TRANSFORMERS = """
import torch, transformers
import rankscope as rs
for name in ("init:tiny-bert", "init:tiny-gpt2", "init:tiny-llama", "init:tiny-t5"):
    print(name, "measure:", str(rs.measure(name, rs.Inputs(sequences=2, tokens=16)).verdict).split(":")[0])
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
with rs.watch(model, optimizer) as watch:
    for _ in range(20):
        ids = torch.randint(0, 100, (8, 16))
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad(); loss.backward(); optimizer.step()
print(watch)
try:
    rs.measure(rs.Model("hub:gpt2", offload=True))
except rs.RankscopeError as error:
    print("offload:", error)
"""


def main() -> int:
    """Build the wheel, then try each environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    wanted = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        found = [tried(name, wheel, Path(folder)) for name in wanted]
    kept = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    kept = [one for one in kept if one["environment"] not in wanted] + found
    RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return max(one["exit"] for one in found)


def tried(name: str, wheel: Path, folder: Path) -> dict[str, object]:
    """What came of one environment."""
    home = folder / name.replace(" ", "-")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    python = home / "bin" / "python"
    torch = seconds(python, *TORCH)
    more = seconds(python, *ENVIRONMENTS[name]) if ENVIRONMENTS[name] else 0.0
    ours = seconds(python, f"{wheel}[report]")
    program = OWN + (FROM_TRANSFORMERS if ENVIRONMENTS[name] else "")
    done = subprocess.run([python, "-Wignore", "-c", program], capture_output=True, text=True, cwd=home, check=False)
    ask = "import importlib.metadata as m; print(*(d.metadata['Name'] + ' ' + d.version for d in m.distributions()))"
    words = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    versions = dict(zip(words[::2], words[1::2], strict=True))
    size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file() and not file.is_symlink())
    print(f"== {name}: torch {torch} s, others {more} s, rankscope {ours} s\n{done.stdout}{done.stderr[-2000:]}")
    return {
        "environment": name,
        "date": date.today().isoformat(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "seconds": {"torch": torch, "transformers": more, "rankscope": ours},
        "megabytes": round(size / 2**20),
        "versions": {key: versions[key] for key in NAMED if key in versions},
        "printed": done.stdout.splitlines(),
        "exit": done.returncode,
    }


def seconds(python: Path, *packages: str) -> float:
    """Wall time of an installation."""
    began = time.perf_counter()
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, stdout=subprocess.DEVNULL)
    return round(time.perf_counter() - began, 1)


if __name__ == "__main__":
    sys.exit(main())
