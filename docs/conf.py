"""Sphinx configuration. Tables of metrics and compatibility are made from data by ``docs/_ext/generated.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from generated import PROJECT_URLS
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from rankscope import __version__

project = "rankscope"
author = "The rankscope developers"
copyright = "the rankscope developers"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.bibtex",
    "formulas",
    "generated",
    "statements",
]
exclude_patterns = ["_build", "_generated", "notebooks"]
html_theme = "furo"
html_title = f"rankscope {release}"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]
html_css_files = ["rankscope.css"]
html_js_files = ["access.js"]
html_math_renderer = "mathml"
pygments_dark_style = "github-dark"
html_favicon = "_static/logo.svg"
html_theme_options = {
    "light_logo": "logo-light.svg",
    "dark_logo": "logo-dark.svg",
    "source_repository": PROJECT_URLS["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
smartquotes_action = "qe"  # quotes and ellipses; two hyphens begin an option
# [issue tracker](repo:issues) is a link into the repository that pyproject.toml names.
myst_url_schemes = {"http": None, "https": None, "mailto": None, "repo": PROJECT_URLS["Repository"] + "/{{path}}"}

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
        r"(torch|nn|transformers|pathlib|os|collections|contextlib|typing|pyarrow|pa|pandas|pd|matplotlib|numpy|np|rich)(\..*)?",
    ),
    (r"py:.*", r"[A-Z]\w*"),
    # Types in signatures, without a page of their own.
    (r"py:.*", r"rankscope\.(theory|monitor|surgery|masks|remedies|reporting)\..*"),
    (r"py:.*", r"rankscope\.runs\.(presenting|mask_\w+|comparison)(\..*)?"),
    (r"py:.*", r"rankscope\.ext\.sweeps\.results\..*"),
    (r"py:.*", r"rankscope\.verbs\..*"),  # verbs are documented under the names they are exported by
]


def _leave_out_of_search(app: Sphinx, env: BuildEnvironment) -> None:
    """Records of decisions are for those who look for them; a search is for users."""
    for page in env.found_docs:
        if page == "decisions":
            env.metadata[page]["nosearch"] = "true"


def setup(app: Sphinx) -> None:
    app.connect("env-updated", _leave_out_of_search)
