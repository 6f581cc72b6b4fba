"""The tokenizer that comes with a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope._files import read_regular
from rankscope.errors import InputError, LoadError
from rankscope.models.hf import require_transformers
from rankscope.models.loading.foreign import in_a_line, refusing
from rankscope.models.loading.no_requests import no_requests
from rankscope.models.loading.shard_files import LARGEST_FILE, TOKENIZER_EXTRAS, TOKENIZER_FILES
from rankscope.runs.plain_json import parse_json

# Arguments of a tokenizer's class that name other files to read; transformers takes them from these files unchecked.
_ELSEWHERE = ("gguf_file", "init_inputs", "tokenizer_object")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file from which a tokenizer can be built."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def refuse_dangerous_tokenizer(folder: Path) -> None:
    """Raise for files that would read other files or block forever.

    Raises:
        LoadError: a file is a pipe or a device, is huge, or names files elsewhere.
        ValueError: one is merely damaged, so it is unknown what it requests.
    """
    for name in (*TOKENIZER_FILES, *TOKENIZER_EXTRAS):
        path = folder / name
        if path.exists() and not path.is_file():
            raise LoadError(f"{path} is not a regular file. Fetch the model again.")
        if path.is_file() and path.stat().st_size > LARGEST_FILE:
            raise LoadError(f"{path} has more than {LARGEST_FILE:,} bytes, too many for a tokenizer.")
    settings = _object_in(folder / "tokenizer_config.json")
    for key in _ELSEWHERE:
        if settings.get(key):
            raise LoadError(
                f"{folder / 'tokenizer_config.json'} asks for {key}={settings[key]!r:.80}, which makes the tokenizer "
                "read from elsewhere. It was not read. Remove that key, or fetch the model again."
            )
    for key in _object_in(folder / "special_tokens_map.json"):
        if not key.endswith(("_token", "_tokens")):
            raise LoadError(
                f"{folder / 'special_tokens_map.json'} holds {key!r:.80}, which is not a special token: it would be "
                "used as a setting of the tokenizer. Remove that key, or fetch the model again."
            )


def _object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty without one.

    A document that this parser refuses may be accepted by the next one, so it is not passed on.
    """
    if not path.exists():
        return {}
    try:
        content = parse_json(read_regular(path, LARGEST_FILE))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


class _DamagedTokenizerError(LoadError):
    """Files from which no tokenizer can be built."""


def tokenizer_in(folder: Path, config: Any) -> tuple[Any | None, tuple[str, ...]]:
    """The tokenizer in a local folder, None if there is none, and a note if it could not be read."""
    if not has_tokenizer(folder):
        return None, ()
    with no_requests(str(folder)):
        return read_tokenizer(str(folder), {"local_files_only": True, "config": config})


def tokenizer_from(given: Any) -> Any:
    """The tokenizer named by the caller: one in memory, its folder, or a hub name.

    Raises:
        LoadError: there is no tokenizer at that place.
        InputError: it does not turn text into ids.
    """
    if isinstance(given, (str, Path)):
        return _tokenizer_at(given)
    kind = type(given)
    if (kind.__module__.partition(".")[0], kind.__name__) == ("tokenizers", "Tokenizer"):
        import transformers

        return transformers.PreTrainedTokenizerFast(tokenizer_object=given)
    if callable(given) and all(hasattr(given, name) for name in ("all_special_ids", "unk_token_id")):
        return given
    raise InputError(
        f"tokenizer is a {kind.__name__}; expected a tokenizer of transformers or tokenizers, the folder it was saved "
        "in, or a hub name such as 'gpt2'."
    )


def _tokenizer_at(place: str | Path) -> Any:
    path = Path(place).expanduser()
    if path.is_dir():
        if not has_tokenizer(path):
            raise LoadError(f"tokenizer: {path} holds no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, ...).")
        tokenizer, remarks = tokenizer_in(path, None)
    elif path.exists():
        raise LoadError(f"tokenizer: {path} is a file. Pass the folder it lies in.")
    else:
        from rankscope.models.weight_files.snapshot import hub_snapshot

        try:
            folder = hub_snapshot(str(place), None, weights=False)
        except LoadError as error:
            raise LoadError(f"tokenizer={str(place)!r}: {error}") from error
        tokenizer, remarks = tokenizer_in(folder, None)
    if tokenizer is None:
        raise LoadError(f"tokenizer={str(place)!r}: {' '.join(remarks)}. Pass a folder, a hub name or a tokenizer.")
    return tokenizer


def read_tokenizer(
    where: str, arguments: Mapping[str, Any], *, trust_remote_code: bool = False
) -> tuple[Any | None, tuple[str, ...]]:
    """The tokenizer in a folder or on the hub; None and a note if its files are damaged.

    Raises:
        LoadError: its files are dangerous.
    """
    require_transformers("Reading a tokenizer")
    import transformers

    kept = {
        key: value for key, value in arguments.items() if key in ("local_files_only", "gguf_file", "revision", "config")
    }
    try:
        with refusing(_DamagedTokenizerError, "the tokenizer could not be read", ""):
            if Path(where).is_dir():
                refuse_dangerous_tokenizer(Path(where))
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **kept)
    except _DamagedTokenizerError as damaged:  # the model is still usable
        return None, (f"the tokenizer could not be read ({in_a_line(damaged.__cause__ or damaged)})",)
    return tokenizer, ()
