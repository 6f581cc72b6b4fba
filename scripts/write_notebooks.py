"""Write the notebooks of the docs as ``.ipynb`` with outputs and figures, from what the last ``./dev docs`` executed.

The sources are ``docs/notebooks/*.md``. After its introduction, each ``.ipynb`` has a cell that installs rankscope
where it is missing, as on Colab, and does nothing elsewhere; links point to the documentation.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "docs" / "notebooks"
EXECUTED = ROOT / "docs" / "_build" / "jupyter_execute" / "notebooks"
AGAIN = "Build the docs from the beginning: rm -r docs/_build && ./dev docs"
INSTALL = """\
# Installs rankscope where it is missing, as on Colab.
import importlib.util

if importlib.util.find_spec("rankscope") is None:
    %pip install -q 'rankscope[plot,frames]'"""


def main() -> int:
    """Write every notebook; 1 if the documentation was not built."""
    for source in sorted(SOURCES.glob("*.md")):
        executed = EXECUTED / f"{source.stem}.ipynb"
        if not executed.is_file():
            print(f"{executed.relative_to(ROOT)} is missing. Build the docs first: ./dev docs", file=sys.stderr)
            return 1
        notebook = json.loads(executed.read_text(encoding="utf-8"))
        if not has_outputs(notebook):
            print(f"{source.name} came from the cache, without outputs. {AGAIN}", file=sys.stderr)
            return 1
        target = source.with_suffix(".ipynb")
        target.write_text(written(notebook), encoding="utf-8")
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1024} KiB")
    return 0


def has_outputs(notebook: dict[str, Any]) -> bool:
    """Whether the build executed the notebook; one that it takes from its cache is kept without outputs."""
    return any(cell.get("outputs") for cell in notebook["cells"])


def written(notebook: dict[str, Any]) -> str:
    """The content of the file: without times and random identifiers, so that it changes only if a result does."""
    introduction, *rest = notebook["cells"]
    cells = [introduction, {"cell_type": "code", "source": INSTALL, "outputs": []}, *rest]
    content = {
        "cells": [told(cell, place) for place, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def told(cell: dict[str, Any], place: int) -> dict[str, Any]:
    """One cell; of a page's own directives nothing is left, and links lead to the documentation."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return {"cell_type": "markdown", "id": f"cell-{place}", "metadata": {}, "source": lines(outside(source))}
    outputs = [{**output, "metadata": {}} if "metadata" in output else output for output in cell["outputs"]]
    outputs = [{**output, "execution_count": place} if "execution_count" in output else output for output in outputs]
    return {
        "cell_type": "code",
        "execution_count": place,
        "id": f"cell-{place}",
        "metadata": {},
        "outputs": outputs,
        "source": lines(source),
    }


def outside(text: str) -> str:
    """Markdown that makes sense without Sphinx."""
    text = re.sub(r"^```\{notebook-links\}\n```\n+", "", text, flags=re.MULTILINE)
    here = f"{project_url('Documentation').rstrip('/')}/notebooks"
    return re.sub(r"\]\(([\w./]+)\.md(#[\w-]+)?\)", rf"]({here}/\1.html\2)", text).replace("/notebooks/../", "/")


def project_url(name: str) -> str:
    """An address of the project, as its metadata has it."""
    urls = dict(line.split(", ", 1) for line in metadata("rankscope").get_all("Project-URL") or ())
    return urls[name]


def lines(text: str) -> list[str]:
    """Lines as the format has them."""
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    raise SystemExit(main())
