"""A plan file of a stranger read as plain data: no tags, no anchors, no surprises of size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankscope._errors import InputError, MissingExtraError

LARGEST_PLAN = 2**20
DEEPEST = 12


def read_plan_data(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Anchors and aliases (with which a page of text can grow to gigabytes), tags, repeated keys, several documents and
    files above 1 MiB are refused.

    Raises:
        InputError: with the line, what was found there and what was expected.
        MissingExtraError: without PyYAML (extra ``sweep``).
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("rankscope sweep", "pyyaml", "sweep") from error
    text = _text_of(path)
    try:
        _refuse_tricks(yaml, text, path)
        _refuse_repeats(yaml.compose(text, Loader=yaml.SafeLoader), path)
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a YAML file that can be read: {' '.join(str(error).split())}.") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds {_kind(found)}; a plan is a mapping with the keys models and verbs.")
    return found


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_PLAN:
            raise InputError(f"{path} has more than {LARGEST_PLAN} bytes; is it a plan?")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"The plan {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); a plan is a YAML file.") from error


def _refuse_tricks(yaml: Any, text: str, path: Path) -> None:
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InputError(f"{path}, line {line}: anchors and aliases (& and *) are not read. Write it out.")
        if getattr(event, "tag", None):
            raise InputError(f"{path}, line {line}: the tag {event.tag!r} is not read; a plan is plain data.")
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise InputError(f"{path}, line {line}: nested more than {DEEPEST} deep; a plan has four levels.")
    if documents > 1:
        raise InputError(f"{path} holds {documents} documents separated by '---'; a plan is one.")


def _refuse_repeats(node: Any, path: Path) -> None:
    """YAML keeps the last of two equal keys and says nothing."""
    if node is None or isinstance(node.value, str):
        return
    seen: set[str] = set()
    for entry in node.value:
        if isinstance(entry, tuple):
            name = str(entry[0].value)
            if name in seen:
                raise InputError(f"{path}, line {entry[0].start_mark.line + 1}: {name!r} is written twice.")
            seen.add(name)
            _refuse_repeats(entry[0], path)
            _refuse_repeats(entry[1], path)
        else:
            _refuse_repeats(entry, path)


def _kind(found: object) -> str:
    return "nothing" if found is None else f"a {type(found).__name__}"
