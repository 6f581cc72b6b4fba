"""Installs the wheel into fresh environments as users have them, and measures, watches and reports in each.

    python scripts/fresh_environments.py [--only NAME ...]

One environment has torch and nothing of transformers; two have old releases of transformers beside the torch of CI; the
others are the oldest, a middle and the newest set of versions, each with another Python. In each, relative residuals
are compared with those of plain forward hooks. Writes ``docs/data/environments.json``, with the date, what was
installed, how long it took and what was printed, and its table. Needs interpreters of the versions named below.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs/data/environments.json"
TABLE = RECORD.with_suffix(".inc")
CORE = ("torch", "numpy", "pyarrow", "typer", "rich", "tqdm", "jaxtyping", "jinja2")
NAMED = ("torch", "transformers", "huggingface_hub", "safetensors", "numpy", "pyarrow")


def pins(file: str, names: tuple[str, ...] = CORE) -> tuple[str, ...]:
    """The pins of these packages in a file of constraints."""
    lines = (ROOT / "constraints" / file).read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line.partition("==")[0] in names)


@dataclass(frozen=True)
class Environment:
    """A Python, what is pinned in it (torch included), and what is installed of transformers."""

    python: str
    pinned: tuple[str, ...]
    transformers: tuple[str, ...] = ()


CI = pins("ci.txt", ("torch", "numpy"))
ENVIRONMENTS = {
    "torch alone": Environment("3.11", CI),
    "transformers 4.45": Environment("3.11", CI, ("transformers==4.45.2", "safetensors")),
    "transformers 4.57": Environment("3.11", CI, ("transformers==4.57.1", "safetensors")),
    "oldest": Environment(
        "3.10", ("torch==2.4.0", *pins("oldest.txt", CORE[1:])), ("transformers==4.45.0", "safetensors==0.4.3")
    ),
    "middle": Environment("3.12", pins("middle.txt"), pins("middle.txt", ("transformers", "safetensors"))),
    "newest": Environment("3.13", (), ("transformers", "safetensors")),
}
BY_HAND = '''
def check(model, blocks, given):
    """The largest relative difference between our numbers and those of hooks on these blocks."""
    run, kept = rs.measure(model, given), []
    keep = lambda _, __, out: kept.append((out[0] if isinstance(out, tuple) else out).double())
    handles = [block.register_forward_hook(keep) for block in blocks]
    with torch.no_grad():
        model(**given) if isinstance(given, dict) else model(given)
    for handle in handles:
        handle.remove()
    rows = (row for row in run.table.to_pylist() if (row["metric"], row["site"]) == ("relative_residual", "block.out"))
    ours = torch.tensor([row["value"] for row in rows], dtype=torch.float64).sort().values
    hand = torch.cat([(x - x.mean(1, keepdim=True)).norm(dim=(1, 2)) / x.norm(dim=(1, 2)) for x in kept]).sort().values
    worst = float((ours / hand - 1).abs().max())
    print(f"  {len(ours)} relative residuals, equal to those of forward hooks within 1e-6: {worst < 1e-6}")
    assert worst < 1e-6, worst
    return run
'''
OWN = """
import time, torch
from torch import nn
began = time.perf_counter()
import rankscope as rs
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
run = rs.measure(encoder, torch.randn(4, 16, 32))
print("first number:", round(time.perf_counter() - began, 2), "s after import torch")
print("own module, measure:", str(run.verdict).split(":")[0])
check(encoder.eval(), encoder.layers, torch.randn(4, 16, 32))
print("own module, doctor:", str(rs.doctor(encoder, torch.randn(4, 16, 32))).splitlines()[0])
optimizer = torch.optim.AdamW(encoder.train().parameters(), 1e-3)
with rs.watch(encoder, optimizer) as watch:
    for _ in range(20):
        loss = watch.loss(encoder(torch.randn(8, 16, 32)).square().mean())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
print("own module,", watch)
assert "disabled" not in str(watch)
run.save("run")
rs.report(["run"], "page.html")
print("report:", __import__("os").path.getsize("page.html"), "bytes of HTML")
"""
FROM_TRANSFORMERS = """
import re, torch, transformers
for name in ("tiny-bert", "tiny-gpt2", "tiny-llama", "tiny-t5"):
    model = rs.load("init:" + name).model
    numbered = re.compile(r"(?<!\\d\\.)\\b(layer|h|layers|block)\\.\\d+$")
    blocks = [part for place, part in model.named_modules() if numbered.search(place)]
    given = {"input_ids": torch.randint(20, 90, (3, 16))}
    if "t5" in name:
        given["decoder_input_ids"] = given["input_ids"]
    print(name + ", measure:", str(rs.measure("init:" + name, rs.Inputs(sequences=2, tokens=16)).verdict).split(":")[0])
    check(model, blocks, given)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100)).train()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
with rs.watch(model, optimizer) as watch:
    for _ in range(20):
        ids = torch.randint(0, 100, (8, 16))
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad(); loss.backward(); optimizer.step()
print("GPT-2,", watch)
assert "disabled" not in str(watch)
try:
    rs.measure(rs.Model("hub:gpt2", offload=True))
except rs.RankscopeError as error:
    print("offload:", str(error).split(". ")[0])
"""


def main() -> int:
    """Build the wheel, then try each environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    wanted = parser.parse_args().only
    kept = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        for name in wanted:
            found = tried(name, wheel, Path(folder))
            worst = max(worst, found["exit"])
            rows = {one["environment"]: one for one in [*kept, found]}
            kept = [rows[one] for one in ENVIRONMENTS if one in rows]
            RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            TABLE.write_text(table(kept), encoding="utf-8")
    return worst


def interpreter(version: str) -> str:
    """One that works: pyenv puts a command for each version on the path, also for those not switched on."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for command in (f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))):
        try:
            found = subprocess.run([command, "-c", "import ssl, venv"], capture_output=True, check=False)
        except FileNotFoundError:
            continue
        if found.returncode == 0:
            return command
    raise SystemExit(f"no Python {version} was found on the path")


def tried(name: str, wheel: Path, folder: Path) -> dict[str, Any]:
    """What came of one environment."""
    chosen = ENVIRONMENTS[name]
    home, limits = folder / name.replace(" ", "-"), folder / f"{name}.txt"
    limits.write_text("\n".join(chosen.pinned) + "\n")
    subprocess.run([interpreter(chosen.python), "-m", "venv", home], check=True)
    python = home / "bin" / "python"
    version = [pin.partition("==")[2] for pin in chosen.pinned if pin.startswith("torch==")]
    torch = seconds(python, str(ROOT / "scripts/cpu_only_torch.py"), *version, "-c", str(limits))
    install = ("-m", "pip", "install", "-q", "-c", str(limits))
    more = seconds(python, *install, *chosen.transformers) if chosen.transformers else 0.0
    ours = seconds(python, *install, f"{wheel}[report]")
    program = BY_HAND + OWN + (FROM_TRANSFORMERS if chosen.transformers else "")
    done = subprocess.run([python, "-Wignore", "-c", program], capture_output=True, text=True, cwd=home, check=False)
    ask = (
        "import importlib.metadata as m, json, platform; "
        "print(json.dumps({d.metadata['Name'].lower().replace('-', '_'): d.version for d in m.distributions()} "
        "| {'python': platform.python_version()}))"
    )
    versions = json.loads(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout)
    print(
        f"== {name}: torch {torch} s, others {more} s, rankscope {ours} s\n{done.stdout}{done.stderr[-2000:]}",
        flush=True,
    )
    return {
        "environment": name,
        "date": date.today().isoformat(),
        "python": versions["python"],
        "load": [round(one, 1) for one in os.getloadavg()],
        "seconds": {"torch": torch, "transformers": more, "rankscope": ours},
        "versions": {key: versions[key].partition("+")[0] for key in NAMED if key in versions},
        "printed": done.stdout.splitlines(),
        "exit": done.returncode,
    }


def seconds(python: Path, *command: str) -> float:
    """Wall time of an installation."""
    began = time.perf_counter()
    subprocess.run([python, *command], check=True, stdout=subprocess.DEVNULL)
    return round(time.perf_counter() - began, 1)


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each environment."""
    lines = [
        "| environment | Python | torch | transformers | numpy | install of the wheel | first number | outcome |",
        "|---|---|---|---|---|---:|---:|---|",
    ]
    for row in rows:
        versions, printed = row["versions"], "\n".join(row["printed"])
        first = re.search(r"first number: ([\d.]+)", printed)
        checked = sum(map(int, re.findall(r"(\d+) relative residuals, equal .* True", printed)))
        good = f"measured ({checked} values equal to hooks), watched, reported"
        cells = [row["environment"], row["python"], versions["torch"], versions.get("transformers", "none")]
        cells += [versions["numpy"], f"{row['seconds']['rankscope']} s", f"{first[1]} s" if first else "none"]
        lines.append("| " + " | ".join([*cells, good if row["exit"] == 0 else "failed"]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
