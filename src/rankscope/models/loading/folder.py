"""Reads a model in a local folder or on the hub as data: safetensors, GGUF, or a pickle limited to tensors."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rankscope.errors import LoadError
from rankscope.models.loading.config import config_from_json
from rankscope.models.loading.gguf import gguf_config, only_gguf, refuse_other_shapes
from rankscope.models.loading.no_requests import no_requests
from rankscope.models.loading.pretrained import (
    PretrainedWeights,
    Request,
    from_pretrained,
    refuse_too_large,
)
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.loading.shard_files import indexed_files, safetensors_in, stored_bytes
from rankscope.models.loading.tokenizer import has_tokenizer, read_tokenizer


def weights_from_folder(folder: Path, request: Request, gguf: str | None = None) -> PretrainedWeights:
    """The model in a local folder; nothing is downloaded, and only declared formats are opened."""
    if request.trust_remote_code:
        return _weights_in(folder, request, gguf)
    with no_requests(str(folder)):
        return _weights_in(folder, request, gguf)


def _weights_in(folder: Path, request: Request, gguf: str | None) -> PretrainedWeights:
    gguf = gguf or only_gguf(folder)
    arguments: dict[str, Any] = {"local_files_only": True}
    if gguf is not None:
        arguments |= {"gguf_file": gguf, "config": gguf_config(folder, gguf, request)}
    else:
        if not (folder / "config.json").is_file():
            raise LoadError(f"{folder} holds no config.json and no .gguf file, so it is not a model folder.")
        if not request.trust_remote_code:
            arguments["config"] = config_from_json(folder / "config.json", request.model_class)
        arguments["use_safetensors"] = _has_safetensors(folder, request.allow_pickle)
        if not request.trust_remote_code:
            refuse_too_large(arguments["config"], request, stored=stored_bytes(folder))
    model, notes = from_pretrained(str(folder), request, arguments)
    if gguf is not None:
        refuse_other_shapes(model, folder / gguf)
    if gguf is None and not has_tokenizer(folder):
        return PretrainedWeights(model, None, None, notes)
    tokenizer, remark = read_tokenizer(str(folder), arguments, trust_remote_code=request.trust_remote_code)
    return PretrainedWeights(model, tokenizer, None, notes + remark)


def _has_safetensors(folder: Path, allow_pickle: bool) -> bool:
    """True for safetensors; False for a pickle the caller allowed; otherwise an error."""
    if safetensors_in(folder):
        indexed_files(folder)  # transformers would follow its file names anywhere
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


def weights_from_hub(name: str, request: Request) -> PretrainedWeights:
    """The model of a hub id, safetensors only unless pickles are allowed.

    It is downloaded first and then read as a local folder, so that everything that is checked there is checked here.
    """
    from rankscope.models.weight_files.snapshot import hub_snapshot

    if request.trust_remote_code:
        return _trusted_from_hub(name, request)
    try:
        folder = hub_snapshot(name, request.revision, weights=True, allow_pickle=request.allow_pickle)
    except LoadError as error:
        raise _hub_error(name, error) from error
    with quiet_transformers():  # not around the download, which shows its progress
        return replace(weights_from_folder(folder, request), revision=folder.name)


def _trusted_from_hub(name: str, request: Request) -> PretrainedWeights:
    """A model whose code may run: transformers downloads what that code asks for."""
    import transformers

    where = {"revision": request.revision}
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=True, **where)
    except (OSError, ValueError) as error:
        raise _hub_error(name, error) from error
    arguments: dict[str, Any] = {"config": config, **where}
    if not request.allow_pickle:
        arguments["use_safetensors"] = True
    with quiet_transformers():
        model, notes = from_pretrained(name, request, arguments)
        tokenizer, remark = read_tokenizer(name, where, trust_remote_code=True)
    return PretrainedWeights(model, tokenizer, getattr(config, "_commit_hash", None), notes + remark)


def _hub_error(name: str, error: Exception) -> LoadError:
    from rankscope.models.presets import PRESETS

    advice = f"'init:{name}'" if name in PRESETS else "init:NAME for a random initialisation (rankscope ls presets)"
    near = _near_folder(name)
    meant = f" Did you mean the folder {near}?" if near else ""
    return LoadError(
        f"{name!r} is not a local folder, and the hub cannot be reached or does not have it "
        f"({str(error).splitlines()[0]}).{meant} Pass a local folder, or {advice}."
    )


def _near_folder(name: str) -> str | None:
    """A folder with a model whose name is close to this one, in the folder that ``name`` points into."""
    place = Path(name)
    if not place.parent.is_dir():
        return None
    folders = [config.parent.name for config in place.parent.glob("*/config.json")]
    close = get_close_matches(place.name, folders, n=1)
    return f"./{place.parent / close[0]}" if close and not place.is_absolute() else None
