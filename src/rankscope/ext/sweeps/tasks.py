"""Expands a plan into tasks: one verb on one model, checkpoint, variant and seed, with a key that names the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope._files import read_regular, sha256_of
from rankscope._version import __version__
from rankscope.errors import InputError, LoadError
from rankscope.ext.sweeps.plan import (
    WHOLE,
    Checkpoint,
    Plan,
    PlanInputs,
    PlanModel,
    PlanVariant,
    VerbUse,
    sweep_verbs,
)
from rankscope.models.weight_files.files import is_remote
from rankscope.options import OFFLOAD
from rankscope.verbs._spec import Verb

WEIGHTS = ("*.safetensors", "*.gguf", "*.safetensors.index.json", "pytorch_model*.bin")
OTHERS = ("config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json",
          "tokenizer_config.json")  # fmt: skip
STATES = ("*.safetensors", "*.npz")
LARGEST_TEXT = 64 * 2**20


def identity_of(spec: str, revision: str | None = None) -> dict[str, Any]:
    """What identifies a set of weights, in plain JSON types.

    A preset is identified by the hash of its configuration, a file by name, size and modification time, a hub model by
    name and revision: give a commit if the branch may move.

    Example:
        >>> identity_of("init:tiny-bert")["kind"]
        'preset'

    Raises:
        LoadError: a local path without a model.
    """
    if spec.startswith("init:"):
        return _of_initialisation(spec.removeprefix("init:"))
    path = Path(spec).expanduser()
    if path.is_dir():
        return {"kind": "folder", "files": _files(path)}
    if path.is_file():
        return {"kind": "file", "files": [_facts(path)]}
    if not is_remote(spec) and (spec.startswith((".", "/", "~")) or spec.count("/") > 1):
        raise LoadError(f"There is no file or folder {spec!r}. Paths in a plan are relative to the current folder.")
    return {"kind": "hub", "name": spec, "revision": revision}


def identity_of_states(place: str) -> dict[str, Any]:
    """What identifies stored hidden states: name, size and modification time of their files.

    Raises:
        LoadError: there are none.
    """
    path = Path(place).expanduser()
    files = [path] if path.is_file() else sorted(one for pattern in STATES for one in path.glob(pattern))
    if not files:
        raise LoadError(
            f"There are no hidden states at {place!r}; expected a .safetensors or .npz file, or a folder of them. "
            "Paths in a plan are relative to the current folder."
        )
    return {"kind": "states", "files": [_facts(one) for one in files]}


def differs(asked: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether a worker sees other weights than those of the plan; modification times may differ between machines."""

    def without_times(one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "files": [entry[:2] for entry in one.get("files", ())]}

    return without_times(asked) != without_times(here)


def text_of(path: str) -> str:
    """Read a text file that is an input of the models.

    Raises:
        InputError: the file is missing, too large, or not text.
    """
    try:
        return read_regular(Path(path).expanduser(), LARGEST_TEXT).decode("utf-8")
    except OSError as error:
        raise InputError(f"The text {path} of the plan cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"The text {path} of the plan is not UTF-8 (byte {error.start}).") from error


def hash_of(value: object) -> str:
    """SHA-256 of the sorted JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _of_initialisation(name: str) -> dict[str, Any]:
    from rankscope.models.presets import PRESETS, preset

    path = Path(name).expanduser()
    if name not in PRESETS and path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise LoadError(f"{path} holds no config.json to initialise.")
        return {"kind": "config", "sha256": sha256_of(file)}
    entry = preset(name)
    facts = [entry.model_type, json.loads(json.dumps(dict(entry.config), default=str)), entry.model_class]
    return {"kind": "preset", "name": name, "sha256": hash_of(facts)}


def _files(folder: Path) -> list[list[Any]]:
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    files += [folder / name for name in OTHERS if (folder / name).is_file()]
    if not any(path.name == "config.json" or path.suffix == ".gguf" for path in files):
        raise LoadError(f"{folder} holds no config.json and no .gguf file, so it is not a model folder.")
    return [_facts(path) for path in files]


def _facts(path: Path) -> list[Any]:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


KEY_LENGTH = 24
RECORD = "record"
NAMED = ("checkpoint", "variant", "seed")
COORDINATES: Mapping[str, pa.DataType] = {
    "task": pa.string(),
    "verb": pa.string(),
    "model": pa.string(),
    "checkpoint": pa.string(),
    "step": pa.int64(),
    "variant": pa.string(),
    "seed": pa.int64(),
}
"""The columns of every row that say which task it is of."""


@dataclass(frozen=True)
class Task:
    """One task; everything its rows depend on is in ``facts``.

    Attributes:
        facts: verb, options, model, checkpoint, step, variant, seed, inputs and the identity of the weights.
        spec: where the worker finds the model; paths are absolute.
        text: the input text, if the plan names a file.
        memory: bytes to reserve according to the plan; None to estimate them.
    """

    facts: dict[str, Any]
    spec: str
    text: str | None = field(default=None, repr=False)
    memory: int | None = None

    @cached_property
    def key(self) -> str:
        """Hash of the description, the weights' identity and the version of rankscope."""
        return hash_of([__version__, self.facts])[:KEY_LENGTH]

    @property
    def title(self) -> str:
        """The task in a few words."""
        named = [f"{name} {self.facts[name]}" for name in NAMED if self.facts.get(name) is not None]
        return ", ".join([f"{self.facts['verb']} {self.facts['model']}", *named])


def tasks_of(plan: Plan) -> Iterator[Task]:
    """Every task of a plan, in order; imports nothing heavy and reads no weights.

    Raises:
        UnknownNameError: unknown preset or variant.
        LoadError: a path without a model.

    Example:
        >>> from rankscope.ext.sweeps.plan import plan_of
        >>> plan = plan_of({"models": ["init:tiny-bert"], "verbs": ["measure", "predict"], "seeds": [0, 1]})
        >>> [(task.facts["verb"], task.facts["seed"]) for task in tasks_of(plan)]
        [('measure', 0), ('predict', 0), ('measure', 1), ('predict', 1)]
    """
    verbs = sweep_verbs()
    operations = {variant.name: _operation(variant) for variant in plan.variants}
    identified = lru_cache(maxsize=None)(identity_of)
    read = lru_cache(maxsize=64)(text_of)
    for model in plan.models:
        if model.has_states:
            yield from _tasks_of_states(plan, model)
            continue
        inputs = model.inputs or plan.inputs
        text = None if inputs.text is None else read(inputs.text)
        described = _described(inputs, text)
        uses = [use for use in plan.verbs if model.verbs is None or use.verb in model.verbs]
        options = {use.verb: use.model_dump(mode="json", exclude_none=True, exclude={"verb"}) for use in uses}
        if any(one.get(OFFLOAD.name) for one in options.values()):
            _check_offload(plan, model)
        # Tasks that share a model are neighbours, so that a chunk of them loads it once.
        for number, moment in enumerate(model.moments):
            place, revision = _place(model, moment)
            common = {
                **_coordinates(model, moment),
                "inputs": described,
                "dtype": model.dtype or plan.dtype,
                "weights": identified(place, revision),
            }
            spec = _absolute(place)
            for seed in model.seeds or plan.seeds:
                for use in uses:
                    if number and verbs[use.verb].subject == "design":
                        continue  # the checkpoints of one training run share their design
                    asked = {"verb": use.verb, "options": options[use.verb], "seed": seed}
                    for name, operation in _variants(verbs[use.verb], use, operations):
                        facts = {**common, **asked, "variant": name, "operation": operation}
                        yield Task(facts, spec, text, model.memory or plan.memory)


def _tasks_of_states(plan: Plan, model: PlanModel) -> Iterator[Task]:
    """One task per file: there is no model to operate on, and the seed is only that of a random baseline."""
    inputs = model.inputs or plan.inputs
    # All sequences of a file, unless the plan says how many of these states to take.
    asked = set() if model.inputs is None else model.inputs.model_fields_set
    chosen = {"tokens_policy"} | (asked & {"sequences"})
    for use in plan.verbs:
        if use.verb != "measure":
            continue
        for moment in model.moments:
            place = str(model.states if moment is None else moment.states)
            facts = {
                **_coordinates(model, moment),
                "spec": place,
                "verb": use.verb,
                "options": use.model_dump(mode="json", exclude_none=True, exclude={"verb"}),
                "inputs": inputs.model_dump(mode="json", include=chosen),
                "dtype": model.dtype or plan.dtype,
                "weights": identity_of_states(place),
                "states": {"layout": model.layout, "at": model.at and list(model.at)},
                "variant": WHOLE,
                "operation": None,
                "seed": (model.seeds or plan.seeds)[0],
            }
            yield Task(facts, str(Path(place).expanduser().resolve()), None, model.memory or plan.memory)


def _place(model: PlanModel, moment: Checkpoint | None) -> tuple[str, str | None]:
    if moment is None or moment.path is None:
        return str(model.model), None if moment is None else moment.revision
    return moment.path, None


def _coordinates(model: PlanModel, moment: Checkpoint | None) -> dict[str, Any]:
    place, revision = _place(model, moment)
    return {
        "model": model.label,
        "spec": place,
        "revision": revision,
        "checkpoint": None if moment is None else moment.label,
        "step": None if moment is None else moment.number,
        "model_class": model.model_class,
        "blocks": model.blocks,
    }


def _check_offload(plan: Plan, model: PlanModel) -> None:
    """Refuse what needs the whole model in memory."""
    if [variant.name for variant in plan.variants] != [WHOLE]:
        raise InputError("verbs: offload reads one block at a time, and variants change a whole model. Leave one out.")
    if model.model_class is not None:
        raise InputError(f"model {model.label!r}: model_class is not read with offload. Leave one out.")


def _variants(verb: Verb, use: VerbUse, operations: dict[str, Any]) -> Iterator[tuple[str | None, Any]]:
    if verb.under_variants:
        yield from operations.items()
    else:
        yield None, None


def _operation(variant: PlanVariant) -> dict[str, Any] | None:
    """Settings of ``operate``; a name alone is a variant of ``ablate``."""
    if variant.settings:
        _check(variant)
        return variant.settings
    if variant.name == WHOLE:
        return None
    from rankscope.verbs.ablate.variants import variant_named

    return variant_named(variant.name).operation.describe() or None


def _check(variant: PlanVariant) -> None:
    """Validate the settings with the surgery itself before anything runs."""
    from rankscope.masks import parse_mask
    from rankscope.surgery.operation import Operation

    given = dict(variant.settings)
    given.pop("skip", None)
    if "mask" in given:
        given["mask"] = parse_mask(given["mask"])
    if "layers" in given:
        given["layers"] = frozenset(given["layers"])
    try:
        Operation(**given)
    except InputError as error:
        raise InputError(f"variant {variant.name!r}: {error}") from error


def _described(inputs: PlanInputs, text: str | None) -> dict[str, Any]:
    facts = inputs.model_dump(mode="json", exclude_none=True)
    if inputs.tokenizer is not None:
        facts["tokenizer"] = _absolute(inputs.tokenizer)
    if text is not None:
        facts["text_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return facts


def _absolute(spec: str) -> str:
    """Make local paths absolute, so that a worker in another directory can open them."""
    from rankscope.models.presets import PRESETS

    prefix = "init:" if spec.startswith("init:") else ""
    name = spec.removeprefix(prefix)
    path = Path(name).expanduser()
    return f"{prefix}{path.resolve()}" if path.exists() and not (prefix and name in PRESETS) else spec
