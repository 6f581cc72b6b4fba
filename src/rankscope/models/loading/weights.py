"""Weights from a folder or the hub, read as data: safetensors, GGUF, or a pickle limited to tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rankscope._errors import LoadError, MissingExtraError, RankscopeError
from rankscope.models.loading.affording import refuse_larger_than_memory, refuse_unaffordable
from rankscope.models.loading.config import config_from_json, model_class_named, refuse_remote_kernels
from rankscope.models.loading.foreign import in_a_line, is_rust_panic, refusing
from rankscope.models.loading.gguf_header import read_gguf_header
from rankscope.models.loading.meta import on_meta
from rankscope.models.loading.shard_files import indexed_files, safetensors_in
from rankscope.models.loading.spreading import spread_arguments
from rankscope.models.loading.tokenizer_files import CHECKED, has_tokenizer, refuse_dangerous_tokenizer
from rankscope.processes.sharded import Spread


@dataclass(frozen=True)
class Request:
    """What the caller of ``load`` allowed and asked for."""

    seed: int
    dtype: torch.dtype | None
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    model_class: str | None
    spread: Spread | None = None
    placement: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Weights:
    """A model with weights, its tokenizer if there is one, and remarks worth keeping."""

    model: torch.nn.Module
    tokenizer: Any | None
    revision: str | None
    notes: tuple[str, ...]


def weights_from_folder(folder: Path, request: Request, gguf: str | None = None) -> Weights:
    """The model in a local folder; nothing is fetched, nothing but declared formats is opened."""
    gguf = gguf or _only_gguf(folder)
    arguments: dict[str, Any] = {"local_files_only": True}
    if gguf is not None:
        _need_gguf()
        arguments |= {"gguf_file": gguf, "config": _gguf_config(folder, gguf, request)}
    else:
        if not (folder / "config.json").is_file():
            raise LoadError(f"{folder} holds no config.json and no .gguf file, so it is not a model folder.")
        if not request.trust_remote_code:
            arguments["config"] = config_from_json(folder / "config.json", request.model_class)
            _refuse_too_large(arguments["config"], request)
        arguments["use_safetensors"] = _has_safetensors(folder, request.allow_pickle)
    model, notes = _from_pretrained(str(folder), request, arguments)
    if gguf is not None:
        _refuse_other_shapes(model, folder / gguf)
    tokenizer, remark = _tokenizer(str(folder), request, arguments, wanted=gguf is not None or has_tokenizer(folder))
    return Weights(model, tokenizer, None, notes + remark)


def _gguf_config(folder: Path, gguf: str, request: Request) -> Any:
    """The configuration in a GGUF file, once its header was found whole and its numbers fit into memory."""
    import transformers

    header = read_gguf_header(folder / gguf)
    for key, value in header.metadata.items():
        if key.endswith(".block_count") and type(value) is int and value > len(header.elements):
            raise LoadError(f"{folder / gguf} announces {value:,} blocks and holds {len(header.elements):,} tensors.")
    refuse_larger_than_memory(sum(header.elements.values()), torch.float32)
    with refusing(LoadError, f"{folder / gguf} holds no configuration that can be read", "Fetch it again."):
        config = transformers.AutoConfig.from_pretrained(str(folder), gguf_file=gguf, local_files_only=True)
    refuse_remote_kernels(config.to_dict(), gguf)
    _refuse_too_large(config, request, torch.float32)
    return config


def _refuse_other_shapes(model: Any, path: Path) -> None:
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


def _refuse_too_large(config: Any, request: Request, dtype: torch.dtype = torch.bfloat16) -> None:
    """A folder may hold few weights and a configuration of a billion layers."""
    if request.spread is None and not request.placement:
        name = request.model_class or "AutoModel"
        chosen = model_class_named(name)
        build = chosen.from_config if name.startswith("AutoModel") else chosen
        refuse_unaffordable(config, build, request.dtype or dtype)


def weights_from_hub(name: str, request: Request) -> Weights:
    """The model a hub id names, safetensors only unless pickles were allowed."""
    import transformers

    where = {"revision": request.revision, "local_files_only": not _hub_answers()}
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=request.trust_remote_code, **where)
    except (OSError, ValueError) as error:
        raise _hub_error(name, error) from error
    if not request.trust_remote_code:
        refuse_remote_kernels(config.to_dict(), name)
        _refuse_too_large(config, request)
    arguments: dict[str, Any] = {"config": config, **where}
    if not request.allow_pickle:
        arguments["use_safetensors"] = True
    model, notes = _from_pretrained(name, request, arguments)
    tokenizer, remark = _tokenizer(name, request, where, wanted=True)
    return Weights(model, tokenizer, getattr(config, "_commit_hash", None), notes + remark)


def _from_pretrained(
    where: str, request: Request, arguments: dict[str, Any]
) -> tuple[torch.nn.Module, tuple[str, ...]]:
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
    share = (
        f"Only {found} of the {wanted} weights of a {type(model).__name__} are"
        if found
        else (f"None of the weights of a {type(model).__name__} are")
    )
    remedy = "gguf 0.18 or newer reads more kinds of files" if is_gguf else "pass the right model_class="
    return LoadError(f"{share} in {where}; {remedy}.")


def _tokenizer(
    where: str, request: Request, arguments: dict[str, Any], wanted: bool
) -> tuple[Any | None, tuple[str, ...]]:
    """None and a remark where its files are damaged; an error where they are dangerous."""
    if not wanted:
        return None, ()
    import transformers

    kept = {
        key: value for key, value in arguments.items() if key in ("local_files_only", "gguf_file", "revision", "config")
    }
    try:
        refuse_dangerous_tokenizer(_tokenizer_folder(where, kept))
        found = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=request.trust_remote_code, **kept)
    except (RankscopeError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  (tokenizer files fail in many ways; the model is still usable)
        return None, (f"the tokenizer could not be read ({in_a_line(error)})",)
    except BaseException as error:
        if not is_rust_panic(error):
            raise
        return None, (f"the tokenizer could not be read ({in_a_line(error)})",)
    return found, ()


def _tokenizer_folder(where: str, kept: Mapping[str, Any]) -> Path:
    """Where a tokenizer's files lie: the folder itself, or the hub's cache once they have been fetched."""
    if Path(where).is_dir():
        return Path(where)
    from transformers.utils import cached_file

    wanted = {key: value for key, value in kept.items() if key in ("local_files_only", "revision")}
    wanted |= {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    fetched = (cached_file(where, name, **wanted) for name in CHECKED)
    folders = [Path(path).parent for path in fetched if path is not None]
    return folders[0] if folders else Path(where)


def placement_of(device_map: str | Mapping[str, int | str] | None, offload_folder: str | Path | None) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that put parts of a model on several devices, or on disk."""
    from importlib.util import find_spec

    if device_map is None:
        if offload_folder is not None:
            raise LoadError("offload_folder holds what device_map puts on disk, and there is none. Add device_map.")
        return {}
    if find_spec("accelerate") is None:
        raise MissingExtraError("device_map", "accelerate", "accelerate")
    placed = device_map if isinstance(device_map, str) else dict(device_map)
    folder = {} if offload_folder is None else {"offload_folder": str(offload_folder)}
    return {"device_map": placed, **folder}


def tokenizer_in(folder: Path, config: Any) -> tuple[Any | None, tuple[str, ...]]:
    """The tokenizer in a local folder, None where there is none, and a remark if it could not be read."""
    request = Request(0, None, None, False, False, None)
    arguments = {"local_files_only": True, "config": config}
    return _tokenizer(str(folder), request, arguments, wanted=has_tokenizer(folder))


def _only_gguf(folder: Path) -> str | None:
    if any(folder.glob("*.safetensors")):
        return None
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if len(found) > 1:
        raise LoadError(f"{folder} holds several GGUF files ({', '.join(found)}). Pass the path of one of them.")
    return found[0] if found else None


def _has_safetensors(folder: Path, allow_pickle: bool) -> bool:
    """True for safetensors; False for a pickle the caller allowed; otherwise an error."""
    if safetensors_in(folder):
        indexed_files(folder)  # transformers would follow its names anywhere
        return True
    pickles = sorted(path.name for path in folder.glob("*.bin") if path.name.startswith("pytorch_model"))
    if not pickles:
        raise LoadError(
            f"{folder} has a config.json but no weights (*.safetensors). "
            f"For a random initialisation of that configuration pass 'init:{folder}'."
        )
    if not allow_pickle:
        raise LoadError(
            f"{folder} holds its weights only as a pickle ({', '.join(pickles)}). Save it as safetensors, "
            "or pass allow_pickle=True: only tensors are then read from it and no code in it runs."
        )
    return False


def _need_gguf() -> None:
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise MissingExtraError("Reading a GGUF file", "gguf", "gguf")


def _hub_answers() -> bool:
    """Whether a connection to the hub opens; without one only its local cache is looked at, and at once."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if "https" in getproxies():
        return True
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def _hub_error(name: str, error: Exception) -> LoadError:
    from rankscope.models.presets import PRESETS

    advice = f"'init:{name}'" if name in PRESETS else "init:NAME for a random initialisation (rankscope ls presets)"
    return LoadError(
        f"{name!r} is no local folder, and the hub cannot be reached or does not have it "
        f"({str(error).splitlines()[0]}). Pass a local folder, or {advice}."
    )
