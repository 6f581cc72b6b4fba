"""Reads designs from configurations: what a model of a known family looks like at initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankscope._types import path_of
from rankscope.errors import LoadError, UnsupportedConfigError
from rankscope.models.design import CHOICES, Design
from rankscope.models.hf import is_hf_config, require_transformers
from rankscope.models.loading.config import config_from_json
from rankscope.models.presets import PRESETS, preset
from rankscope.models.weight_files.files import is_remote
from rankscope.models.weight_files.folders import config_in, model_folder

DEFAULT_TOKENS = 512
_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
_LLAMAS = ("llama", "mistral", "qwen2", "olmo", "granite", "smollm3", "stablelm")
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
_GATED = {"silu": "swiglu", "gelu": "geglu"}
SHARED_TYPE_COSINE = 1 / 3
"""Mean cosine of tokens that are the sum of a word, a position and a shared token type."""


def design_of(spec: str | Path) -> tuple[Design, tuple[str, ...]]:
    """The design of a preset, a ``config.json`` or a folder that contains one, and notes about it.

    Args:
        spec: ``"bert-base"`` or ``"init:bert-base"``, a path, ``hub:NAME`` or an address, of which only the
            configuration is read; or a configuration of transformers.

    Raises:
        UnsupportedConfigError: the initialisation of the family is not described here.
        LoadError: no such file.
        UnknownNameError: no such preset.

    Example:
        >>> design, _ = design_of("init:bert-base")
        >>> design.depth, design.width, design.norm_place
        (12, 768, 'post')
    """
    if is_hf_config(spec):
        return design_from_config(spec)
    if is_remote(spec):
        folder = model_folder(spec)
        design, notes = design_from_config(config_in(folder))
        commit = f" at commit {folder.revision}" if folder.revision else ""
        return design, (*notes, f"The configuration is that of {folder.name}{commit}.")
    of_a_model = " For a model, save its configuration (model.config.save_pretrained) and pass that folder"
    name = str(spec).removeprefix("init:")
    known = "a Design, the name of a preset, a config.json or a folder that holds one"
    advice = "" if isinstance(spec, (str, Path)) else f".{of_a_model}"
    path = path_of(name if isinstance(spec, (str, Path)) else spec, "design", f"{known}{advice}")
    if name not in PRESETS and (path.exists() or "/" in name or name.endswith(".json")):
        config_file = path / "config.json" if path.is_dir() else path
        if not config_file.is_file():
            raise LoadError(f"There is no config.json at {str(spec)!r} to read a design from.")
        return design_from_config(config_from_json(config_file, None))
    require_transformers(f"The design of the preset {name!r}")
    from transformers import AutoConfig

    entry = preset(name)
    return design_from_config(AutoConfig.for_model(entry.model_type, **entry.config))


def design_from_config(config: Any) -> tuple[Design, tuple[str, ...]]:
    """The design of a transformers configuration, and notes.

    Raises:
        UnsupportedConfigError: the family, or an option of it, is not described here.
    """
    facts = config.to_dict()
    read = _READERS.get(config.model_type)
    if read is None:
        raise UnsupportedConfigError(
            f"How a {config.model_type!r} model is initialised is not described here. Described: "
            f"{', '.join(sorted(_READERS))}. Give a rankscope.Design with its depth, width, heads, norm and variances."
        )
    try:
        return read(facts)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedConfigError(
            f"This {config.model_type} configuration is not as expected: {error!r}."
        ) from error


def _encoder(facts: Mapping[str, Any]) -> tuple[Design, tuple[str, ...]]:
    std = float(facts["initializer_range"])
    design = Design(
        depth=facts["num_hidden_layers"],
        width=facts["hidden_size"],
        heads=facts["num_attention_heads"],
        tokens=min(DEFAULT_TOKENS, facts["max_position_embeddings"]),
        positions="learned",
        norm_eps=float(facts["layer_norm_eps"]),
        mlp=_activation(facts["hidden_act"]),  # type: ignore[arg-type]
        mlp_width=facts["intermediate_size"],
        initial_cosine=SHARED_TYPE_COSINE,
        **_same_std(std),
    )
    return design, ("First tokens are distinct words: the sum of a word, a position and the one token type all share.",)


def _distilbert(facts: Mapping[str, Any]) -> tuple[Design, tuple[str, ...]]:
    design = Design(
        depth=facts["n_layers"],
        width=facts["dim"],
        heads=facts["n_heads"],
        tokens=min(DEFAULT_TOKENS, facts["max_position_embeddings"]),
        positions="learned",
        mlp=_activation(facts["activation"]),  # type: ignore[arg-type]
        mlp_width=facts["hidden_dim"],
        **_same_std(float(facts["initializer_range"])),
    )
    return design, ("First tokens are distinct words.",)


def _gpt2(facts: Mapping[str, Any]) -> tuple[Design, tuple[str, ...]]:
    std = float(facts["initializer_range"])
    scaled = std / math.sqrt(2 * facts["n_layer"])
    design = Design(
        depth=facts["n_layer"],
        width=facts["n_embd"],
        heads=facts["n_head"],
        tokens=min(DEFAULT_TOKENS, facts["n_positions"]),
        mask="causal",
        positions="learned",
        norm_place="pre",
        norm_eps=float(facts["layer_norm_epsilon"]),
        mlp=_activation(facts["activation_function"]),  # type: ignore[arg-type]
        mlp_width=facts["n_inner"] or 4 * facts["n_embd"],
        embedding_std=std * math.sqrt(2),
        embedding_norm=False,
        **{**_same_std(std), "output_std": scaled, "mlp_out_std": scaled},
    )
    return design, ("First tokens are distinct words; output matrices start smaller by sqrt(2 depth), as in GPT-2.",)


def _llama(facts: Mapping[str, Any]) -> tuple[Design, tuple[str, ...]]:
    std = float(facts["initializer_range"])
    heads = facts["num_attention_heads"]
    notes = ["First tokens are distinct words."]
    eps = facts.get("rms_norm_eps", facts.get("layer_norm_eps", 1e-6))
    if facts.get("rope_parameters") or facts.get("rope_theta"):
        notes.append("Rotary positions turn at the base 10,000, without scaling.")
    activation = _activation(facts["hidden_act"])
    design = Design(
        depth=facts["num_hidden_layers"],
        width=facts["hidden_size"],
        heads=heads,
        kv_heads=facts.get("num_key_value_heads") or heads,
        head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
        tokens=min(DEFAULT_TOKENS, facts["max_position_embeddings"]),
        mask="causal",
        positions="rope",
        norm="layernorm" if facts["model_type"] in ("olmo", "stablelm") else "rmsnorm",
        norm_place="pre",
        norm_eps=float(eps),
        mlp=_GATED[activation],  # type: ignore[arg-type]
        mlp_width=facts["intermediate_size"],
        embedding_std=std,
        embedding_norm=False,
        **_same_std(std),
    )
    return design, tuple(notes)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedConfigError(f"The activation {name!r} is not one of {', '.join(CHOICES['mlp'])}.")
    return _ACTIVATIONS[name]


def _same_std(std: float) -> dict[str, Any]:
    names = ("query_std", "key_std", "value_std", "output_std", "mlp_in_std", "mlp_out_std")
    return dict.fromkeys(names, std)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Design, tuple[str, ...]]]] = {
    **dict.fromkeys(_ENCODERS, _encoder),
    **dict.fromkeys(_LLAMAS, _llama),
    "distilbert": _distilbert,
    "gpt2": _gpt2,
}
