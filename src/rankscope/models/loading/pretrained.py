"""``from_pretrained``, with what it must not do by itself refused before and behind it."""

from __future__ import annotations

from typing import Any

import torch

from rankscope._errors import LoadError
from rankscope.models.loading.affording import refuse_unaffordable
from rankscope.models.loading.config import model_class_named
from rankscope.models.loading.request import Request
from rankscope.models.loading.spreading import spread_arguments


def refuse_too_large(config: Any, request: Request, dtype: torch.dtype = torch.bfloat16) -> None:
    """A folder may hold few weights and a configuration of a billion layers."""
    if request.spread is None and not request.placement:
        name = request.model_class or "AutoModel"
        chosen = model_class_named(name)
        build = chosen.from_config if name.startswith("AutoModel") else chosen
        refuse_unaffordable(config, build, request.dtype or dtype)


def from_pretrained(where: str, request: Request, arguments: dict[str, Any]) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """Weights the checkpoint lacks are drawn from the seed, and said."""
    chosen = model_class_named(request.model_class or "AutoModel")
    if request.spread is not None:
        arguments = arguments | spread_arguments(request.spread, arguments.get("config"), chosen)
    arguments = {**arguments, **request.placement}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(request.seed)
        try:
            model, report = chosen.from_pretrained(
                where,
                dtype=request.dtype if request.dtype is not None else "auto",
                trust_remote_code=request.trust_remote_code,
                output_loading_info=True,
                **arguments,
            )
        except Exception as error:  # pickle, safetensors and transformers raise what they like
            raise LoadError(f"The weights of {where} could not be read: {type(error).__name__}: {error}") from error
    expected = {name for name, _ in model.named_parameters()}
    missing = sorted(expected & set(report["missing_keys"]))
    if 2 * len(missing) > len(expected):
        raise _mostly_random(where, model, len(expected) - len(missing), len(expected), "gguf_file" in arguments)
    notes = (f"not in the checkpoint, drawn at random: {', '.join(missing)}",) if missing else ()
    return model.eval(), notes


def _mostly_random(where: str, model: torch.nn.Module, found: int, wanted: int, is_gguf: bool) -> LoadError:
    """What would be measured is the random numbers that stand for the rest."""
    share = f"Only {found} of the {wanted}" if found else "None of the"
    remedy = "gguf 0.18 or newer reads more kinds of files" if is_gguf else "pass the right model_class="
    return LoadError(f"{share} weights of a {type(model).__name__} are in {where}; {remedy}.")
