"""Wrappers around a model: which module is the model itself, and how it runs as written instead of compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from rankscope.errors import UnsupportedConfigError


def unwrapped(model: nn.Module) -> nn.Module:
    """The module under DDP, ``DataParallel``, ``torch.compile`` and PEFT, which share its parameters.

    Its forward pass involves no communication. FSDP is kept, because the model cannot run without it.

    Raises:
        UnsupportedConfigError: the wrapper changes the tokens, or only compiled code is left of the model.
    """
    while True:
        inner = _inside(model)
        if inner is None:
            return model
        model = inner


def _inside(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.DataParallel):
        return cast(nn.Module, model.module)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedConfigError(
            f"{type(model).__name__} is TorchScript: its blocks and attention run inside a compiled graph, where they "
            "cannot be read. Pass the module that was scripted or traced."
        )
    if torch.distributed.is_available():
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(model, DistributedDataParallel):
            return cast(nn.Module, model.module)
    if _is_compiled_wrapper(model):
        return cast(nn.Module, model._orig_mod)
    if "peft" in sys.modules:
        from peft import PeftMixedModel, PeftModel

        if isinstance(model, (PeftModel, PeftMixedModel)):
            return _adapted(model)
    return None


def _adapted(model: Any) -> nn.Module:
    """The transformers model with its adapters in place: they are part of its modules and run with it."""
    config = model.active_peft_config if isinstance(model.active_adapter, str) else None
    if config is not None and config.is_prompt_learning:
        raise UnsupportedConfigError(
            f"{type(config).__name__} puts {config.num_virtual_tokens} learned tokens before yours, or keys and "
            "values before those of every layer, so that positions and padding are not those of your inputs. Measure "
            "the model without them, model.get_base_model(); or build their embeddings yourself and pass the base "
            "model inputs_embeds."
        )
    return cast(nn.Module, model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model)


def _is_compiled_wrapper(module: nn.Module | None) -> bool:
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, runs compiled."""
    return any(module._compiled_call_impl or _is_compiled_wrapper(module) for module in model.modules())


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Run what ``torch.compile`` wrapped as it was written; compiled code is kept, and neither run nor recompiled.

    Parts that were replaced by compiled wrappers (``layers[0] = torch.compile(layers[0])``) stand in their places
    themselves meanwhile, so that names, hooks and weights are those of the model as written.
    """
    replaced = [
        (part, name, child)
        for part in list(module.modules())
        for name, child in part._modules.items()
        if _is_compiled_wrapper(child) and not _is_compiled_wrapper(part)
    ]
    compiled = [(part, part._compiled_call_impl) for part in module.modules() if part._compiled_call_impl]
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # Also reaches functions that were compiled, such as model.forward = torch.compile(model.forward).
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for part, name, child in replaced:
                assert child is not None
                part._modules[name] = unwrapped(child)
            for part, _ in compiled:
                part._compiled_call_impl = None
            yield
        finally:
            for part, name, child in replaced:
                part._modules[name] = child
            for part, call in compiled:
                part._compiled_call_impl = call
