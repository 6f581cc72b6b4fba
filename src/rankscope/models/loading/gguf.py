"""A model in a GGUF file: what has to be seen before, and behind, transformers reading it."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rankscope._errors import LoadError, MissingExtraError
from rankscope.models.loading.affording import refuse_larger_than_memory
from rankscope.models.loading.config import refuse_remote_kernels
from rankscope.models.loading.foreign import refusing
from rankscope.models.loading.gguf_header import read_gguf_header
from rankscope.models.loading.meta import on_meta
from rankscope.models.loading.pretrained import refuse_too_large
from rankscope.models.loading.request import Request


def only_gguf(folder: Path) -> str | None:
    """The GGUF file of a folder without safetensors, if there is one."""
    if any(folder.glob("*.safetensors")):
        return None
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if len(found) > 1:
        raise LoadError(f"{folder} holds several GGUF files ({', '.join(found)}). Pass the path of one of them.")
    return found[0] if found else None


def gguf_config(folder: Path, gguf: str, request: Request) -> Any:
    """The configuration in a GGUF file, once its header was found whole and its numbers fit into memory."""
    if find_spec("gguf") is None:
        raise MissingExtraError("Reading a GGUF file", "gguf", "gguf")
    import transformers

    header = read_gguf_header(folder / gguf)
    for key, value in header.metadata.items():
        if key.endswith(".block_count") and type(value) is int and value > len(header.elements):
            raise LoadError(f"{folder / gguf} announces {value:,} blocks and holds {len(header.elements):,} tensors.")
    refuse_larger_than_memory(sum(header.elements.values()), torch.float32)
    with refusing(LoadError, f"{folder / gguf} holds no configuration that can be read", "Fetch it again."):
        config = transformers.AutoConfig.from_pretrained(str(folder), gguf_file=gguf, local_files_only=True)
    refuse_remote_kernels(config.to_dict(), gguf)
    refuse_too_large(config, request, torch.float32)
    return config


def refuse_other_shapes(model: Any, path: Path) -> None:
    """Tensors of a GGUF file are put into the model as they are, also where its metadata describes others."""
    with on_meta():
        expected = type(model)(copy.deepcopy(model.config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, parameter in expected.named_parameters():
        if shapes.get(name) != tuple(parameter.shape):
            raise LoadError(
                f"{path} describes {name} as {tuple(parameter.shape)} and holds {shapes.get(name)}: its metadata and "
                "its tensors do not belong together. Fetch it again."
            )
