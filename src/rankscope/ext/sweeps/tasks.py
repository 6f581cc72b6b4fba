"""Expands a plan into tasks: one verb on one model, checkpoint, variant and seed, with a key that names the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope._files import sha256_of
from rankscope._version import __version__
from rankscope.errors import InputError, LoadError
from rankscope.ext.sweeps.plan import WHOLE, Checkpoint, Plan, PlanInputs, PlanModel, PlanVariant, VerbUse, sweep_verbs
from rankscope.models.weight_files.files import is_remote
from rankscope.options import OFFLOAD

WEIGHTS = ("*.safetensors", "*.gguf", "*.safetensors.index.json", "pytorch_model*.bin")
OTHERS = ("config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json",
          "tokenizer_config.json")  # fmt: skip
KEY_LENGTH = 24
RECORD = "record"
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
        text: where it finds the input text, if the plan names a file.
        memory: bytes to reserve according to the plan; None to estimate them.
    """

    facts: dict[str, Any]
    spec: str
    text: str | None = None
    memory: int | None = None

    @cached_property
    def key(self) -> str:
        """Hash of the description, the weights' identity and the version of rankscope."""
        return hash_of([__version__, self.facts])[:KEY_LENGTH]

    @property
    def title(self) -> str:
        """The task in a few words."""
        return title_of(self.facts)


def title_of(facts: Mapping[str, Any]) -> str:
    """The coordinates of a task in a few words."""
    named = [f"{name} {facts[name]}" for name in ("checkpoint", "variant", "seed") if facts.get(name) is not None]
    return ", ".join([f"{facts['verb']} {facts['model']}", *named])


def hash_of(value: object) -> str:
    """SHA-256 of the sorted JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


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
        return _identity_of_initialisation(spec.removeprefix("init:"))
    path = Path(spec).expanduser()
    if path.is_dir():
        files = sorted({file for pattern in WEIGHTS for file in path.glob(pattern)})
        files += [path / name for name in OTHERS if (path / name).is_file()]
        if not any(file.name == "config.json" or file.suffix == ".gguf" for file in files):
            raise LoadError(f"{path} holds no config.json and no .gguf file, so it is not a model folder.")
        return {"kind": "folder", "files": _stamps(files)}
    if path.is_file():
        return {"kind": "file", "files": _stamps([path])}
    if not is_remote(spec) and (spec.startswith((".", "/", "~")) or spec.count("/") > 1):
        raise LoadError(f"There is no file or folder {spec!r}. Paths in a plan are relative to the current folder.")
    return {"kind": "hub", "name": spec, "revision": revision}


def _identity_of_initialisation(name: str) -> dict[str, Any]:
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


def _stamps(files: list[Path]) -> list[list[Any]]:
    found = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


def differs(asked: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether a worker sees other weights than those of the plan; modification times may differ between machines."""

    def without_times(one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "files": [entry[:2] for entry in one.get("files", ())]}

    return without_times(asked) != without_times(here)


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
    identified, described = lru_cache(maxsize=None)(identity_of), lru_cache(maxsize=64)(_described)
    for model in plan.models:
        uses = [use for use in plan.verbs if model.verbs is None or use.verb in model.verbs]
        inputs = model.inputs or plan.inputs
        text = None if inputs.text is None else _absolute(inputs.text)
        options = {use.verb: _options(use) for use in uses}
        if any(one.get(OFFLOAD.name) for one in options.values()):
            # The whole model is never in memory.
            if [variant.name for variant in plan.variants] != [WHOLE]:
                raise InputError(
                    "verbs: offload reads one block at a time, and variants change a whole model. Leave one out."
                )
            if model.model_class is not None:
                raise InputError(f"model {model.label!r}: model_class is not read with offload. Leave one out.")
        # Tasks that share a model are neighbours, so that a chunk of them loads it once.
        for number, moment in enumerate(model.moments):
            coordinates = _coordinates(model, moment)
            place = coordinates["spec"]
            spec = _absolute(place)
            common = {
                **coordinates,
                "inputs": described(inputs),
                "dtype": model.dtype or plan.dtype,
                "weights": identified(place, coordinates["revision"]),
            }
            for seed in model.seeds or plan.seeds:
                for use in uses:
                    verb = verbs[use.verb]
                    if number and verb.subject == "design":
                        continue  # the checkpoints of one training run share their design
                    asked = {"verb": use.verb, "options": options[use.verb], "seed": seed}
                    for name, operation in operations.items() if verb.under_variants else [(None, None)]:
                        facts = {**common, **asked, "variant": name, "operation": operation}
                        yield Task(facts, spec, text, model.memory or plan.memory)


def _coordinates(model: PlanModel, moment: Checkpoint | None) -> dict[str, Any]:
    in_folder = moment is not None and moment.path is not None
    return {
        "model": model.label,
        "spec": moment.path if moment is not None and in_folder else str(model.model),
        "revision": None if moment is None or in_folder else moment.revision,
        "checkpoint": None if moment is None else moment.label,
        "step": None if moment is None else moment.number,
        "model_class": model.model_class,
        "blocks": model.blocks,
    }


def _options(use: VerbUse) -> dict[str, Any]:
    return use.model_dump(mode="json", exclude_none=True, exclude={"verb"})


def _described(inputs: PlanInputs) -> dict[str, Any]:
    facts = inputs.model_dump(mode="json", exclude_none=True)
    if inputs.tokenizer is not None:
        facts["tokenizer"] = _absolute(inputs.tokenizer)
    if inputs.text is not None:
        try:
            facts["text_sha256"] = sha256_of(Path(inputs.text).expanduser())
        except OSError as error:
            raise InputError(f"The text {inputs.text} of the plan cannot be read: {error.strerror}.") from error
    return facts


def _operation(variant: PlanVariant) -> dict[str, Any] | None:
    """Settings of ``operate``, validated by the surgery itself; a name alone is a variant of ``ablate``."""
    if not variant.settings:
        if variant.name == WHOLE:
            return None
        from rankscope.verbs.ablate.variants import variant_named

        return variant_named(variant.name).operation.describe() or None
    from rankscope.masks import parse_mask
    from rankscope.surgery.operation import Operation

    given = {name: value for name, value in variant.settings.items() if name != "skip"}
    if "mask" in given:
        given["mask"] = parse_mask(given["mask"])
    if "layers" in given:
        given["layers"] = frozenset(given["layers"])
    try:
        Operation(**given)
    except InputError as error:
        raise InputError(f"variant {variant.name!r}: {error}") from error
    return variant.settings


def _absolute(spec: str) -> str:
    """Make local paths absolute, so that a worker in another directory can open them."""
    from rankscope.models.presets import PRESETS

    prefix = "init:" if spec.startswith("init:") else ""
    name = spec.removeprefix(prefix)
    path = Path(name).expanduser()
    return f"{prefix}{path.resolve()}" if path.exists() and not (prefix and name in PRESETS) else spec
