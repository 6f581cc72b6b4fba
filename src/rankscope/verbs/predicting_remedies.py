"""``predict`` with remedies: the design as it is, and under every remedy its parameters can say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope._errors import UnsupportedOperationError
from rankscope.models.designs import design_of
from rankscope.remedies import REMEDIES, remedied
from rankscope.runs.run import Run
from rankscope.theory.designs.design import Design
from rankscope.verbs.predicting import predict
from rankscope.verbs.remedy_words import parsed_remedy
from rankscope.views import number


def predict_remedies(
    design: Design | str | Path,
    remedies: Sequence[str] | None = None,
    *,
    seeds: int = 3,
    tokens: int | None = None,
    most_blocks: int | None = None,
    map: tuple[str, str] | None = None,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Run:
    """Predict a design, and the same design under remedies, at initialisation.

    Args:
        design: as for ``predict``.
        remedies: names, each as ``NAME`` or ``NAME=STRENGTH``; None for all that a design can say.
        seeds: how many initialisations to sample, of each.
        tokens: context length.
        most_blocks: how far to follow tokens that do not agree.
        map: two parameters over which to map the design as it is.
        seed: of the first initialisation.
        changes: other values of the design.
        progress: show a progress bar.

    Returns:
        The run of ``predict`` for the design as it is, with ``extra["remedies"]``: for each remedy what it changes, the
        relative residual after the last block, the depth at which tokens agree and the class, the one that keeps tokens
        furthest apart first.

    Example:
        >>> small = Design(depth=4, width=64, heads=4, tokens=16)
        >>> run = predict_remedies(small, ["skipinit"], seeds=1, changes={"weight_std": 0.125})
        >>> run.extra["remedies"][0]["name"]
        'skipinit'
    """
    run = predict(
        design,
        changes,
        seeds=seeds,
        tokens=tokens,
        most_blocks=most_blocks,
        map=map,
        seed=seed,
        progress=progress,
    )
    plain = design if isinstance(design, Design) else design_of(design)[0]
    plain = plain.changed(**{**(changes or {}), **({} if tokens is None else {"tokens": tokens})})
    entries, refused = [_entry("none", {}, run)], []
    names = remedies or [name for name, entry in REMEDIES.items() if entry.design is not None]
    for word in dict.fromkeys(names):
        name, strength = parsed_remedy(word)
        try:
            treated = remedied(plain, name, strength)
        except UnsupportedOperationError as error:
            refused.append(f"{word} was left out: {error}")
            continue
        found = predict(treated, seeds=seeds, tokens=tokens, most_blocks=most_blocks, seed=seed, progress=progress)
        changed = {key: value for key, value in treated.to_json().items() if value != plain.to_json()[key]}
        entries.append(_entry(word, changed, found))
    entries.sort(key=lambda entry: -entry["log10_relative_residual"])
    return dataclasses.replace(
        run,
        verdict=f"{run.verdict} {_sentence(entries, seeds)}",
        notes=(*run.notes, *refused),
        extra={**run.extra, "remedies": entries},
    )


def _entry(name: str, changed: Mapping[str, Any], run: Run) -> dict[str, Any]:
    return {
        "name": name,
        "changes": dict(changed),
        "log10_relative_residual": run.evidence[0]["value"],
        "agreement": run.extra["agreement"],
        "class": run.extra["class"],
    }


def _sentence(entries: Sequence[Mapping[str, Any]], seeds: int) -> str:
    """Where each ends, best first."""
    ends = ", ".join(f"{entry['name']} {number(10 ** entry['log10_relative_residual'])}" for entry in entries)
    return f"Relative residual after the last block under remedies ({seeds} seeds, no training): {ends}."
