"""Reads an untrusted model configuration without running anything it names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope._files import read_regular
from rankscope.errors import LoadError, RankscopeError
from rankscope.models.hf import require_transformers
from rankscope.models.loading.affording import refuse_endless_lists
from rankscope.models.loading.no_requests import no_requests

LARGEST_CONFIG = 32 * 2**20

# Properties of one file or one machine, not of the architecture.
_NOT_HASHED = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_commit_hash",
    "attn_implementation",
    "distributed_config",
)


def config_hash(config: Any) -> str:
    """SHA-256 of the sorted JSON of a transformers configuration, without dtype, path and library version."""
    described = {key: value for key, value in config.to_dict().items() if key not in _NOT_HASHED}
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def read_config_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or a LoadError that says what is wrong with it."""
    try:
        raw = read_regular(path, LARGEST_CONFIG)
    except OSError as error:
        raise LoadError(
            f"{path} could not be read: {error.strerror}. Pass a folder that holds a config.json."
        ) from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is not UTF-8 text (byte {error.start}). Is it a config.json?") from error
    try:
        config = json.loads(text, object_hook=_special_float)
    except json.JSONDecodeError as error:
        raise LoadError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or endless brackets
        raise LoadError(f"{path} is JSON that cannot be read: {error}. Is it a config.json?") from error
    if not isinstance(config, dict):
        raise LoadError(
            f"{path} holds a JSON {type(config).__name__}; a configuration is an object with a 'model_type'."
        )
    return config


def _special_float(found: dict[str, Any]) -> Any:
    """An infinity or NaN, which JSON does not have, as transformers writes it; any other object as it is."""
    word = found.get("__float__")
    return float(word) if len(found) == 1 and word in ("Infinity", "-Infinity", "NaN") else found


def refuse_remote_kernels(config: Mapping[str, Any], where: str) -> None:
    """Refuse a configuration that names an attention kernel to download and run."""
    for key, value in config.items():
        if "attn_implementation" in str(key) and "/" in str(value):
            raise LoadError(
                f"{where} asks for attention code from elsewhere ({key}={value!r}). It was not run. "
                "Remove that key, or pass trust_remote_code=True if you trust its author."
            )
        if isinstance(value, Mapping):
            refuse_remote_kernels(value, where)


def model_class_named(name: str) -> Any:
    """The transformers model class of that name; nothing but a transformers class is ever looked up.

    Raises:
        LoadError: the name is not a model class of the installed transformers.
    """
    import transformers

    model_class = getattr(transformers, name, None)
    is_model = isinstance(model_class, type) and (
        issubclass(model_class, transformers.PreTrainedModel) or name.startswith("AutoModel")
    )
    if not is_model:
        raise LoadError(
            f"model_class={name!r} is not a model class of transformers {transformers.__version__}. "
            "Expected a name such as 'AutoModel', 'BertForMaskedLM' or 'T5EncoderModel'."
        )
    return model_class


def config_from_json(path: Path, model_class: str | None) -> Any:
    """The transformers configuration in ``path``, built from data only.

    A file without ``model_type`` takes it from ``model_class`` or from its own ``architectures``, provided these name
    a transformers class. Remote code named by ``auto_map`` is ignored.
    """
    require_transformers("Reading a configuration")
    import transformers

    raw = read_config_json(path)
    refuse_remote_kernels(raw, str(path))
    refuse_endless_lists(raw)
    _refuse_other_weights(raw, path)
    model_type = raw.get("model_type") or _inferred_type(raw, path, model_class)
    rest = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map", "transformers_version")}
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        code = " Its own code (auto_map) runs only with trust_remote_code=True." if "auto_map" in raw else ""
        raise LoadError(
            f"{path} describes model_type {model_type!r:.200}, "
            f"which transformers {transformers.__version__} does not know.{code}"
        )
    try:
        with no_requests(str(path)):
            return transformers.CONFIG_MAPPING[model_type].from_dict(rest)
    except (RankscopeError, MemoryError):
        raise
    except Exception as error:  # every family validates in its own way and may raise anything
        raise LoadError(f"{path} is not a valid {model_type} configuration: {' '.join(str(error).split())}") from error


def _refuse_other_weights(raw: Mapping[str, Any], path: Path) -> None:
    """Refuse a configuration that names its own weights file: transformers would follow it past the checks here."""
    named = raw.get("transformers_weights")
    if named is not None and named != "model.safetensors":
        raise LoadError(
            f"{path} names its own file of weights (transformers_weights={named!r:.80}), which is not followed. "
            "Remove that key and call the file model.safetensors."
        )


def _inferred_type(raw: Mapping[str, Any], path: Path, model_class: str | None) -> str:
    named = raw.get("architectures")
    names = (
        [model_class]
        if model_class
        else [name for name in named if isinstance(name, str)]
        if isinstance(named, list)
        else []
    )
    for name in names:
        config_class = getattr(model_class_named(name), "config_class", None)
        if config_class is not None:
            return str(config_class.model_type)
    raise LoadError(
        f"{path} has no model_type and no architectures, so the kind of model is unknown. "
        'Say which it is, for example model_class="BertForMaskedLM", or add "model_type" to the file.'
    )
