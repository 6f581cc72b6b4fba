"""``from_pretrained``, with checks before and after it for what it must not do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rankscope.errors import LoadError
from rankscope.models.hf import dtype_argument
from rankscope.models.loading.affording import refuse_unaffordable
from rankscope.models.loading.config import model_class_named
from rankscope.models.loading.spreading import spread_arguments
from rankscope.models.wrapping import Spread


@dataclass(frozen=True)
class Request:
    """What the caller of ``load`` requested and allowed."""

    seed: int
    dtype: torch.dtype | None
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    model_class: str | None
    spread: Spread | None = None


@dataclass(frozen=True)
class PretrainedWeights:
    """A model with weights, its tokenizer if there is one, and notes to keep."""

    model: torch.nn.Module
    tokenizer: Any | None
    revision: str | None
    notes: tuple[str, ...]


def refuse_too_large(
    config: Any, request: Request, dtype: torch.dtype = torch.bfloat16, stored: int | None = None
) -> None:
    """Refuse a configuration that is too large for this machine or for its weights: it may claim a billion layers."""
    if request.spread is None:
        name = request.model_class or "AutoModel"
        chosen = model_class_named(name)
        if name == "AutoModel" and not request.trust_remote_code and type(config) not in _bases():
            raise LoadError(f"AutoModel has no model for a {type(config).__name__}; {_named_class(config)}.")
        build = chosen.from_config if name.startswith("AutoModel") else chosen
        refuse_unaffordable(config, build, request.dtype or dtype, stored=stored)


def from_pretrained(where: str, request: Request, arguments: dict[str, Any]) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """Load the weights; those that the checkpoint lacks are drawn from the seed and reported."""
    chosen = model_class_named(request.model_class or "AutoModel")
    if request.spread is not None:
        arguments = arguments | spread_arguments(request.spread, arguments.get("config"), chosen)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(request.seed)
        try:
            model, report = chosen.from_pretrained(
                where,
                **{dtype_argument(): request.dtype if request.dtype is not None else "auto"},
                trust_remote_code=request.trust_remote_code,
                output_loading_info=True,
                **arguments,
            )
        except Exception as error:  # pickle, safetensors and transformers may raise anything
            raise LoadError(f"The weights of {where} could not be read: {type(error).__name__}: {error}") from error
    expected = {name for name, _ in model.named_parameters()}
    missing = sorted(expected & set(report["missing_keys"]))
    if 2 * len(missing) > len(expected):
        raise _mostly_random(where, model, len(expected) - len(missing), len(expected), "gguf_file" in arguments)
    notes = (f"not in the checkpoint, drawn at random: {', '.join(missing)}",) if missing else ()
    return model.eval(), notes


def _bases() -> Any:
    import transformers

    return transformers.MODEL_MAPPING


def _named_class(config: Any) -> str:
    """What to pass: the class that the configuration says it was saved from, if transformers has it."""
    import transformers

    named = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, str(name))]
    return f"pass model_class={named[0]!r}, which its config.json names" if named else "pass the right model_class="


def _mostly_random(where: str, model: torch.nn.Module, found: int, wanted: int, is_gguf: bool) -> LoadError:
    """An error for a checkpoint that lacks most weights: random numbers would be measured."""
    share = f"Only {found} of the {wanted}" if found else "None of the"
    remedy = "gguf 0.18 or newer reads more kinds of files" if is_gguf else _named_class(model.config)
    return LoadError(f"{share} weights of a {type(model).__name__} are in {where}; {remedy}.")
