"""Reads the blocks of a model from its safetensors files one at a time, without building the model.

Only headers are read at first; then, of each block, the attention and (if wanted) the MLP with the norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankscope.errors import LoadError, UnsupportedConfigError
from rankscope.ext.theory.mlp_weights import mlp_paths
from rankscope.models.heads.family import Family, config_value, family_of
from rankscope.models.weight_files.folders import CONNECTIONS, ModelFolder, config_in, model_folder, stored_tensors
from rankscope.models.weight_files.tensors import StoredTensor, planned_reads, run_all


@dataclass(frozen=True)
class LazyBlock:
    """The layers in which a block runs, and a bare module with its parameters under their names and nothing else."""

    layers: tuple[int, ...]
    module: torch.nn.Module


@dataclass(frozen=True)
class LazyModel:
    """A model whose weights have not been read yet.

    Attributes:
        folder: its files.
        config: its configuration.
        family: the description of its heads.
        tensors: its tensors by name.
        with_mlps: whether MLPs and norms are read besides the attention.
    """

    folder: ModelFolder
    config: Any
    family: Family
    tensors: Mapping[str, StoredTensor]
    with_mlps: bool = True

    @property
    def prefixes(self) -> Mapping[int, str]:
        """The name prefix of each block's parameters, by its number."""
        ends = [re.escape(self.family.projections[0]) + (r"\.weight" if self.family.layout != "einsum" else "")]
        pattern = re.compile(rf"(.*?)(\d+)\.{ends[0]}")
        prefixes: dict[int, str] = {}
        for name in self.tensors:
            match = pattern.fullmatch(name)
            if match:
                number = int(match[2])
                if number in prefixes:
                    raise UnsupportedConfigError(
                        f"{self.folder.name} holds two blocks number {number} ({prefixes[number]}, {match[1]}{number}.)"
                        ": the weights-only mode reads models of one stack. Leave weights_only out."
                    )
                prefixes[number] = f"{match[1]}{number}."
        return dict(sorted(prefixes.items()))

    def blocks(self) -> Iterator[LazyBlock]:
        """One block at a time, read only while it is used.

        Raises:
            LoadError: no block was found.
        """
        prefixes = self.prefixes
        if not prefixes:
            raise LoadError(
                f"{self.folder.name} holds no parameter that ends in {self.family.projections[0]!r}, which the family "
                f"{self.family.name!r} expects in every block."
            )
        shared = self.family.name == "albert"
        with ThreadPoolExecutor(1 if self.folder.traffic is None else CONNECTIONS) as readers:
            for number, prefix in prefixes.items():
                layers = tuple(range(int(config_value(self.config, "num_hidden_layers")))) if shared else (number,)
                yield LazyBlock(layers, self._module(prefix, readers))

    @property
    def nbytes(self) -> int:
        """The size of everything that :meth:`blocks` reads."""
        return sum(self.tensors[name].nbytes for prefix in self.prefixes.values() for name in self._wanted(prefix))

    def _wanted(self, prefix: str) -> list[str]:
        """The names of the tensors of a block that are read."""
        wanted = (*self.family.projections, self.family.output)
        if self.with_mlps:
            wanted = (*wanted, *mlp_paths(self.family))
        if self.family.layout == "einsum":
            wanted = (*wanted, self.family.output.rpartition(".")[0])
        return [
            name
            for name in self.tensors
            if name.startswith(prefix) and any(_is_below(name[len(prefix) :], path) for path in wanted)
        ]

    def _module(self, prefix: str, readers: Executor) -> torch.nn.Module:
        names = self._wanted(prefix)
        stored = [self.tensors[name] for name in names]
        places = [torch.empty(entry.shape, dtype=entry.dtype) for entry in stored]
        run_all(planned_reads(zip(stored, places, strict=True)), readers)
        block = torch.nn.Module()
        for name, place in zip(names, places, strict=True):
            _put(block, name[len(prefix) :], place)
        return block


def lazy_model(spec: str | Path, *, with_mlps: bool = True, byte_budget: int | None = None) -> LazyModel:
    """A model as names of tensors; only its configuration and the headers of its files are read.

    Args:
        spec: a local folder, ``hub:NAME`` or an address; see :func:`model_folder`.
        with_mlps: whether MLPs and norms will be read besides the attention.
        byte_budget: the largest number of bytes to read from a server.

    Raises:
        LoadError: there is no such folder, or it has no config.json or no safetensors.
        UnsupportedConfigError: no description of the heads fits.
    """
    folder = model_folder(spec, byte_budget=byte_budget)
    tensors = stored_tensors(folder)
    config = config_in(folder)
    return LazyModel(folder, config, family_of(config), tensors, with_mlps)


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _put(block: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    *parents, last = name.split(".")
    place = block
    for parent in parents:
        children = dict(place.named_children())
        if parent not in children:
            place.add_module(parent, torch.nn.Module())
            children = dict(place.named_children())
        place = children[parent]
    place.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
