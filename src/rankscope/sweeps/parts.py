"""The parts a plan is made of: models with their checkpoints, variants, inputs, and the options of each verb."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from rankscope._errors import InputError, MissingExtraError
from rankscope.execution.offload.budget import parse_size
from rankscope.options import Option
from rankscope.verbs._spec import Verb, verbs_in_order

try:
    from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator
except ImportError as missing:
    raise MissingExtraError("rankscope sweep", "pydantic", "sweep") from missing

Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=1, le=10**7)]


def sized(given: Any) -> Any:
    """Bytes from ``"4 GiB"`` for a field of a plan; nothing stays nothing.

    Example:
        >>> sized("1.5 GiB")
        1610612736
    """
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise ValueError(f"{given!r} is no size; write 4 GiB, 500 MB, or a number of bytes")
    try:
        return parse_size(given)
    except InputError as error:
        raise ValueError(str(error)) from error


class Part(BaseModel):
    """A piece of a plan: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True, protected_namespaces=())


class Inputs(Part):
    """What the models run on; one sample text for all unless a file or texts are given."""

    text: str | None = None
    texts: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=10_000)
    sequences: Count = 4
    tokens: Count = 64
    batch: Count = 4
    tokens_policy: Literal["content", "no-first", "no-special"] = "content"
    random_tokens: bool = False
    tokenizer: Name | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Inputs:
        given = [name for name in ("text", "texts") if getattr(self, name) is not None]
        if len(given) + self.random_tokens > 1:
            raise ValueError("text, texts and random_tokens: true exclude each other; give one of them")
        return self


class Checkpoint(Part):
    """One moment of a training run: a folder, or a revision of a hub repository."""

    path: str | None = None
    revision: str | None = None
    step: int | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_place(self) -> Checkpoint:
        if (self.path is None) == (self.revision is None):
            raise ValueError("a checkpoint has a path or a revision, and not both")
        return self

    @property
    def label(self) -> str:
        """How it is called in the rows."""
        return Path(self.path).name if self.path is not None else str(self.revision)

    @property
    def number(self) -> int | None:
        """The step: as given, or the last number in the name, as in ``checkpoint-500``."""
        found = re.findall(r"[0-9]+", self.label)
        return self.step if self.step is not None else int(found[-1]) if found else None


class Model(Part):
    """One model, or one training run with its checkpoints in order."""

    model: Name | None = None
    name: Name | None = None
    model_class: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$")] | None = None
    blocks: str | None = None
    revisions: tuple[Name, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    verbs: tuple[Name, ...] | None = Field(default=None, min_length=1)
    inputs: Inputs | None = None
    dtype: str | None = None
    memory: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        return {"model": given} if isinstance(given, str) else given

    @field_validator("memory", mode="before")
    @classmethod
    def _sized(cls, given: Any) -> Any:
        return sized(given)

    @model_validator(mode="after")
    def _whole(self) -> Model:
        if self.model is None and not self.checkpoints:
            raise ValueError("give a model (a spec) or its checkpoints (folders)")
        if self.model is not None and any(one.path is not None for one in self.checkpoints):
            raise ValueError("model and checkpoint folders exclude each other; name the run with name instead")
        if self.model is None and self.name is None:
            raise ValueError("a run given by its checkpoints needs a name")
        if self.revisions and self.checkpoints:
            raise ValueError("revisions and checkpoints exclude each other")
        return self

    @property
    def label(self) -> str:
        """How it is called in the rows."""
        return self.name or str(self.model)

    @property
    def moments(self) -> tuple[Checkpoint | None, ...]:
        """Checkpoints in order; None for a model that is one thing."""
        return self.checkpoints or tuple(Checkpoint(revision=one) for one in self.revisions) or (None,)


class Variant(Part):
    """Surgery under which the verbs run: a name known to ``ablate``, or settings of ``operate``."""

    name: Name
    skip: float | None = None
    attention_skip: float | None = None
    mlp_skip: float | None = None
    mlp: Literal["keep", "drop"] = "keep"
    norm: Literal["keep", "identity", "scale", "rms"] = "keep"
    mask: str | None = None
    mask_mode: Literal["replace", "intersect", "unite"] = "replace"
    temperature: float = 1.0
    attention: Literal["keep", "uniform", "centred"] = "keep"
    attention_scale: float = 1.0
    layers: tuple[int, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @property
    def settings(self) -> dict[str, Any]:
        """What differs from leaving the model alone."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"name"})


class VerbUse(Part):
    """One verb of a plan with its options; :func:`options_in_plans` makes the class of each verb."""

    verb: str


def sweep_verbs() -> dict[str, Verb]:
    """The verbs a sweep can run, by name."""
    return {verb.name: verb for verb in verbs_in_order() if verb.in_plans}


def options_in_plans(verb: Verb) -> type[VerbUse]:
    """The part of a plan that holds the options of one verb, from its declaration."""
    fields: dict[str, Any] = {"verb": (Literal[verb.name], ...)}
    for option in verb.options:
        if option.in_plans:
            fields[option.name] = _field(option)
    return create_model(verb.name, __base__=VerbUse, __doc__=f"Options of ``{verb.name}``.", **fields)


def _field(option: Option) -> tuple[Any, Any]:
    one: Any = Literal[option.choices] if option.choices else Name if option.kind is str else option.kind
    if option.least is not None:
        one = Annotated[one, Field(ge=option.least, le=10**7)]
    wanted: Any = tuple[one, ...] if option.several else one
    return (wanted | None, None) if option.default is None else (wanted, option.default)
