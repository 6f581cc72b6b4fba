"""The tokenizer that comes with a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope._errors import InputError, LoadError
from rankscope.models.loading.foreign import in_a_line, refusing
from rankscope.models.loading.tokenizer_files import (
    CHECKED,
    TOKENIZER_FILES,
    has_tokenizer,
    refuse_dangerous_tokenizer,
)


class _DamagedTokenizerError(LoadError):
    """Files that no tokenizer can be made of."""


def tokenizer_in(folder: Path, config: Any) -> tuple[Any | None, tuple[str, ...]]:
    """The tokenizer in a local folder, None where there is none, and a remark if it could not be read."""
    if not has_tokenizer(folder):
        return None, ()
    return read_tokenizer(str(folder), {"local_files_only": True, "config": config})


def tokenizer_from(given: Any) -> Any:
    """The tokenizer a caller named: one in memory, the folder it lies in, or a hub name.

    Raises:
        LoadError: a place that holds none.
        InputError: something that does not turn text into ids.
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
        found, remarks = tokenizer_in(path, None)
    elif path.exists():
        raise LoadError(f"tokenizer: {path} is a file. Pass the folder it lies in.")
    else:
        from rankscope.models.loading.hub import hub_answers

        found, remarks = read_tokenizer(str(place), {"local_files_only": not hub_answers()})
    if found is None:
        raise LoadError(f"tokenizer={str(place)!r}: {' '.join(remarks)}. Pass a folder, a hub name or a tokenizer.")
    return found


def read_tokenizer(
    where: str, arguments: Mapping[str, Any], *, trust_remote_code: bool = False
) -> tuple[Any | None, tuple[str, ...]]:
    """The tokenizer in a folder or on the hub; None and a remark where its files are damaged.

    Raises:
        LoadError: its files are dangerous.
    """
    import transformers

    kept = {
        key: value for key, value in arguments.items() if key in ("local_files_only", "gguf_file", "revision", "config")
    }
    try:
        with refusing(_DamagedTokenizerError, "the tokenizer could not be read", ""):
            refuse_dangerous_tokenizer(_tokenizer_folder(where, kept))
            found = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **kept)
    except _DamagedTokenizerError as damaged:  # the model is still usable
        return None, (f"the tokenizer could not be read ({in_a_line(damaged.__cause__ or damaged)})",)
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
