"""What stands around a model, and how the model runs under it as written, and is left as it was found.

Wrappers (DDP, ``torch.compile``, PEFT) are looked through; shards over processes (FSDP, tensor parallel) stay, because
the model cannot run without them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rankscope.errors import InputError, UnsupportedConfigError

Spread = Literal["fsdp", "tensor"]
STANCES = "2.6"
"""The first torch that can run compiled functions as they were written."""
T = TypeVar("T")


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


def _refuse_compiled_functions(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module.forward, "_torchdynamo_orig_callable"):
            raise UnsupportedConfigError(
                f"The forward method of {name or type(model).__name__} is a compiled function. Reading such a model "
                f"needs torch {STANCES} or newer, and this is {torch.__version__}. Use torch.compile(module) or "
                "module.compile() instead of compiling its forward method, or measure before compiling."
            )


_FASTPATH_LOCK = threading.Lock()
_fastpath_before: list[bool] = []
"""One entry for each time that the fused path is disabled now, in any thread: the setting that was found first."""


@contextmanager
def without_fastpath() -> Iterator[None]:
    """Disable the fused path of ``nn.TransformerEncoderLayer``, and restore the setting afterwards.

    The setting belongs to the process. It is restored when the last of several threads is done.
    """
    with _FASTPATH_LOCK:
        found = _fastpath_before[0] if _fastpath_before else torch.backends.mha.get_fastpath_enabled()
        _fastpath_before.append(found)
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _FASTPATH_LOCK:
            found = _fastpath_before.pop()
            if not _fastpath_before:
                torch.backends.mha.set_fastpath_enabled(found)


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
        if "torch._dynamo" in sys.modules and torch.__version__ < STANCES:
            _refuse_compiled_functions(module)
        elif "torch._dynamo" in sys.modules:
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


def once_more_uncompiled(run: Callable[[], T]) -> T:
    """Run passes under :func:`uncompiled`; if they fail and have imported the compiler, run them again.

    ``flex_attention`` and ``cond`` compile themselves when they are called, our hooks and modes included, unless they
    are set not to. They can only be set once the compiler is imported, and importing it for every model takes seconds.
    """
    before = "torch._dynamo" in sys.modules
    try:
        return run()
    except Exception:
        if before or "torch._dynamo" not in sys.modules:
            raise
    return run()


def in_group() -> bool:
    """Whether this process belongs to an initialised group of at least two."""
    return _initialised() and torch.distributed.get_world_size() > 1


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """The modules ``fully_shard`` was called on, innermost last."""
    if not _initialised():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _initialised() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def needs_all_ranks(model: nn.Module) -> bool:
    """Whether a forward pass communicates: parameters are spread over the ranks (FSDP, tensor parallel)."""
    if not _initialised():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    return (
        bool(fsdp_modules(model))
        or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
    )


def spread_of(model: nn.Module) -> Spread | None:
    """How a model is spread over all ranks: its weights (FSDP) or single products (tensor parallel); None if it is not.

    Raises:
        InputError: it is spread in both ways at once, or over some of the ranks only.
    """
    if not needs_all_ranks(model):
        return None
    laid_out = [parameter for parameter in model.parameters() if is_distributed(parameter)]
    if fsdp_modules(model):
        if any(_axes(parameter) > 1 for parameter in laid_out):
            raise InputError(
                "The model is spread by FSDP and by tensor parallelism at once. Measure it spread in one way: load it "
                "with one of them over all processes."
            )
        return "fsdp"
    ranks = {parameter.device_mesh.size() for parameter in laid_out}  # type: ignore[attr-defined]
    world = torch.distributed.get_world_size()
    if ranks - {world}:
        raise InputError(
            f"The model is tensor-parallel over {', '.join(map(str, sorted(ranks)))} of {world} processes. Spread it "
            "over all of them, or start fewer."
        )
    return "tensor" if laid_out else "fsdp"


def _axes(parameter: Any) -> int:
    """Over how many axes of ranks a parameter is cut; replicas (as in hybrid FSDP) are no cut."""
    return sum(not placement.is_replicate() for placement in parameter.placements)


def is_distributed(tensor: object) -> bool:
    """Whether this is a ``DTensor``."""
    if not _initialised():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or the whole of a ``DTensor``; a collective operation for those."""
    found: Any = tensor
    gathered: Tensor = found.full_tensor() if is_distributed(tensor) else tensor
    return gathered


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Without a backward pass FSDP2 leaves parameters gathered, where the optimizer's next step does not reach them."""
    try:
        yield
    finally:
        for module in fsdp_modules(model):
            module.reshard()  # type: ignore[operator]


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Copy buffers first; restore those that were written to or replaced."""
    before = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, kept in before:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            # The statistics of a norm are written by its kernel, which does not count as a new version.
            if buffer is not None and kept is not None and not buffer.is_meta and not torch.equal(buffer, kept):
                with torch.no_grad():
                    buffer.copy_(kept)


@contextmanager
def with_parameters(model: nn.Module, replaced: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a model with other parameters inside the ``with`` block; its own are not touched and come back.

    A tensor that is a parameter itself is put in as it is, so that gradients reach it.
    """
    old: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    new = {
        name: tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        for name, tensor in replaced.items()
    }
    try:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                full = own.get(id(parameter)) if parameter is not None else None
                if full in new:  # also where a tied parameter has another name
                    old.append((module, name, parameter))
                    module._parameters[name] = new[full]
        yield
    finally:
        for module, name, parameter in reversed(old):
            module._parameters[name] = parameter


@contextmanager
def hidden() -> Iterator[None]:
    """Hide our own work from every mode."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


_LOADED_DOUBLE: WeakSet[nn.Module] = WeakSet()


def note_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Remember a model that was loaded in float64."""
    if dtype is torch.float64:
        _LOADED_DOUBLE.add(model)


def is_loaded_double(model: nn.Module) -> bool:
    """Whether the model was loaded in float64, and did not come as a module that computes as its author wants."""
    return model in _LOADED_DOUBLE
