"""Every notebook of the docs runs, and prints what its file shows; ``./dev outputs`` writes the files anew."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.printed import WRITE, agree

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs/notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path) -> dict[str, Any]:
    """The notebook with what a fresh kernel makes of it, without times and random identifiers."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    for place, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, f"cell-{place}"
        if cell.cell_type == "code":
            cell.execution_count = place
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.update({name: kept for name, kept in (("metadata", {}), ("execution_count", place))
                               if name in output})  # fmt: skip
    content: dict[str, Any] = json.loads(nbformat.writes(notebook))
    content["metadata"] = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    return content


def printed(notebook: dict[str, Any]) -> list[str]:
    """The text that each cell shows. Places in memory, and pictures, may differ."""
    cells = [cell.get("outputs", ()) for cell in notebook["cells"]]
    texts = [
        "\n".join("".join(output.get("text") or output.get("data", {}).get("text/plain", "")) for output in outputs)
        for outputs in cells
    ]
    return [re.sub(r" at 0x\w+", "", text) for text in texts]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPLBACKEND", raising=False)  # with another one than its own, a notebook has no figures
    now = executed(path, tmp_path)
    if os.environ.get(WRITE):
        path.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    shown = json.loads(path.read_text(encoding="utf-8"))
    for ours, theirs, cell in zip(printed(shown), printed(now), now["cells"], strict=True):
        assert agree(ours, theirs, varies=path.stem == "watch"), (
            f"{''.join(cell['source'])}\nprints now:\n{theirs}\nWrite it with: ./dev outputs"
        )
    pictures = [output.get("data", {}).keys() for cell in now["cells"] for output in cell.get("outputs", ())]
    assert any({"image/png", "text/html"} & data for data in pictures)


def test_the_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["doctor", "first_look", "own_architecture", "watch"]
