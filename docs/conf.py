"""Sphinx configuration. Tables of metrics and compatibility are made from data by ``docs/_ext/generated.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from rankscope import __version__

project = "rankscope"
author = "The rankscope developers"
copyright = "the rankscope developers"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinxcontrib.bibtex",
    "generated",
]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = f"rankscope {release}"
html_static_path = ["_static"]

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_mock_imports: list[str] = []
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = True
# Types of other projects, and jaxtyping shape strings, have no page here.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|nn|transformers|pathlib|os|collections|typing|pyarrow|pa|pandas|pd|matplotlib|numpy|np|rich)(\..*)?",
    ),
    (r"py:.*", r"[A-Z]\w*"),
    (r"py:.*", r"rankscope\.verbs\..*"),  # verbs are documented under the names they are exported by
]
