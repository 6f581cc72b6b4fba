"""Reads the blocks of a model from its safetensors files one at a time, without building the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankscope._types import path_of
from rankscope.errors import LoadError, UnsupportedConfigError
from rankscope.models.heads.family import Family, config_value, family_of
from rankscope.models.loading.config import config_from_json
from rankscope.models.loading.shard_files import safetensors_in
from rankscope.models.mlp_weights import mlp_paths


@dataclass(frozen=True)
class LazyBlock:
    """The layers in which a block runs, and a bare module with its parameters under their names and nothing else."""

    layers: tuple[int, ...]
    module: torch.nn.Module


@dataclass(frozen=True)
class LazyModel:
    """A folder of weights that has not been read yet."""

    folder: Path
    config: Any
    family: Family
    files: Mapping[str, Path]

    @property
    def prefixes(self) -> Mapping[int, str]:
        """The name prefix of each block's parameters, by its number."""
        ends = [re.escape(self.family.projections[0]) + (r"\.weight" if self.family.layout != "einsum" else "")]
        pattern = re.compile(rf"(.*?)(\d+)\.{ends[0]}")
        found: dict[int, str] = {}
        for name in self.files:
            match = pattern.fullmatch(name)
            if match:
                number = int(match[2])
                if number in found:
                    raise UnsupportedConfigError(
                        f"{self.folder} holds two blocks number {number} ({found[number]}, {match[1]}{number}.): the "
                        "weights-only mode reads models of one stack. Leave weights_only out."
                    )
                found[number] = f"{match[1]}{number}."
        return dict(sorted(found.items()))

    def blocks(self) -> Iterator[LazyBlock]:
        """One block at a time; only its attention, MLP and norms are read, and only while it is used.

        Raises:
            LoadError: no block was found.
        """
        prefixes = self.prefixes
        if not prefixes:
            raise LoadError(
                f"{self.folder} holds no parameter that ends in {self.family.projections[0]!r}, which the family "
                f"{self.family.name!r} expects in every block."
            )
        shared = self.family.name == "albert"
        for number, prefix in prefixes.items():
            layers = tuple(range(int(config_value(self.config, "num_hidden_layers")))) if shared else (number,)
            yield LazyBlock(layers, self._module(prefix))

    def _module(self, prefix: str) -> torch.nn.Module:
        wanted = (*self.family.projections, self.family.output, *mlp_paths(self.family))
        if self.family.layout == "einsum":
            wanted = (*wanted, self.family.output.rpartition(".")[0])
        names = [
            name
            for name in self.files
            if name.startswith(prefix) and any(_is_below(name[len(prefix) :], path) for path in wanted)
        ]
        block = torch.nn.Module()
        with ExitStack() as opened:
            held: dict[Path, Any] = {}
            for name in names:
                path = self.files[name]
                if path not in held:
                    held[path] = opened.enter_context(_opened(path))
                _put(block, name[len(prefix) :], held[path].get_tensor(name))
        return block


def lazy_model(folder: str | Path) -> LazyModel:
    """The model in a local folder, as names of tensors.

    Raises:
        LoadError: there is no folder, or it has no config.json or no safetensors.
        UnsupportedConfigError: no description of the heads fits.
    """
    place = path_of(folder, "model", "a local folder with a config.json and *.safetensors")
    files = safetensors_in(place)
    if not files or not (place / "config.json").is_file():
        raise LoadError(
            f"weights_only reads a local folder with a config.json and *.safetensors, and {str(folder)!r} is not one. "
            "Save the model with save_pretrained, or leave weights_only out."
        )
    config = config_from_json(place / "config.json", None)
    family = family_of(config)
    found: dict[str, Path] = {}
    for path in files:
        try:
            with _opened(path) as tensors:
                found.update(dict.fromkeys(tensors.keys(), path))
        except Exception as error:  # safetensors may raise anything on a broken file
            raise LoadError(f"{path} could not be read as safetensors: {error}") from error
    return LazyModel(place, config, family, found)


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(path), framework="pt")


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
