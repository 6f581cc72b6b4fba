"""What a sweep is to do, as typed data: models x checkpoints x variants x seeds x verbs."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Union

from rankscope._errors import InputError, MissingExtraError
from rankscope._types import path_of
from rankscope.sweeps.parts import (
    Checkpoint,
    Inputs,
    Model,
    Part,
    Variant,
    VerbUse,
    options_in_plans,
    sized,
    sweep_verbs,
)
from rankscope.sweeps.reading import read_plan_data
from rankscope.verbs._spec import Verb

try:
    from pydantic import Field, ValidationError, create_model, field_validator, model_validator
except ImportError as missing:
    raise MissingExtraError("rankscope sweep", "pydantic", "sweep") from missing

WHOLE = "full"
MOST_MISTAKES = 5


class Plan(Part):
    """A whole plan; see ``docs/howto/sweep.md`` for the file it is read from."""

    models: tuple[Model, ...] = Field(min_length=1)
    verbs: tuple[VerbUse, ...] = Field(min_length=1)
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
        known = sweep_verbs()
        for name in [name for one in self.models for name in one.verbs or ()]:
            if name not in known:
                raise ValueError(_no_verb(name, known))
        return self


@lru_cache(maxsize=4)
def _plan_with(verbs: tuple[Verb, ...]) -> type[Plan]:
    """The plan whose ``verbs`` are checked against these declarations."""
    uses: Any = Union[tuple(options_in_plans(verb) for verb in verbs)]  # noqa: UP007 - made at run time
    checked = tuple[Annotated[uses, Field(discriminator="verb")], ...]
    return create_model("Plan", __base__=Plan, verbs=(checked, Field(min_length=1)))


def _no_verb(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"there is no verb {name!r} for a sweep ({hint})"


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
        return _plan_with(tuple(sweep_verbs().values())).model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # pydantic counts what it could not read as missing.
        real = [entry for entry in found if entry["type"] != "too_short"] or found
        raise InputError(f"{where}: {'; '.join(_words(entry) for entry in real[:MOST_MISTAKES])}.") from error


def _words(entry: Any) -> str:
    """One line about one mistake, without what pydantic adds for programmers."""
    unknown_key = entry["type"] == "extra_forbidden"
    known_verbs = sweep_verbs()
    *before, last = entry["loc"] or ("",)
    place = [str(step) for step in before if step not in known_verbs]
    place += [str(last)] if unknown_key or last not in known_verbs else []
    at = ".".join(place)
    if unknown_key:
        known = _fields_at(entry["loc"])
        near = difflib.get_close_matches(str(last), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"{at} is not a key of a plan ({hint})"
    if entry["type"] == "union_tag_invalid":
        return f"{at}: {_no_verb(str(entry['ctx']['tag']), known_verbs)}"
    message = str(entry["msg"]).removeprefix("Value error, ")
    return f"{at}: {message[:1].lower()}{message[1:]}" if at else message


def _fields_at(place: tuple[Any, ...]) -> list[str]:
    """Keys known where an unknown one was written."""
    kinds: dict[str, type[Part]] = {
        "inputs": Inputs,
        "checkpoints": Checkpoint,
        "models": Model,
        "variants": Variant,
        **{name: options_in_plans(verb) for name, verb in sweep_verbs().items()},
    }
    inner = next((kinds[step] for step in reversed(place[:-1]) if step in kinds), Plan)
    return [name for name in inner.model_fields if name != "verb"]
