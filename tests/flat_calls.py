"""Calls a verb with flat options, as the command line has them; for tests that combine options of several nouns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import rankscope as rs
from rankscope import options

NOUN = {option.name: option.noun for option in (*options.INPUTS_FIELDS, *options.SURGERY_FIELDS, *options.MODEL_FIELDS)}


def flat(function: Callable[..., Any], model: Any, inputs: Any = None, **given: Any) -> Any:
    """``function(model, inputs, surgery, ...)`` with each option in the noun it belongs to."""
    fields: dict[str | None, dict[str, Any]] = {"model": {}, "inputs": {}, "surgery": {}, None: {}}
    for name, value in given.items():
        fields[NOUN.get(name)][name] = value
    subject = rs.Model(model, **fields["model"]) if fields["model"] else model
    fed = rs.Inputs(inputs, **fields["inputs"]) if fields["inputs"] else inputs
    if function is rs.operate:
        return rs.operate(subject, fields["surgery"], inputs=fed)
    if function is rs.Gauge:
        return rs.Gauge(subject, fed, **fields[None])
    return function(subject, fed, fields["surgery"] or None, **fields[None])


def handed_over(words: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """All settings of a call ``verb(model, inputs, surgery, ...)``, each under its own name."""
    found = dict(options)
    for noun in words:
        for entry in dataclasses.fields(noun):
            value = getattr(noun, entry.name)
            if found.get(entry.name) is None:
                found[entry.name] = value
    return found
