"""Without an extra everything else works, and what needs it answers with the exact install line.

Each case runs in an interpreter of its own in which the packages of the extra cannot be imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.cli.environment import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"protobuf": "google.protobuf"}
FOR_CONTRIBUTORS = {"test", "test-all", "docs"}
ALIASES = {"monitor", "all"}
NOTHING_IMPORTED = {"accelerate"}
"""The caller hands over an object of it, so that it is there."""

RUN = "import rankscope as rs\nfrom tests.runs.builders import make_run, profile\n"
RUN += "run = make_run(profile({'relative_residual': [0.9, 0.8]}).table())\n"
CASES = {
    "hf": "import rankscope as rs\nrs.measure('init:tiny-bert')",
    "plot": RUN + "run.plot()",
    "frames": RUN + "run.to_frame()",
    "gguf": "import pathlib\npathlib.Path('w.gguf').write_bytes(b'GGUF')\nimport rankscope as rs\nrs.load('w.gguf')",
    "report": RUN + "run.save('run')\nrs.report(['run'], 'page.html')",
    "torchmetrics": "import rankscope.monitor.stateful.metric",
    "lightning": "import rankscope.monitor.hosts.lightning",
    "tensorboard": "from rankscope.monitor.sinks.tensorboard import TensorBoardSink\nTensorBoardSink('log')",
    "wandb": "from rankscope.monitor.sinks.wandb import WandbSink\nWandbSink()",
    "mlflow": "from rankscope.monitor.sinks.mlflow import MlflowSink\nMlflowSink()",
    "sweep": "import rankscope as rs\nrs.sweep({'models': ['init:tiny-bert'], 'verbs': ['measure']}, 'out')",
    "trackio": "from rankscope.monitor.sinks.trackio import TrackioSink\nTrackioSink()",
}
BLOCK = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == gone or name.startswith(gone + ".") for gone in GONE):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.metadata, importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in GONE else found(name, package)
sys.path.insert(0, ROOT)
"""


def optional_dependencies() -> dict[str, list[str]]:
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def without(packages: list[str], code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where none of these can be imported."""
    gone = [MODULES.get(package, package) for package in packages]
    program = f"GONE = {gone!r}\nROOT = {str(ROOT)!r}\n{BLOCK}\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, check=False)


def test_every_extra_for_users_has_a_case() -> None:
    assert set(CASES) == set(optional_dependencies()) - FOR_CONTRIBUTORS - ALIASES - NOTHING_IMPORTED
    assert set(CASES) | NOTHING_IMPORTED == set(EXTRAS)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("extra", CASES)
def test_a_missing_extra_is_answered_with_its_install_line(extra: str, tmp_path: Path) -> None:
    done = without(list(EXTRAS[extra]), CASES[extra], tmp_path)
    assert done.returncode == 1, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rankscope.errors.MissingExtraError: ")
    assert last.endswith(f"Install it with: pip install 'rankscope[{extra}]'")


def test_the_core_needs_no_extra(tmp_path: Path) -> None:
    everything = [package for packages in EXTRAS.values() for package in packages]
    everything = [
        package for package in everything if package not in ("jinja2", "accelerate")
    ]  # torch may look for them
    code = (
        "import torch\n"
        "import rankscope as rs\n"
        "layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)\n"
        "encoder = torch.nn.TransformerEncoder(layer, 2)\n"
        "run = rs.measure(encoder, torch.randn(2, 8, 16))\n"
        "run.save('run')\n"
        "rs.load_run('run')\n"
        "print(run)\n"
        "run._repr_html_()\n"
        "print(rs.exact(encoder, torch.randn(1, 8, 16), rs.Surgery(skip=0.0)).verdict)\n"
    )
    done = without(everything, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Verdict" in done.stdout
