"""What a sweep is to do, as typed data: models x checkpoints x variants x seeds x verbs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from rankscope._errors import InputError, MissingExtraError
from rankscope._types import path_of
from rankscope.sweeps.parts import (
    Ablate,
    Bound,
    Checkpoint,
    Exact,
    Inputs,
    Measure,
    Model,
    Part,
    Predict,
    Variant,
    Verb,
    VerbName,
    sized,
)
from rankscope.sweeps.reading import read_plan_data

try:
    from pydantic import Field, ValidationError, field_validator, model_validator
except ImportError as missing:
    raise MissingExtraError("rankscope sweep", "pydantic", "sweep") from missing

OPERABLE: tuple[VerbName, ...] = ("measure", "exact", "bound")
"""Verbs that run under each variant; ablate has a grid of its own, and predict has no weights to operate on."""
WHOLE = "full"
MOST_MISTAKES = 5


class Plan(Part):
    """A whole plan; see ``docs/howto/sweep.md`` for the file it is read from."""

    models: tuple[Model, ...] = Field(min_length=1)
    verbs: tuple[Verb, ...] = Field(min_length=1)
    variants: tuple[Variant, ...] = (Variant(name=WHOLE),)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    inputs: Inputs = Inputs()
    dtype: str | None = None
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    cpus: Annotated[float, Field(gt=0, le=1024)] = 1
    memory: int | None = None

    @field_validator("verbs", mode="before")
    @classmethod
    def _short_verbs(cls, given: Any) -> Any:
        return [_long_verb(one) for one in given] if isinstance(given, list) else given

    @field_validator("memory", mode="before")
    @classmethod
    def _sized(cls, given: Any) -> Any:
        return sized(given)

    @model_validator(mode="after")
    def _names_differ(self) -> Plan:
        groups: dict[str, list[str]] = {
            "models": [one.label for one in self.models],
            "variants": [one.name for one in self.variants],
            "verbs": [one.verb for one in self.verbs],
        }
        for kind, names in groups.items():
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} must differ by name; {', '.join(twice)} is written twice")
        return self


def _long_verb(given: Any) -> Any:
    """``measure`` and ``measure: {null: true}`` in full."""
    if isinstance(given, str):
        return {"verb": given}
    if isinstance(given, dict) and len(given) == 1 and "verb" not in given:
        name, options = next(iter(given.items()))
        return {"verb": name, **options} if isinstance(options, dict) else {"verb": name} if options is None else given
    return given


def plan_of(given: Plan | Mapping[str, Any] | str | Path) -> Plan:
    """A plan from a file, a mapping, or a plan.

    Raises:
        InputError: with the place in the plan, what was written there, and the nearest word that is known.
    """
    if isinstance(given, Plan):
        return given
    data = (
        dict(given)
        if isinstance(given, Mapping)
        else read_plan_data(path_of(given, "plan", "a YAML file, or the same as a dict"))
    )
    where = "The plan" if isinstance(given, Mapping) else str(given)
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # pydantic counts what it could not read as missing.
        real = [entry for entry in found if entry["type"] != "too_short"] or found
        raise InputError(f"{where}: {'; '.join(_words(entry) for entry in real[:MOST_MISTAKES])}.") from error


def _words(entry: Any) -> str:
    """One line about one mistake, without what pydantic adds for programmers."""
    unknown_key = entry["type"] == "extra_forbidden"
    *before, last = entry["loc"] or ("",)
    place = [str(step) for step in before if step not in get_args(VerbName)]
    place += [str(last)] if unknown_key or last not in get_args(VerbName) else []
    at = ".".join(place)
    if unknown_key:
        known = _fields_at(entry["loc"])
        near = difflib.get_close_matches(str(last), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{at} is not a key of a plan ({hint})"
    if entry["type"] == "union_tag_invalid":
        name = str(entry["ctx"]["tag"])
        near = difflib.get_close_matches(name, get_args(VerbName), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(get_args(VerbName))}"
        return f"{at}: there is no verb {name!r} for a sweep ({hint})"
    message = str(entry["msg"]).removeprefix("Value error, ")
    return f"{at}: {message[:1].lower()}{message[1:]}" if at else message


def _fields_at(place: tuple[Any, ...]) -> list[str]:
    """Keys known where an unknown one was written."""
    kinds: dict[str, type[Part]] = {"inputs": Inputs, "checkpoints": Checkpoint, "models": Model, "variants": Variant,
                                    "measure": Measure, "ablate": Ablate, "exact": Exact, "bound": Bound,
                                    "predict": Predict}  # fmt: skip
    inner = next((kinds[step] for step in reversed(place[:-1]) if step in kinds), Plan)
    return [name for name in inner.model_fields if name != "verb"]
