"""``rankscope ls``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rankscope._citations import Cite
from rankscope._registry import Registry
from rankscope.cli.streams import print_json, results_console
from rankscope.extensions import installed


@dataclass(frozen=True)
class Listing:
    """What ``ls`` can list.

    Attributes:
        entries: all of them, with everything that ``--json`` prints.
        columns: what is printed otherwise.
    """

    entries: Callable[[], list[dict[str, Any]]]
    columns: tuple[str, ...]


_ROLE = re.compile(r":math:`([^`]*)`|``([^`]*)``")
"""A formula or a name in a docstring; a terminal shows it without markup."""

LISTINGS: Registry[Listing] = Registry("listing")


def ls_command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")] = False,
) -> None:
    """What can I choose from? Lists verbs, metrics, sites, families, presets, masks, theorems, remedies, extensions."""
    listing = LISTINGS[kind]
    entries = [
        {**entry, "summary": _ROLE.sub(lambda role: role[1] or role[2], entry["summary"])}
        if "summary" in entry
        else entry
        for entry in listing.entries()
    ]
    if as_json:
        from rankscope.runs.provenance import SCHEMA

        print_json({"schema": SCHEMA, "kind": kind, "entries": entries})
        return
    from rankscope.reporting.terminal import print_entries

    rows = [{name: _shown(entry[name]) for name in listing.columns} for entry in entries]
    print_entries(rows, results_console())


def facts_of(entry: object, *names: str) -> dict[str, Any]:
    """These attributes of an entry of a registry, as JSON: sets and tuples as lists, citations as text."""
    return {name: _plain(getattr(entry, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    return str(value) if isinstance(value, Cite) else value


def _verbs() -> list[dict[str, Any]]:
    from rankscope.verbs._spec import verbs_in_order

    return [
        {
            **facts_of(verb, "name", "question", "answer", "in_plans"),
            "offload": verb.takes("memory"),
            "parallel": [] if verb.execution is None else list(verb.execution.parallel_modes),
            "columns": list(verb.columns),
        }
        for verb in verbs_in_order()
    ]


def _metrics() -> list[dict[str, Any]]:
    from rankscope.metrics._spec import METRICS

    names = ("name", "side", "symbol", "at_collapse", "needs", "summary", "cites")
    return [facts_of(spec, *names) for spec in METRICS.values()]


def _sites() -> list[dict[str, Any]]:
    from rankscope.stream.sites import POOLED_SITES, SITES

    return [{"name": name, "summary": meaning} for name, meaning in {**SITES, **POOLED_SITES}.items()]


def _presets() -> list[dict[str, Any]]:
    from rankscope.models.presets import PRESETS

    return [
        {"name": f"init:{item.name}", "reads": item.input_kind, **facts_of(item, "model_type", "summary")}
        for item in PRESETS.values()
    ]


def _families() -> list[dict[str, Any]]:
    from rankscope.models.heads import FAMILIES

    return [facts_of(family, "name", "model_types", "layout", "position", "notes") for family in FAMILIES.values()]


def _masks() -> list[dict[str, Any]]:
    from rankscope.masks import MASKS

    names = ("name", "signature", "is_causal", "self_loops", "example", "summary", "cites")
    return [
        {**facts_of(spec, *names), "parameters": {one.name: one.meaning for one in spec.parameters}}
        for spec in MASKS.values()
    ]


def _variants() -> list[dict[str, Any]]:
    from rankscope.verbs.ablate.variants import VARIANTS

    return [
        {**facts_of(one, "name", "cites"), "operation": one.operation.describe(), "summary": one.meaning}
        for one in VARIANTS.values()
    ]


def _remedies() -> list[dict[str, Any]]:
    from rankscope.remedies import REMEDIES

    names = ("name", "strength", "strength_means", "neutral", "needs", "learnable", "parameters", "flops", "summary",
             "claim", "claims_tokens", "cites")  # fmt: skip
    return [facts_of(entry, *names) for entry in REMEDIES.values()]


def _extensions() -> list[dict[str, Any]]:
    return [
        {
            **facts_of(one, "name", "package"),
            "summary": f"{one.problem}." if one.extension is None else one.extension.summary,
            "usable": one.extension is not None,
            "requires": [] if one.extension is None else list(one.extension.requires),
            "adds": [] if one.extension is None else sorted(one.extension.adds),
        }
        for one in installed().values()
    ]


for _name, _listing in {
    "verbs": Listing(_verbs, ("name", "question", "offload", "parallel", "in_plans")),
    "metrics": Listing(_metrics, ("name", "side", "at_collapse", "needs", "summary")),
    "sites": Listing(_sites, ("name", "summary")),
    "families": Listing(_families, ("name", "layout", "position", "model_types")),
    "presets": Listing(_presets, ("name", "model_type", "reads", "summary")),
    "masks": Listing(_masks, ("signature", "summary")),
    "variants": Listing(_variants, ("name", "summary")),
    "remedies": Listing(_remedies, ("name", "strength", "needs", "summary")),
    "extensions": Listing(_extensions, ("name", "package", "requires", "summary")),
}.items():
    LISTINGS.add(_name, _listing)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
