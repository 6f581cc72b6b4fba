"""The plan of a sweep as typed data: models x checkpoints x variants x seeds x verbs, read from a YAML file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union

from rankscope._files import read_regular
from rankscope._types import is_named, path_of
from rankscope.errors import InputError, MissingExtraError
from rankscope.execution.budget import parse_size
from rankscope.verbs._spec import Verb, verbs_in_order

try:
    import yaml
    from pydantic import (
        AfterValidator,
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        ValidationError,
        create_model,
        field_validator,
        model_validator,
    )
except ImportError as missing:
    raise MissingExtraError("rankscope sweep", "pyyaml" if missing.name == "yaml" else "pydantic", "sweep") from missing

LARGEST_PLAN = 2**20
WHOLE = "full"
MOST_MISTAKES = 5


class PlainLoader(yaml.SafeLoader):
    """Refuses aliases, with which a short file could expand to gigabytes, and keys that are written twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node without an anchor."""
        event: Any = self.peek_event()
        if event.anchor:
            words = "anchors and aliases (& and *) are not read; write it out"
            raise yaml.composer.ComposerError(problem=words, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """A mapping; YAML itself would silently keep the last of two equal keys."""
        names: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in names:
                words = f"{key.value!r} is written twice"
                raise yaml.constructor.ConstructorError(problem=words, problem_mark=key.start_mark)
            names.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


def read_plan_data(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file of at most 1 MiB, which is plain data.

    Raises:
        InputError: it is something else; the message has the line.
    """
    try:
        text = read_regular(path, LARGEST_PLAN).decode("utf-8")
    except OSError as error:
        raise InputError(f"The plan {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); a plan is a YAML file.") from error
    try:
        plan = yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a YAML file that can be read: {' '.join(str(error).split())}.") from error
    if not isinstance(plan, dict):
        kind = "nothing" if plan is None else f"a {type(plan).__name__}"
        raise InputError(f"{path} holds {kind}; a plan is a mapping with the keys models and verbs.")
    return plan


def _refuse_code(text: str) -> str:
    if is_named(text):
        raise ValueError(f"{text} runs code, which a plan cannot ask for; pass it to a verb, or save the model")
    return text


Name = Annotated[str, Field(min_length=1, max_length=200)]
Place = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_refuse_code)]
"""What a worker opens. ``train.py:build`` would run code, and whoever shares a plan is not trusted to do that."""
Count = Annotated[int, Field(ge=1, le=10**7)]
Size = Annotated[int | None, BeforeValidator(lambda given: None if given is None else parse_size(given))]
"""A number of bytes, also written as ``"4 GiB"``."""


class Part(BaseModel):
    """Base class of the parts of a plan: frozen, refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True, protected_namespaces=())
    short_form: ClassVar[str | None] = None
    """The field for which a text alone stands."""

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, given: Any) -> Any:
        return {cls.short_form: given} if isinstance(given, str) and cls.short_form else given


class PlanInputs(Part):
    """Inputs of the models; the built-in sample text unless a file or texts are given."""

    text: Place | None = None
    texts: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=10_000)
    sequences: Count = 4
    tokens: Count = 64
    batch: Count = 4
    tokens_policy: Literal["content", "no-first", "no-special"] = "content"
    random_tokens: bool = False
    tokenizer: Place | None = None

    @model_validator(mode="after")
    def _one_source(self) -> PlanInputs:
        if (self.text is not None) + (self.texts is not None) + self.random_tokens > 1:
            raise ValueError("text, texts and random_tokens: true exclude each other; give one of them")
        return self


class Checkpoint(Part):
    """One checkpoint of a training run: a folder, or a revision of a hub repository."""

    short_form = "path"
    path: Place | None = None
    revision: Place | None = None
    step: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_place(self) -> Checkpoint:
        if (self.path is None) == (self.revision is None):
            raise ValueError("a checkpoint has a path or a revision, and only one of them")
        return self

    @property
    def label(self) -> str:
        """How it is called in the rows."""
        return Path(self.path).name if self.path is not None else str(self.revision)

    @property
    def number(self) -> int | None:
        """The training step: as given, or the last number in the name, as in ``checkpoint-500``."""
        digits = re.findall(r"[0-9]+", self.label)
        return self.step if self.step is not None else int(digits[-1]) if digits else None


class PlanModel(Part):
    """One model, or one training run with its checkpoints in order."""

    short_form = "model"
    model: Place | None = None
    name: Name | None = None
    model_class: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$")] | None = None
    blocks: str | None = None
    revisions: tuple[Place, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    verbs: tuple[Name, ...] | None = Field(default=None, min_length=1)
    inputs: PlanInputs | None = None
    dtype: str | None = None
    memory: Size = None

    @model_validator(mode="after")
    def _whole(self) -> PlanModel:
        if self.model is None:
            if not self.checkpoints:
                raise ValueError("give a model (a spec), or its checkpoints (folders)")
            if self.name is None:
                raise ValueError("a run given by its checkpoints needs a name")
        elif any(one.path is not None for one in self.checkpoints):
            raise ValueError("model and checkpoint folders exclude each other; name the run with name instead")
        if self.revisions and self.checkpoints:
            raise ValueError("revisions and checkpoints exclude each other")
        return self

    @property
    def label(self) -> str:
        """How it is called in the rows."""
        return self.name or str(self.model)

    @property
    def moments(self) -> tuple[Checkpoint | None, ...]:
        """Checkpoints in order; a single None for a model without checkpoints."""
        return self.checkpoints or tuple(Checkpoint(revision=one) for one in self.revisions) or (None,)


class PlanVariant(Part):
    """Surgery under which the verbs run: a name known to ``ablate``, or settings of ``operate``."""

    short_form = "name"
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

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from the default."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"name"})


class VerbUse(Part):
    """One verb of a plan with its options; :func:`options_in_plans` makes the class of each verb."""

    verb: str


def sweep_verbs() -> dict[str, Verb]:
    """The verbs a sweep can run, by name."""
    return {verb.name: verb for verb in verbs_in_order() if verb.in_plans}


def options_in_plans(verb: Verb) -> type[VerbUse]:
    """The class for the options of one verb in a plan, built from the verb's declaration."""
    fields: dict[str, Any] = {"verb": (Literal[verb.name], ...)}
    for option in verb.options:
        if not option.in_plans:
            continue
        kind: Any = Literal[option.choices] if option.choices else Name if option.kind is str else option.kind
        if option.minimum is not None:
            kind = Annotated[kind, Field(ge=option.minimum, le=10**7)]
        if option.several:
            kind = tuple[kind, ...]
        fields[option.name] = (kind | None if option.default is None else kind, option.default)
    return create_model(verb.name, __base__=VerbUse, __doc__=f"Options of ``{verb.name}``.", **fields)


class Plan(Part):
    """A whole plan; see ``docs/howto/sweep.md`` for the file it is read from."""

    models: tuple[PlanModel, ...] = Field(min_length=1)
    verbs: tuple[VerbUse, ...] = Field(min_length=1)
    variants: tuple[PlanVariant, ...] = (PlanVariant(name=WHOLE),)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    inputs: PlanInputs = PlanInputs()
    dtype: str | None = None
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    timeout: Annotated[float, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0, le=1024)] = 1
    memory: Size = None

    @field_validator("verbs", mode="before")
    @classmethod
    def _long_verbs(cls, given: Any) -> Any:
        """Expand the short forms ``measure`` and ``measure: {null: true}``."""
        if not isinstance(given, list):
            return given
        expanded = []
        for one in given:
            if isinstance(one, str):
                one = {"verb": one}
            elif isinstance(one, dict) and len(one) == 1 and "verb" not in one:
                ((name, options),) = one.items()
                one = {"verb": name, **options} if isinstance(options, dict) else {"verb": name}
            expanded.append(one)
        return expanded

    @model_validator(mode="after")
    def _names_differ(self) -> Plan:
        groups = {
            "models": [one.label for one in self.models],
            "variants": [one.name for one in self.variants],
            "verbs": [one.verb for one in self.verbs],
        }
        for kind, names in groups.items():
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{kind} must differ by name; {', '.join(twice)} is written twice")
        for model in self.models:
            for name in model.verbs or ():
                if name not in sweep_verbs():
                    raise ValueError(_no_verb(name))
        return self


@lru_cache(maxsize=4)
def _plan_with(verbs: tuple[Verb, ...]) -> type[Plan]:
    """The class of plans whose ``verbs`` are validated against these declarations."""
    uses: Any = Union[tuple(options_in_plans(verb) for verb in verbs)]  # noqa: UP007 - made at run time
    checked = tuple[Annotated[uses, Field(discriminator="verb")], ...]
    return create_model("Plan", __base__=Plan, verbs=(checked, Field(min_length=1)))


def plan_of(given: Plan | Mapping[str, Any] | str | Path) -> Plan:
    """Make a plan from a file or a mapping; a plan is returned unchanged.

    Raises:
        InputError: the plan is invalid; the message has the place, what was written there, and the nearest known word.
    """
    if isinstance(given, Plan):
        return given
    if isinstance(given, Mapping):
        where, data = "The plan", dict(given)
    else:
        where, data = str(given), read_plan_data(path_of(given, "plan", "a YAML file, or the same as a dict"))
    try:
        return _plan_with(tuple(sweep_verbs().values())).model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # If no entry of a list could be read, pydantic also reports the list as too short.
        real = [entry for entry in errors if entry["type"] != "too_short"] or errors
        raise InputError(f"{where}: {'; '.join(_words(entry) for entry in real[:MOST_MISTAKES])}.") from error


def _words(entry: Any) -> str:
    """One line about one mistake, without pydantic's technical details."""
    unknown_key = entry["type"] == "extra_forbidden"
    # pydantic adds the verb, by which it chose the class of the options, to the place of a mistake in them.
    steps = [str(step) for step in entry["loc"]]
    at = ".".join(step for number, step in enumerate(steps) if number != 2 or steps[0] != "verbs")
    if unknown_key:
        known = _sibling_keys(entry["loc"])
        return f"{at} is not a key of a plan ({_hint(steps[-1], sorted(known), 'known here')})"
    if entry["type"] == "union_tag_invalid":
        return f"{at}: {_no_verb(str(entry['ctx']['tag']))}"
    message = str(entry["msg"]).removeprefix("Value error, ")
    return f"{at}: {message[:1].lower()}{message[1:]}" if at else message


def _no_verb(name: str) -> str:
    return f"there is no verb {name!r} for a sweep ({_hint(name, sweep_verbs(), 'known')})"


def _hint(word: str, known: Collection[str], listed: str) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{listed}: {', '.join(known)}"


def _sibling_keys(place: tuple[Any, ...]) -> list[str]:
    """The keys that are valid at the place of an unknown key."""
    kinds: dict[str, type[Part]] = {
        "inputs": PlanInputs,
        "checkpoints": Checkpoint,
        "models": PlanModel,
        "variants": PlanVariant,
        **{name: options_in_plans(verb) for name, verb in sweep_verbs().items()},
    }
    kind = next((kinds[step] for step in reversed(place[:-1]) if step in kinds), Plan)
    return [name for name in kind.model_fields if name != "verb"]
