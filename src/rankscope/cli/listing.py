"""``rankscope ls``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

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


def _kinds() -> list[str]:
    return list(LISTINGS)


def ls_command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="What to list.", autocompletion=_kinds)],
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


def _verbs() -> list[dict[str, Any]]:
    from rankscope.verbs._spec import verbs_in_order

    return [
        {
            "name": verb.name,
            "question": verb.question,
            "answer": verb.answer,
            "offload": verb.takes("work"),
            "parallel": [] if verb.execution is None else list(verb.execution.parallel_modes),
            "in_plans": verb.in_plans,
            "columns": list(verb.columns),
        }
        for verb in verbs_in_order()
    ]


def _metrics() -> list[dict[str, Any]]:
    from rankscope.metrics._spec import METRICS

    return [
        {
            "name": spec.name,
            "side": spec.side,
            "symbol": spec.symbol,
            "at_collapse": spec.at_collapse,
            "needs": spec.needs,
            "summary": spec.summary,
            "cites": [str(cite) for cite in spec.cites],
        }
        for spec in METRICS.values()
    ]


def _sites() -> list[dict[str, Any]]:
    from rankscope.stream.sites import POOLED_SITES, SITES

    return [{"name": name, "summary": meaning} for name, meaning in {**SITES, **POOLED_SITES}.items()]


def _presets() -> list[dict[str, Any]]:
    from rankscope.models.presets import PRESETS

    return [
        {"name": f"init:{item.name}", "model_type": item.model_type, "reads": item.input_kind, "summary": item.summary}
        for item in PRESETS.values()
    ]


def _families() -> list[dict[str, Any]]:
    from rankscope.models.heads import FAMILIES

    return [
        {
            "name": family.name,
            "model_types": list(family.model_types),
            "layout": family.layout,
            "position": family.position,
            "notes": list(family.notes),
        }
        for family in FAMILIES.values()
    ]


def _masks() -> list[dict[str, Any]]:
    from rankscope.masks import MASKS

    return [
        {
            "name": spec.name,
            "signature": spec.signature,
            "is_causal": spec.is_causal,
            "self_loops": spec.self_loops,
            "example": spec.example,
            "parameters": {parameter.name: parameter.meaning for parameter in spec.parameters},
            "summary": spec.summary,
            "cites": [str(cite) for cite in spec.cites],
        }
        for spec in MASKS.values()
    ]


def _variants() -> list[dict[str, Any]]:
    from rankscope.verbs.ablate.variants import VARIANTS

    return [
        {
            "name": variant.name,
            "operation": variant.operation.describe(),
            "summary": variant.meaning,
            "cites": [str(cite) for cite in variant.cites],
        }
        for variant in VARIANTS.values()
    ]


def _remedies() -> list[dict[str, Any]]:
    from rankscope.remedies import REMEDIES

    return [
        {
            "name": entry.name,
            "strength": entry.strength,
            "strength_means": entry.strength_means,
            "neutral": entry.neutral,
            "needs": sorted(entry.needs),
            "learnable": entry.learnable,
            "parameters": entry.parameters,
            "flops": entry.flops,
            "summary": entry.summary,
            "claim": entry.claim,
            "claims_tokens": entry.claims_tokens,
            "cites": [str(cite) for cite in entry.cites],
        }
        for entry in REMEDIES.values()
    ]


def _extensions() -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "package": one.package,
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
