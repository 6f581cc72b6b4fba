"""``Model``: what is run, and how, as every verb takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from rankscope._printing import brief
from rankscope.errors import InputError
from rankscope.models import loading
from rankscope.models.loading import LoadedModel
from rankscope.models.stream import Stream, stream_of
from rankscope.models.wrapping import Spread, unwrapped
from rankscope.options import MODEL_FIELDS, checked_fields

Parallel = Literal["data", "fsdp", "tensor"]


@dataclass(frozen=True, eq=False)
class Model:
    """A model, and how to run it: dtype, device, seed, where its blocks and its residual stream are, and in what parts.

    Every verb takes it as ``model``. A spec, a folder or a module is accepted in its place. The weights are loaded when
    they are first needed, and stay loaded; :func:`rankscope.load` loads them at once.

    Args:
        source: a module (used as it is, without wrappers such as ``torch.compile``), ``init:NAME`` or ``init:PATH``
            (random initialisation of a preset or of a config.json), a folder, a .gguf file, or a hub id, also as
            ``hub:NAME`` or ``hub:NAME@REVISION``.
        seed: seed of a random initialisation, and of random inputs unless they have their own; the global random state
            is not changed.
        dtype: dtype of the weights; None keeps the checkpoint's, or float32 for a random initialisation.
        device: device to run on, such as ``"cuda"``; None for the CPU. A module stays where it is.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: where the residual stream is, for a model that does not store it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        parallel: share the work among the processes of an initialised group; all of them must make the same calls, and
            all get the same result. ``"data"`` distributes whole batches, ``"fsdp"`` and ``"tensor"`` shard the model.
            None for this process alone, or for the way in which your module is already sharded.
        offload: read the weights block by block, for a model larger than memory or not on this machine: a local folder,
            ``hub:NAME``, ``hub:NAME@REVISION``, or the address of a folder (``s3://``, ``gs://``). The
            values are the same.
        memory: with ``offload``, a budget such as ``"3GiB"``; residual streams are moved to files to stay within it.
            Raises with an estimate if even one block at a time needs more. None for no limit.
        revision: revision of a hub id.
        trust_remote_code: run code shipped with the model. If False, such code is never run.
        allow_pickle: read ``pytorch_model.bin``, tensors only.
        model_class: the transformers class to build, instead of the backbone ``AutoModel`` chooses.

    Raises:
        InputError: a value is not one of those above.

    Example:
        >>> Model("init:tiny-bert", seed=1).loaded.parameters
        46400
        >>> Model("init:tiny-bert", parallel="dta")
        Traceback (most recent call last):
        rankscope.errors.InputError: parallel='dta': expected 'data', 'fsdp' or 'tensor'. Did you mean 'data'?
    """

    source: str | Path | nn.Module | LoadedModel
    seed: int = field(default=0, kw_only=True)
    dtype: torch.dtype | str | None = field(default=None, kw_only=True)
    device: torch.device | str | None = field(default=None, kw_only=True)
    blocks: str | Sequence[str] | None = field(default=None, kw_only=True)
    stream: Stream | str | None = field(default=None, kw_only=True)
    parallel: Parallel | None = field(default=None, kw_only=True)
    offload: bool = field(default=False, kw_only=True)
    memory: int | str | None = field(default=None, kw_only=True)
    revision: str | None = field(default=None, kw_only=True)
    trust_remote_code: bool = field(default=False, kw_only=True)
    allow_pickle: bool = field(default=False, kw_only=True)
    model_class: str | None = field(default=None, kw_only=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name, value in checked_fields(MODEL_FIELDS, values).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "seed", self.seed or 0)
        object.__setattr__(self, "stream", stream_of(self.stream))

    @property
    def is_module(self) -> bool:
        """Whether it is a module of the caller, which is not changed."""
        return isinstance(self.source, nn.Module)

    @property
    def declared_stream(self) -> Stream | None:
        """The declared layout of the residual stream."""
        return stream_of(self.stream)

    @property
    def spec(self) -> str | None:
        """How it was named, for the commands a verdict suggests; None for a module."""
        if isinstance(self.source, LoadedModel):
            return None if self.source.origin == "memory" else self.source.spec
        return None if isinstance(self.source, nn.Module) else str(self.source)

    @property
    def loaded(self) -> LoadedModel:
        """The module with its tokenizer and origin; loads the weights on first use.

        Raises:
            LoadError: the spec does not name a model, or the machine does not have the device.
            InputError: it is neither a module nor a string, or it is to be read block by block.
        """
        if self.offload:
            raise InputError(
                f"{self.source} is read block by block (offload=True), so it is never in memory as a whole. Pass the "
                "Model to a verb, or load it without offload."
            )
        return self.loaded_with(None)

    def loaded_with(self, spread: Spread | None) -> LoadedModel:
        """The model, or the shard of this process; weights that are read are read once."""
        kept: LoadedModel | None = vars(self).get("_kept")
        if kept is not None:
            return kept
        loaded = loading.load(
            self.source,
            seed=self.seed,
            dtype=self.dtype,
            device=self.device,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            allow_pickle=self.allow_pickle,
            model_class=self.model_class,
            spread=spread,
        )
        if not self.is_module:  # a module may have another dtype or device the next time
            vars(self)["_kept"] = loaded  # not setattr, which a frozen dataclass refuses
        return loaded

    @property
    def model(self) -> nn.Module:
        """The module itself; in eval mode unless it was passed in memory."""
        return unwrapped(self.source) if isinstance(self.source, nn.Module) else self.loaded.model

    @property
    def tokenizer(self) -> Any | None:
        """Its tokenizer, or None."""
        return self.loaded.tokenizer

    @property
    def config(self) -> Any | None:
        """The transformers configuration, or None for a module that has none."""
        return self.loaded.config

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks worth printing, such as weights the checkpoint lacks."""
        return self.loaded.notes


ModelLike: TypeAlias = str | Path | nn.Module | LoadedModel | Model
"""What every verb accepts as ``model``."""


def as_model(given: ModelLike) -> Model:
    """``given`` as a :class:`Model`.

    Raises:
        InputError: it names no model.
    """
    if isinstance(given, Model):
        return given
    return Model(given)


def load(
    source: str | Path | nn.Module,
    *,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
    parallel: Parallel | None = None,
    offload: bool = False,
    memory: int | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    model_class: str | None = None,
) -> Model:
    """A :class:`Model` with its weights in memory, unless they are read block by block or sharded over processes.

    The arguments are those of :class:`Model`.

    Raises:
        LoadError: the spec does not name a model, or the machine does not have the device.
        InputError: an argument is not what :class:`Model` takes.

    Example:
        >>> load("init:tiny-bert").loaded.parameters
        46400
    """
    model = Model(
        source,
        seed=seed,
        dtype=dtype,
        device=device,
        blocks=blocks,
        stream=stream,
        parallel=parallel,
        offload=offload,
        memory=memory,
        revision=revision,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        model_class=model_class,
    )
    if not offload and parallel in (None, "data"):
        _ = model.loaded
    return model
