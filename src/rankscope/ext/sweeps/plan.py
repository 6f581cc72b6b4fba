"""The plan of a sweep as typed data: models x checkpoints x variants x seeds x verbs, read from a YAML file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from rankscope._files import read_regular
from rankscope._types import is_named, path_of
from rankscope.errors import InputError, MissingExtraError
from rankscope.execution.budget import parse_size
from rankscope.options import Option
from rankscope.verbs._spec import Verb, verbs_in_order

try:
    from pydantic import (
        AfterValidator,
        BaseModel,
        ConfigDict,
        Field,
        ValidationError,
        create_model,
        field_validator,
        model_validator,
    )
except ImportError as missing:
    raise MissingExtraError("rankscope sweep", "pydantic", "sweep") from missing

LARGEST_PLAN = 2**20
DEEPEST = 12


def read_plan_data(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Refuses anchors and aliases (a short file could expand to gigabytes), tags, repeated keys, several documents, and
    files above 1 MiB.

    Raises:
        InputError: the file is not valid; the message has the line, what was found there and what was expected.
        MissingExtraError: without PyYAML (extra ``sweep``).
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("rankscope sweep", "pyyaml", "sweep") from error
    text = _text_of(path)
    try:
        _refuse_tricks(yaml, text, path)
        _refuse_repeats(yaml.compose(text, Loader=yaml.SafeLoader), path)
        plan = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a YAML file that can be read: {' '.join(str(error).split())}.") from error
    if not isinstance(plan, dict):
        raise InputError(f"{path} holds {_kind(plan)}; a plan is a mapping with the keys models and verbs.")
    return plan


def _text_of(path: Path) -> str:
    try:
        return read_regular(path, LARGEST_PLAN).decode("utf-8")
    except OSError as error:
        raise InputError(f"The plan {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); a plan is a YAML file.") from error


def _refuse_tricks(yaml: Any, text: str, path: Path) -> None:
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InputError(f"{path}, line {line}: anchors and aliases (& and *) are not read. Write it out.")
        if getattr(event, "tag", None):
            raise InputError(f"{path}, line {line}: the tag {event.tag!r} is not read; a plan is plain data.")
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise InputError(f"{path}, line {line}: nested more than {DEEPEST} deep; a plan has four levels.")
    if documents > 1:
        raise InputError(f"{path} holds {documents} documents separated by '---'; a plan is one.")


def _refuse_repeats(node: Any, path: Path) -> None:
    """Refuse repeated keys: YAML would silently keep the last one."""
    if node is None or isinstance(node.value, str):
        return
    seen: set[str] = set()
    for entry in node.value:
        if isinstance(entry, tuple):
            name = str(entry[0].value)
            if name in seen:
                raise InputError(f"{path}, line {entry[0].start_mark.line + 1}: {name!r} is written twice.")
            seen.add(name)
            _refuse_repeats(entry[0], path)
            _refuse_repeats(entry[1], path)
        else:
            _refuse_repeats(entry, path)


def _kind(found: object) -> str:
    return "nothing" if found is None else f"a {type(found).__name__}"


def _refuse_code(text: str) -> str:
    if is_named(text):
        raise ValueError(f"{text} runs code, which a plan cannot ask for; pass it to a verb, or save the model")
    return text


Name = Annotated[str, Field(min_length=1, max_length=200)]
Place = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_refuse_code)]
"""What a worker opens. ``train.py:build`` would run code, and whoever shares a plan is not trusted to do that."""
Count = Annotated[int, Field(ge=1, le=10**7)]


def sized(given: Any) -> Any:
    """Convert ``"4 GiB"`` to bytes, for a field of a plan; None stays None.

    Example:
        >>> sized("1.5 GiB")
        1610612736
    """
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise ValueError(f"{given!r} is not a size; write 4 GiB, 500 MB, or a number of bytes")
    try:
        return parse_size(given)
    except InputError as error:
        raise ValueError(str(error)) from error


class Part(BaseModel):
    """Base class of the parts of a plan: frozen, refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True, protected_namespaces=())


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
        given = [name for name in ("text", "texts") if getattr(self, name) is not None]
        if len(given) + self.random_tokens > 1:
            raise ValueError("text, texts and random_tokens: true exclude each other; give one of them")
        return self


class Checkpoint(Part):
    """One checkpoint of a training run: a folder, a revision of a hub repository, or hidden states computed there."""

    path: Place | None = None
    revision: Place | None = None
    states: Place | None = None
    step: int | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_place(self) -> Checkpoint:
        if [self.path, self.revision, self.states].count(None) != 2:
            raise ValueError("a checkpoint has a path, a revision or states, and only one of them")
        return self

    @property
    def label(self) -> str:
        """How it is called in the rows."""
        place = self.path or self.states
        return Path(place).name if place is not None else str(self.revision)

    @property
    def number(self) -> int | None:
        """The training step: as given, or the last number in the name, as in ``checkpoint-500``."""
        digits = re.findall(r"[0-9]+", self.label)
        return self.step if self.step is not None else int(digits[-1]) if digits else None


class PlanModel(Part):
    """One model, one training run with its checkpoints in order, or hidden states of either in files."""

    model: Place | None = None
    states: Place | None = None
    layout: str | None = None
    at: tuple[Name, ...] | None = None
    name: Name | None = None
    model_class: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$")] | None = None
    blocks: str | None = None
    revisions: tuple[Place, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    verbs: tuple[Name, ...] | None = Field(default=None, min_length=1)
    inputs: PlanInputs | None = None
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
    def _whole(self) -> PlanModel:
        if self.model is None and self.states is None and not self.checkpoints:
            raise ValueError("give a model (a spec), its checkpoints (folders), or states (a file or folder)")
        self._check_states()
        if self.model is not None and any(one.path is not None for one in self.checkpoints):
            raise ValueError("model and checkpoint folders exclude each other; name the run with name instead")
        if self.model is None and self.states is None and self.name is None:
            raise ValueError("a run given by its checkpoints needs a name")
        if self.revisions and self.checkpoints:
            raise ValueError("revisions and checkpoints exclude each other")
        return self

    def _check_states(self) -> None:
        stored = [one.states is not None for one in self.checkpoints]
        if self.states is None and not any(stored):
            if self.layout is not None or self.at is not None:
                raise ValueError("layout and at describe states; give states, or leave them out")
            return
        others = ("model", "model_class", "blocks", "revisions") + (("checkpoints",) if self.states else ())
        taken = [name for name in others if getattr(self, name)]
        if taken or not all(stored):
            raise ValueError(f"states are measured without a model: leave out {', '.join(taken) or 'its checkpoints'}")

    @property
    def has_states(self) -> bool:
        """Whether hidden states are measured, and no model is run."""
        return self.states is not None or any(one.states is not None for one in self.checkpoints)

    @property
    def label(self) -> str:
        """How it is called in the rows."""
        return self.name or self.model or Path(str(self.states)).name

    @property
    def moments(self) -> tuple[Checkpoint | None, ...]:
        """Checkpoints in order; a single None for a model without checkpoints."""
        return self.checkpoints or tuple(Checkpoint(revision=one) for one in self.revisions) or (None,)


class PlanVariant(Part):
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
        if option.in_plans:
            fields[option.name] = _field(option)
    return create_model(verb.name, __base__=VerbUse, __doc__=f"Options of ``{verb.name}``.", **fields)


def _field(option: Option) -> tuple[Any, Any]:
    one: Any = Literal[option.choices] if option.choices else Name if option.kind is str else option.kind
    if option.least is not None:
        one = Annotated[one, Field(ge=option.least, le=10**7)]
    wanted: Any = tuple[one, ...] if option.several else one
    return (wanted | None, None) if option.default is None else (wanted, option.default)


WHOLE = "full"
MOST_MISTAKES = 5


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
        for one in self.models:
            wrong = sorted({*(one.verbs or (use.verb for use in self.verbs))} - {"measure"})
            if one.has_states and wrong:
                raise ValueError(f"{one.label} is hidden states, and {', '.join(wrong)} needs a model: give it verbs: "
                                 "[measure]")  # fmt: skip
        return self


@lru_cache(maxsize=4)
def _plan_with(verbs: tuple[Verb, ...]) -> type[Plan]:
    """The class of plans whose ``verbs`` are validated against these declarations."""
    uses: Any = Union[tuple(options_in_plans(verb) for verb in verbs)]  # noqa: UP007 - made at run time
    checked = tuple[Annotated[uses, Field(discriminator="verb")], ...]
    return create_model("Plan", __base__=Plan, verbs=(checked, Field(min_length=1)))


def _no_verb(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"there is no verb {name!r} for a sweep ({hint})"


def _long_verb(given: Any) -> Any:
    """Expand the short forms ``measure`` and ``measure: {null: true}``."""
    if isinstance(given, str):
        return {"verb": given}
    if isinstance(given, dict) and len(given) == 1 and "verb" not in given:
        name, options = next(iter(given.items()))
        return {"verb": name, **options} if isinstance(options, dict) else {"verb": name} if options is None else given
    return given


def plan_of(given: Plan | Mapping[str, Any] | str | Path) -> Plan:
    """Make a plan from a file or a mapping; a plan is returned unchanged.

    Raises:
        InputError: the plan is invalid; the message has the place, what was written there, and the nearest known word.
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
        errors = error.errors(include_url=False)
        # If no entry of a list could be read, pydantic also reports the list as too short.
        real = [entry for entry in errors if entry["type"] != "too_short"] or errors
        raise InputError(f"{where}: {'; '.join(_words(entry) for entry in real[:MOST_MISTAKES])}.") from error


def _words(entry: Any) -> str:
    """One line about one mistake, without pydantic's technical details."""
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
    """The keys that are valid at the place of an unknown key."""
    kinds: dict[str, type[Part]] = {
        "inputs": PlanInputs,
        "checkpoints": Checkpoint,
        "models": PlanModel,
        "variants": PlanVariant,
        **{name: options_in_plans(verb) for name, verb in sweep_verbs().items()},
    }
    inner = next((kinds[step] for step in reversed(place[:-1]) if step in kinds), Plan)
    return [name for name in inner.model_fields if name != "verb"]
