"""Inside a folder that a stranger wrote: nothing in it runs, and no program it configures is started.

The folder holds what tools are known to obey: a repository whose settings name commands, files called like the
libraries, start-up files of Python, pytest and matplotlib, settings of trackers. Each thing of it that ran would leave
a file. An audit hook also lists every program that is started and every file of the folder that is opened.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.models.loading import load
from tests.faults.conftest import ENVIRONMENT, PATIENCE, ROOT

SMALL = ("--sequences", "1", "--tokens", "8", "--quiet")
SHADOWS = ("torch", "numpy", "transformers", "pyarrow", "rich", "matplotlib", "typer", "tokenizers", "ray", "pydantic")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = """
import json, os, sys
here, seen = os.getcwd(), {"started": [], "opened": []}

def listen(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"):
        seen["started"].append(str(arguments[0]))
    elif event == "open" and isinstance(arguments[0], (str, bytes)):
        place = os.path.abspath(os.fsdecode(arguments[0]))
        if place.startswith(here):
            seen["opened"].append(os.path.relpath(place, here))

sys.addaudithook(listen)
from rankscope.cli.app import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["rankscope", *words]
    try:
        main(words)
    except SystemExit as left:
        if left.code:
            raise
print(json.dumps(seen))
"""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder in which everything that runs writes a file ``ran-NAME`` next to the folder."""
    folder = tmp_path / "downloaded"
    home = folder / ".git"
    (home / "refs" / "heads").mkdir(parents=True)
    (home / "objects").mkdir()
    (home / "hooks").mkdir()
    (home / "HEAD").write_text("ref: refs/heads/main\n")
    (home / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    runs = f"sh -c 'touch {tmp_path}/ran-git'"
    (home / "config").write_text(
        f'[core]\n\trepositoryformatversion = 0\n\tfsmonitor = "{runs}"\n\tpager = "{runs}"\n\tsshCommand = "{runs}"\n'
        f'\thooksPath = hooks\n[alias]\n\trev-parse = "!{runs}"\n[diff]\n\texternal = "{runs}"\n'
    )
    (home / "index").write_bytes(b"DIRC\0\0\0\2\0\0\0\0")
    (home / "hooks" / "post-index-change").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran-hook\n")
    (home / "hooks" / "post-index-change").chmod(0o755)
    for name in (*SHADOWS, "sitecustomize", "usercustomize", "conftest"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / f'ran-{name}')!r}, 'w')\n")
    (folder / "matplotlibrc").write_text(
        "text.usetex: True\nps.usedistiller: ghostscript\nbackend: module://conftest\n"
    )
    (folder / ".env").write_text("HF_ENDPOINT=http://127.0.0.1:9\nRANKSCOPE_CACHE=/nowhere\n")
    (folder / "wandb").mkdir()
    (folder / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    (folder / "notebook.ipynb").write_text("{}")
    return folder


def done(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def what_ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.glob("ran-*"))


@pytest.mark.slow
def test_item_12_no_command_obeys_the_folder_it_is_called_in(trap: Path) -> None:
    """Measured, drawn, saved, compared and reported: no program is started but matplotlib's search for fonts."""
    program = trap.parent / "program.py"
    program.write_text(PROGRAM)
    run, figure = str(trap.parent / "run"), str(trap.parent / "figure.png")
    commands = [
        ["measure", "init:tiny-bert", *SMALL, "--out", run, "--figure", figure],
        ["exact", "init:tiny-gpt2", *SMALL, "--figure", str(trap.parent / "exact.svg")],
        ["doctor", "init:tiny-bert"],
        ["compare", run, run, "--figure", str(trap.parent / "compare.png")],
        ["report", run, "--out", str(trap.parent / "report.html")],
    ]
    ended = done(trap, str(program), json.dumps(commands))
    assert ended.returncode == 0, ended.stderr[-2000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert what_ran(trap) == []
    assert set(seen["started"]) <= {"fc-list"}
    assert {name for name in seen["opened"] if not name.startswith(".git/")} <= {"matplotlibrc"}, "read, not obeyed"
    saved = json.loads((Path(run) / "run.json").read_text())
    assert saved["provenance"]["git"] == {"commit": COMMIT, "dirty": None}
    assert Path(figure).stat().st_size > 1000


@pytest.mark.slow
def test_item_12_python_m_does_not_take_libraries_from_the_folder(trap: Path) -> None:
    ended = done(trap, "-m", "rankscope", "measure", "init:tiny-bert", *SMALL)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert what_ran(trap) == []


def test_python_m_cleans_the_path_before_its_first_import(trap: Path) -> None:
    """Also modules of Python itself, but for those that ``-m`` imports before any file of ours."""
    first = done(trap.parent, "-c", "import runpy, importlib.util, sys; print(*sys.modules)").stdout.split()
    names = {"__future__", *(name for name in sys.stdlib_module_names if not name.startswith("_"))}
    for name in names - {word.partition(".")[0] for word in first}:
        (trap / f"{name}.py").write_text(f"open({str(trap.parent / f'ran-{name}')!r}, 'w')\n")
    ended = done(trap, "-m", "rankscope", "--version")
    assert ended.stdout.startswith("rankscope "), ended.stderr[-2000:]
    assert what_ran(trap) == []


@pytest.mark.slow
def test_item_12_workers_of_a_sweep_do_not_take_libraries_from_the_folder(trap: Path) -> None:
    pytest.importorskip("ray")
    plan = trap.parent / "plan.yaml"
    plan.write_text("models: [init:tiny-bert]\nverbs: [measure]\ninputs: {sequences: 1, tokens: 8}\n")
    program = trap.parent / "program.py"
    program.write_text("from rankscope.cli.app import main\nimport sys\nmain(sys.argv[1:])\n")
    ended = done(trap, str(program), "sweep", str(plan), "--out", str(trap.parent / "out"), "--workers", "1")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert what_ran(trap) == []


def test_item_12_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    """Every file in which transformers looks for code: tokenizer, processors, generation, the model itself."""
    folder = tmp_path / "model"
    load("init:tiny-gpt2").model.save_pretrained(folder)
    code = f"open({str(tmp_path / 'ran-code')!r}, 'w')\nclass Any:\n    pass\n"
    for name in ("modeling", "tokenization", "processing", "custom_generate/generate"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling.Any", "AutoModel": "modeling.Any", "AutoTokenizer": "modeling.Any"}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"tokenizer_class": "Any", "auto_map": {"AutoTokenizer": ["tokenization.Any", "tokenization.Any"]}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**tokens, "chat_template": f"{{{{ ''.__class__.__mro__ and open('{tmp_path}/ran-template') }}}}"})
    )
    (folder / "vocab.json").write_text('{"a": 0, "b": 1}')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for name in ("processor_config", "preprocessor_config", "video_preprocessor_config", "feature_extractor_config"):
        other = {"auto_map": {"AutoProcessor": "processing.Any", "AutoImageProcessor": "processing.Any"}}
        (folder / f"{name}.json").write_text(json.dumps(other))
    (folder / "generation_config.json").write_text('{"custom_generate": "custom_generate"}')
    loaded = load(folder)
    assert loaded.tokenizer is None
    assert any("tokenizer could not be read" in note for note in loaded.notes)
    load(folder, model_class="GPT2LMHeadModel")
    assert not list(tmp_path.glob("ran-*"))


def test_item_12_links_in_a_model_folder_lead_to_no_other_file(tmp_path: Path) -> None:
    """A linked tokenizer is read as a tokenizer and refused as one; no word of the other file is told."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "swordfish"}')
    folder = tmp_path / "model"
    load("init:tiny-gpt2").model.save_pretrained(folder)
    (folder / "tokenizer.json").symlink_to(secret)
    loaded = load(folder)
    assert loaded.tokenizer is None
    assert "swordfish" not in " ".join(loaded.notes)
