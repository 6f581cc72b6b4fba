"""Loads a model of which each process holds its own part; transformers does the splitting."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from rankscope.errors import LoadError
from rankscope.models.loading.affording import on_meta
from rankscope.models.wrapping import Spread, in_group

OLDEST_TORCH = "2.7"
_NUMBERED = re.compile(r"\.\d+$")


def spread_arguments(spread: Spread, config: Any, model_class: Any) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that distribute a model over all processes.

    Args:
        spread: ``"fsdp"`` (each process holds a part of every weight and gathers a block when it runs) or ``"tensor"``
            (each process computes with its part).
        config: the model's configuration; for FSDP a plan is added to it if transformers' own names no block.
        model_class: the class to be loaded.

    Raises:
        LoadError: there is no process group, no plan, the heads cannot be divided evenly, or the version of
            torch is too old.
    """
    world = torch.distributed.get_world_size() if in_group() else 1
    if world == 1:
        raise LoadError(
            f"parallel={spread!r} spreads a model over several processes, and there is one. Start several, e.g. "
            "torchrun --nproc-per-node 2 -m rankscope measure ..., or leave it out."
        )
    if config is None:
        raise LoadError(f"parallel={spread!r} needs a model folder with a config.json. Convert a GGUF file first.")
    from transformers.distributed import DistributedConfig

    if "fsdp_size" not in {field.name for field in fields(DistributedConfig)}:
        import transformers

        raise LoadError(
            f"transformers {transformers.__version__} cannot load a model spread over processes. Install a newer one, "
            "or use parallel='data'."
        )
    if spread == "tensor":
        _need_tensor_plan(config, world)
        _need_torch(spread)
        return {"distributed_config": DistributedConfig(tp_size=world)}
    _need_torch(spread)
    _note_fsdp_plan(config, model_class)
    return {"distributed_config": DistributedConfig(fsdp_size=world)}


def _need_torch(spread: Spread) -> None:
    """Refuse versions of torch that lack what transformers calls to distribute a model, or lack it for CPUs."""
    if torch.__version__ < OLDEST_TORCH:
        raise LoadError(
            f"parallel={spread!r} needs torch {OLDEST_TORCH} or newer, and this is {torch.__version__}. Install a "
            "newer one, or use parallel='data'."
        )


def _need_tensor_plan(config: Any, world: int) -> None:
    text = config.get_text_config()
    plan = {**(config.base_model_tp_plan or {}), **(text.base_model_tp_plan or {})}
    if not plan:
        raise LoadError(
            f"transformers has no tensor-parallel plan for {config.model_type}. Use parallel='fsdp', which spreads the "
            "weights of any model, or parallel='data'."
        )
    if not any(style == "colwise" and "attn" in name for name, style in plan.items()):
        return
    described = text.to_dict()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = described.get(name)
        if isinstance(heads, int) and heads % world:
            raise LoadError(
                f"{heads} heads ({name}) cannot be dealt to {world} processes evenly. Start a number of processes that "
                f"divides {heads}, or use parallel='fsdp'."
            )


def _note_fsdp_plan(config: Any, model_class: Any) -> None:
    """If transformers' plan names no list of blocks, use every outermost list of modules."""
    with on_meta():
        skeleton = model_class.from_config(config) if "AutoModel" in model_class.__name__ else model_class(config)
    names = block_patterns(skeleton)
    known = {_NUMBERED.sub(".*", name) for name, _ in skeleton.named_modules()}
    own = [pattern for pattern in config.base_model_fsdp_plan or {} if pattern in known and pattern.endswith(".*")]
    if not own:
        config.base_model_fsdp_plan = dict.fromkeys(names, "free_full_weight")


def block_patterns(model: nn.Module) -> list[str]:
    """The outermost lists of modules, as patterns.

    Example:
        >>> block_patterns(nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)])))
        ['1.*']
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [f"{name}.*" for name in outer]


def distributed(model: Any, spread: Spread) -> nn.Module:
    """Distribute a model that every process has built whole; each keeps its own part."""
    model_class = type(model)
    wanted = spread_arguments(spread, model.config, model_class)["distributed_config"]
    model.init_parallel_plans()
    settled, _, meshes = model_class.prepare_distribute_model(wanted)
    over_ranks: nn.Module = model_class.maybe_distribute_model(model, settled, meshes)
    return over_ranks
