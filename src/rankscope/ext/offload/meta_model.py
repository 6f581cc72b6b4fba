"""A model on the meta device: its modules, buffers and configuration, and where the bytes of each parameter are.

Everything outside the blocks is read once and stays in memory (of the token table only the rows that are used); the
blocks stay empty until :mod:`rankscope.ext.offload.weights` fills them, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankscope.errors import InputError, LoadError, MissingExtraError, UnsupportedConfigError
from rankscope.ext.offload.checkpoint_names import StoredPart, converted_parts
from rankscope.models.hf import require_transformers
from rankscope.models.inputs import Prepared
from rankscope.models.loading import LoadedModel
from rankscope.models.loading._load import loaded_model
from rankscope.models.loading.affording import refuse_unaffordable
from rankscope.models.loading.config import config_from_json, model_class_named
from rankscope.models.loading.dtypes import default_dtype, parse_dtype
from rankscope.models.loading.no_requests import no_requests
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.loading.shard_files import TOKENIZER_EXTRAS, TOKENIZER_FILES
from rankscope.models.loading.tokenizer import tokenizer_in
from rankscope.models.weight_files.folders import CONNECTIONS, ModelFolder, model_folder, stored_tensors
from rankscope.models.weight_files.tensors import StoredTensor, planned_reads, run_all
from rankscope.models.wrapping import note_dtype

_SMALL = 2**16
_UNLIMITED = 2**62
"""A model that is read block by block may be larger than memory."""
_STRIDE = 31


@dataclass(frozen=True)
class Slot:
    """One parameter: its module, its name there, and where its bytes are.

    Attributes:
        name: its name in the model.
        module: the module that has it.
        leaf: its name there.
        parts: the stored tensors it is made of, one for most; none if the checkpoint does not have it.
    """

    name: str
    module: nn.Module
    leaf: str
    parts: tuple[StoredPart, ...]

    @property
    def stored(self) -> StoredTensor | None:
        """The stored tensor, if the parameter is one."""
        return self.parts[0].stored if len(self.parts) == 1 and self.parts[0].entry is None else None

    def reads(self, place: Tensor) -> list[tuple[StoredTensor, Tensor]]:
        """What is read into which part of ``place``, a tensor of the parameter's shape."""
        return [(part.stored, part.of(place)) for part in self.parts]

    @property
    def parameter(self) -> nn.Parameter:
        """The current parameter; on the meta device if it was not read yet."""
        parameter = self.module._parameters[self.leaf]
        assert parameter is not None
        return parameter

    def put(self, tensor: torch.Tensor) -> None:
        """Replace the parameter by this tensor."""
        self.module._parameters[self.leaf] = nn.Parameter(tensor, requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Size in the dtype of the model."""
        return self.parameter.numel() * self.parameter.dtype.itemsize


@dataclass(frozen=True)
class MetaModel:
    """A model whose weights have not been read."""

    folder: ModelFolder
    loaded: LoadedModel
    slots: Mapping[str, Slot]

    @property
    def connections(self) -> int:
        """How many reads of a server run at once; 1 for a local folder, where threads are cores."""
        return 1 if self.folder.traffic is None else CONNECTIONS


def open_meta_model(spec: str | Path, *, dtype: torch.dtype | str | None = None) -> MetaModel:
    """A model with its parameters on the meta device and its buffers in memory.

    Args:
        spec: a local folder, ``hub:NAME`` or an address; see :func:`model_folder`.
        dtype: dtype of the parameters; None for that of the checkpoint.

    Raises:
        LoadError: there is no such folder, or its files are not valid.
        UnsupportedConfigError: transformers changes the weights of this model while loading them.
    """
    if not isinstance(spec, (str, Path)) or str(spec).startswith("init:"):
        raise LoadError(
            f"offload reads weights from a folder, and {spec!r:.80} is not one. Leave offload out for a module "
            "in memory or a random initialisation."
        )
    folder = model_folder(spec)
    tensors = stored_tensors(folder)
    require_transformers("Reading a model block by block", at_least=(5, 18))
    with folder.copied(("config.json", *TOKENIZER_FILES, *TOKENIZER_EXTRAS)) as small, quiet_transformers():
        config = config_from_json(small / "config.json", None)
        held = sum(entry.nbytes for entry in tensors.values())
        with no_requests(folder.name):
            _refuse_buffers(config, held)
            model = _empty_model(config, _dtype(config, tensors, dtype))
        tokenizer, notes = tokenizer_in(small, config)
    _refuse(model, config)
    parts = converted_parts(model, tensors)
    slots = dict(_slots(model, parts))
    missing = sorted(name for name, slot in slots.items() if not slot.parts)
    if len(missing) == len(slots):
        raise LoadError(f"None of the weights in {folder.name} belong to a {type(model).__name__}.")
    if missing:
        notes = (*notes, f"not in the checkpoint, never read: {', '.join(missing)}")
    _fill_buffers(model, parts, _in_float32(model, config))
    loaded = loaded_model(model, str(spec), folder.origin, tokenizer=tokenizer, revision=folder.revision, notes=notes)
    return MetaModel(folder, loaded, slots)


def _refuse_buffers(config: Any, held: int) -> None:
    """Refuse a configuration that does not belong to its weights; its buffers would be allocated as it is built."""
    build = model_class_named("AutoModel").from_config
    refuse_unaffordable(config, build, torch.bfloat16, memory=_UNLIMITED, stored=held)


def _empty_model(config: Any, dtype: torch.dtype) -> nn.Module:
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise MissingExtraError("offload", "accelerate", "accelerate") from error
    from transformers.initialization import no_init_weights

    config.dtype = dtype
    try:
        with init_empty_weights(include_buffers=False), default_dtype(dtype), no_init_weights():
            model: nn.Module = model_class_named("AutoModel").from_config(config, trust_remote_code=False)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise LoadError(f"The model could not be built from its configuration: {error}") from error
    note_dtype(model, dtype)
    return model.eval()


def _dtype(config: Any, tensors: Mapping[str, StoredTensor], asked: torch.dtype | str | None) -> torch.dtype:
    """As in ``load``: the requested dtype, else that of the configuration, else that of the first weights."""
    dtype = parse_dtype(asked) or parse_dtype(config.dtype)
    return dtype or next((entry.dtype for entry in tensors.values() if entry.is_floating_point), torch.float32)


def _refuse(model: Any, config: Any) -> None:
    if config.to_dict().get("quantization_config"):
        raise UnsupportedConfigError("A quantised checkpoint cannot be offloaded: loading unpacks its weights.")
    names = _in_float32(model, config)
    if any(name in path for path, _ in model.named_parameters() for name in names):
        raise UnsupportedConfigError(
            f"transformers keeps {', '.join(names)} of {type(model).__name__} in float32 next to "
            f"{str(config.dtype).removeprefix('torch.')} weights. Offload it with dtype='float32'."
        )


def _in_float32(model: Any, config: Any) -> list[str]:
    """Parts of names that transformers reads in float32 although the model has a shorter format."""
    attributes = {torch.float16: ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"]}
    attributes[torch.bfloat16] = ["_keep_in_fp32_modules_strict"]
    return sorted({name for word in attributes.get(config.dtype, []) for name in vars(model).get(word) or ()})


def _slots(model: nn.Module, parts_of: Mapping[str, tuple[StoredPart, ...]]) -> Iterator[tuple[str, Slot]]:
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{leaf}" if path else leaf
            slot = Slot(name, module, leaf, parts_of.get(name, ()))
            stored = slot.stored
            if stored is not None and stored.shape != tuple(parameter.shape):
                raise LoadError(
                    f"{stored.file.name}: {name!r} has the shape {stored.shape}; {type(model).__name__} expects "
                    f"{tuple(parameter.shape)}. The weights do not belong to this configuration."
                )
            yield name, slot


def _fill_buffers(model: nn.Module, parts_of: Mapping[str, tuple[StoredPart, ...]], in_float32: Sequence[str]) -> None:
    """Read persistent buffers from the files, some in float32; the others were created with the modules.

    Raises:
        UnsupportedConfigError: a module computes a buffer from weights, which are not in memory.
    """
    persistent = set(model.state_dict(keep_vars=True))
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            name = f"{path}.{leaf}" if path else leaf
            if buffer is None:
                continue
            stored = Slot(name, module, leaf, parts_of.get(name, ())).stored
            if name in persistent and stored is not None and stored.shape == tuple(buffer.shape):
                dtype = torch.float32 if any(word in name for word in in_float32) else buffer.dtype
                place = torch.empty(buffer.shape, dtype=dtype)
                stored.read_into(place)
                module._buffers[leaf] = place
            elif buffer.is_meta:
                raise UnsupportedConfigError(
                    f"{name} of {type(model).__name__} is computed from weights when the model is built, and is not "
                    "stored in the checkpoint. Leave offload out."
                )


def read_rest(meta_model: MetaModel, blocks: Sequence[str], prepared: Prepared) -> None:
    """Read everything outside the blocks, and only those rows of the token table that are used."""
    table = _token_table(meta_model, prepared)
    places: dict[tuple[tuple[StoredPart, ...], torch.dtype], Tensor] = {}
    reads: list[tuple[StoredTensor, Tensor]] = []
    with ThreadPoolExecutor(meta_model.connections) as readers:
        for slot in _outside(meta_model, blocks):
            if slot.module is table:
                _read_rows(slot, table, _ids(prepared), readers)
                continue
            # Parameters that are stored once, such as tied ones, are read once.
            key = slot.parts, slot.parameter.dtype
            if key not in places:
                places[key] = torch.empty(slot.parameter.shape, dtype=slot.parameter.dtype)
                reads += slot.reads(places[key])
            slot.put(places[key])
        run_all(planned_reads(reads), readers)


def rest_bytes(meta_model: MetaModel, blocks: Sequence[str], prepared: Prepared) -> int:
    """The memory that :func:`read_rest` will take."""
    table = _token_table(meta_model, prepared)
    total = 0
    for slot in _outside(meta_model, blocks):
        whole = slot.nbytes
        total += whole * len(_ids(prepared)) // slot.parameter.shape[0] if slot.module is table else whole
    return total


def _outside(meta_model: MetaModel, blocks: Sequence[str]) -> list[Slot]:
    inside = tuple(f"{block}." for block in blocks)
    return [slot for slot in meta_model.slots.values() if slot.parts and not slot.name.startswith(inside)]


def _ids(prepared: Prepared) -> Tensor:
    """The token ids that occur, sorted."""
    every = torch.cat([part.inputs["input_ids"].reshape(-1) for part in prepared])
    ids: Tensor = torch.unique(every)
    return ids


def _token_table(meta_model: MetaModel, prepared: Prepared) -> nn.Embedding | None:
    """The embedding whose rows are token ids, if reading only some of them is safe."""
    model = meta_model.loaded.model
    table = model.get_input_embeddings() if all("input_ids" in part.inputs for part in prepared) else None  # type: ignore[operator]
    if not isinstance(table, nn.Embedding) or table.max_norm is not None:
        return None
    # A table that another module shares (tied weights) is read whole, because that module may need every row.
    holders = [slot for slot in meta_model.slots.values() if slot.parameter is table.weight]
    return table if len(holders) == 1 and holders[0].stored is not None else None


def _read_rows(slot: Slot, table: nn.Embedding, ids: Tensor, readers: Executor) -> None:
    assert slot.stored is not None
    if int(ids[0]) < 0 or int(ids[-1]) >= slot.stored.shape[0]:
        raise InputError(
            f"Token ids run from {int(ids[0])} to {int(ids[-1])}; the table has {slot.stored.shape[0]} rows."
        )

    # The table has only the rows that occur, in sorted order: map each id to its position among them.
    def renumber(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.searchsorted(ids, args[0]), *args[1:])

    slot.put(slot.stored.read_rows(ids.tolist(), slot.parameter.dtype, readers))
    table.padding_idx = None  # affects gradients only, and indexes the whole table
    table.register_forward_pre_hook(renumber)


@contextmanager
def standing_in(slots: Mapping[str, Slot]) -> Iterator[None]:
    """Inside this context, stand-ins that take no memory replace all missing weights: a pass can discover the blocks.

    Large weights are zero and small ones random. A linear layer picks one channel of its input for each of its outputs,
    without computing a product, so that each token still determines what becomes of it.
    """
    before = _put_stand_ins(slots)
    try:
        with _Picks():
            yield
    finally:
        for name, empty in before.items():
            slots[name].put(empty)


class _Picks(TorchFunctionMode):
    """Linear layers return entries of their input."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Pick channels for ``linear``, and for ``addmm`` with a bias; call anything else."""
        if func is F.linear and not kwargs:
            x, (outputs, inputs) = args[0], args[1].shape
        elif func is torch.addmm and not kwargs and isinstance(args[0], nn.Parameter):
            x, (inputs, outputs) = args[1], args[2].shape
        else:
            return func(*args, **(kwargs or {}))
        return x[..., (torch.arange(outputs, device=x.device) * _STRIDE) % inputs].clone()


def _put_stand_ins(slots: Mapping[str, Slot]) -> dict[str, Tensor]:
    """Fill every parameter on the meta device; returns the old tensors."""
    zeros: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
    before = {}
    for name, slot in slots.items():
        parameter = slot.parameter
        if parameter.is_meta:
            before[name] = parameter.data
            key = parameter.shape, parameter.dtype
            if key not in zeros:  # parameters of equal shape share one tensor
                zeros[key] = _untouched(parameter)
            slot.put(zeros[key])
    return before


def _untouched(like: Tensor) -> Tensor:
    """Random numbers if there are few, else zeros that take no memory until touched: NumPy allocates lazily."""
    if like.nbytes < _SMALL:
        return torch.from_numpy(np.random.default_rng(0).uniform(0.5, 1.5, tuple(like.shape))).to(like.dtype)
    return torch.from_numpy(np.zeros(like.nbytes, dtype=np.uint8)).view(like.dtype).view(like.shape)
