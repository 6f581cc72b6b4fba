"""Directives that list what the registries hold: theorems with their code and tests, masks, remedies, alarms, verbs.

``statements-index``
    One section per registered theorem: formula, hypotheses, source, code, and the tests that name it.
``registry-table``
    One row per entry of ``masks``, ``remedies``, ``alarms`` or ``presets``.
``commands-table``
    One row per command, with the page that explains it.
``exported-api``
    The documentation of the public names on one page of the API.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from generated import GeneratedTable, as_markdown, markdown_table
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto"
EXPLAINED_IN = {
    "env": "doctor.md",
    "ls": "../reference/metrics.md",
    "query": "sweep.md",
    "selftest": "doctor.md",
}
"""Pages of commands that have none of their own name, as seen from ``docs/howto``."""


def cited(cites: tuple[Any, ...]) -> str:
    """Citations of an entry, as Markdown."""
    return "; ".join(f"{{cite}}`{c.key}`" + (f", {c.place}" if c.place else "") for c in cites)


def tests_naming(word: str) -> list[Path]:
    """Test files that name ``word``."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if word in path.read_text(encoding="utf-8")]


class StatementsIndex(GeneratedTable):
    """One section per theorem, made from its declaration."""

    def lines(self) -> list[str]:
        from rankscope.ext.theory.theorems import THEOREMS

        return [line for theorem in THEOREMS.values() for line in (*self.section(theorem), "")]

    def section(self, theorem: Any) -> list[str]:
        place = Path(inspect.getsourcefile(theorem.function) or "")
        self.env.note_dependency(str(place))
        source = cited(theorem.cites) or "derived for this project"
        return [
            f"## {theorem.name.replace('_', ' ')}",
            "",
            as_markdown(theorem.summary),
            "",
            "$$",
            theorem.statement,
            "$$",
            "",
            f"- **Source:** {source}. **Kind:** {theorem.sides}.",
            f"- **Holds if:** {'; '.join(theorem.hypotheses) or 'always'}.",
            f"- **Code:** {self.link(place)}",
            f"- **Tests:** {self.tests(theorem.name)}",
        ]

    def tests(self, name: str) -> str:
        return "; ".join(map(self.link, tests_naming(name))) or "none names it yet."

    def link(self, path: Path) -> str:
        """A link to the file itself, which is copied beside the page."""
        here = path.resolve().relative_to(ROOT)
        up = "/".join([".."] * (1 + self.env.docname.count("/")))
        return f"{{download}}`{here} <{up}/{here}>`"


class RegistryTable(GeneratedTable):
    """The argument names the registry."""

    required_arguments = 1

    def lines(self) -> list[str]:
        return REGISTRIES[self.arguments[0]]()


def masks_lines() -> list[str]:
    from rankscope.masks import MASKS

    rows = ([f"`{m.signature}`", as_markdown(m.summary), cited(m.cites)] for m in MASKS.values())
    return markdown_table(["mask", "who sees whom", "source"], rows)


def remedies_lines() -> list[str]:
    from rankscope.remedies import REMEDIES

    rows = (
        [f"`{r.name}`", as_markdown(r.summary), f"{r.strength:g}: {r.strength_means}", r.parameters, cited(r.cites)]
        for r in REMEDIES.values()
    )
    return markdown_table(["remedy", "what it changes", "strength", "parameters", "source"], rows)


def alarms_lines() -> list[str]:
    from rankscope.monitor import ALARMS

    rows = (
        [f"`{a.name}`", as_markdown(a.summary), ", ".join(f"`{m}`" for m in a.metrics), str(a.readings), cited(a.cites)]
        for a in ALARMS.values()
    )
    return markdown_table(["alarm", "raised when", "reads", "readings in a row", "source"], rows)


def presets_lines() -> list[str]:
    from rankscope.models.presets import PRESETS

    rows = ([f"`init:{p.name}`", p.model_type, p.input_kind, p.summary] for p in PRESETS.values())
    return markdown_table(["spec", "model type", "reads", ""], rows)


REGISTRIES: Mapping[str, Callable[[], list[str]]] = {
    "masks": masks_lines,
    "remedies": remedies_lines,
    "alarms": alarms_lines,
    "presets": presets_lines,
}


class CommandsTable(GeneratedTable):
    """Every command of the command line, from its own help."""

    def lines(self) -> list[str]:
        import typer.main

        from rankscope.cli.app import command_line

        commands = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]
        rows = ([self.named(name), str(command.help).strip().split("\n")[0]] for name, command in commands.items())
        monitor = [f"[`rs.watch`]({self.up()}howto/monitor.md) (Python)", "Is my training run collapsing?"]
        return markdown_table(["command", "answers"], [*rows, monitor])

    def named(self, name: str) -> str:
        page = f"{name}.md" if (HOWTO / f"{name}.md").is_file() else EXPLAINED_IN.get(name)
        if page is None:
            return f"`{name}`"
        return f"[`{name}`]({self.up()}howto/{page})"

    def up(self) -> str:
        """From the page to the folder of the documentation."""
        return "../" * self.env.docname.count("/")


API_PAGES = {
    "models": ("Model", "load", "Inputs", "Surgery", "Stream", "Design"),
    "results": ("Run", "load_run", "compare", "report"),
    "watching": ("watch", "Gauge"),
}
"""Public names by page of the API; every other one is a verb."""


class ExportedApi(GeneratedTable):
    """The public names of one page of the API: a key of :data:`API_PAGES`, or ``verbs``."""

    required_arguments = 1

    def lines(self) -> list[str]:
        import rankscope
        from rankscope.extensions import available
        from rankscope.verbs._spec import VERBS

        elsewhere = {"METRICS", "RankscopeError", *(name for names in API_PAGES.values() for name in names)}
        public = [name for name in rankscope.__all__ if not name.startswith("_")]
        added = {name for extension in available() for name in extension.names}
        verbs = sorted({*public, *VERBS, *added} - elsewhere)
        chosen = verbs if self.arguments[0] == "verbs" else API_PAGES[self.arguments[0]]
        body = [line for name in chosen for line in self.entry(name, getattr(rankscope, name))]
        return ["```{eval-rst}", *body, "```"]

    def entry(self, name: str, value: object) -> list[str]:
        if inspect.isclass(value):
            return [f".. autoclass:: rankscope.{name}", "   :members:", ""]
        return [f".. autofunction:: rankscope.{name}", ""]


def setup(app: Sphinx) -> dict[str, object]:
    """Register the directives."""
    app.add_directive("statements-index", StatementsIndex)
    app.add_directive("registry-table", RegistryTable)
    app.add_directive("commands-table", CommandsTable)
    app.add_directive("exported-api", ExportedApi)
    return {"version": "1", "parallel_read_safe": True}
