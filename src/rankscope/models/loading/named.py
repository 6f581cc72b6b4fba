"""Objects of the user's own Python code, named as ``train.py:build_model`` or ``package.module:factory``.

The form is that of uvicorn and gunicorn. Naming an object runs the file or imports the module, so a name is only
resolved where the user wrote it: on the command line and in Python. Whatever works through a file of somebody else
does so in :func:`no_named_code`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from rankscope._types import NAMED
from rankscope.errors import LoadError
from rankscope.models.loading.foreign import in_a_line

_SOURCE: ContextVar[str] = ContextVar("what is worked through and may not name code", default="")


@contextmanager
def no_named_code(source: str) -> Iterator[None]:
    """Refuse every named object in this thread while ``source``, such as ``"a plan"``, is worked through."""
    token = _SOURCE.set(source)
    try:
        yield
    finally:
        _SOURCE.reset(token)


def named_object(text: str, *, call: bool = True) -> Any:
    """The object of that name; what a function or class without required arguments returns, if it is one.

    Args:
        text: ``FILE.py:NAME`` or ``package.module:NAME``; with ``[0]`` or ``[key]``, an entry of it.
        call: whether a function is called; a loss is wanted as it is.

    Raises:
        LoadError: there is no such file, module or object, it could not be made, or a file asks for it.
    """
    if source := _SOURCE.get():
        raise LoadError(f"{text} runs code, which {source} cannot ask for; pass it to a verb, or save the model.")
    match = NAMED.fullmatch(text)
    if match is None:
        raise LoadError(f"{text!r} is not of the form FILE.py:NAME or package.module:NAME.")
    value: Any = _module(match["place"], text)
    for part in match["object"].split("."):
        if not hasattr(value, part):
            names = ", ".join(name for name in vars(value) if not name.startswith("_"))[:200]
            raise LoadError(f"{match['place']} has no {match['object']!r}. It has: {names}.")
        value = getattr(value, part)
    if call and callable(value) and not _is_module(value):
        try:
            value = value()
        except TypeError as error:
            raise LoadError(
                f"{text} cannot be called without arguments: {error}. Name a function that takes none."
            ) from None
    index = match["index"]
    if index is None:
        return value
    try:
        return value[int(index)] if index.isdigit() else value[index]
    except (KeyError, IndexError, TypeError) as error:
        raise LoadError(f"{text}: there is no entry [{index}] ({type(error).__name__}).") from None


def what_a_file_holds(path: Path) -> str:
    """Asks which object of a Python file is meant and lists what it may be, without running it."""
    try:
        statements = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        raise LoadError(f"{path} is not valid Python: {in_a_line(error)}") from None
    found = [
        one.name
        for one in statements
        if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and not one.name.startswith("_")
    ]
    found += [
        target.id
        for one in statements
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]
    if not found:
        return f"{path} defines no class, function or variable that could be a model."
    # What the name says may be wrong: it is an example in a message, and nothing is run.
    likely = [name for word in ("model", "build", "make") for name in found if word in name.lower()]
    return f"Which object of {path}? For example {path}:{(likely or found)[0]}. Found: {', '.join(found[:20])}."


def _is_module(value: object) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _module(place: str, text: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise LoadError(f"{text}: {error}. For a file write its name with .py.") from None
    path = Path(place).expanduser()
    if not path.is_file():
        raise LoadError(f"{text}: there is no file {place}.")
    known = sys.modules.get(_name(path))
    if known is not None:  # the model and the batch of one command come from one import
        return known
    spec = importlib.util.spec_from_file_location(_name(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # a script can import what is in its folder
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _name(path: Path) -> str:
    return f"rankscope_named_{abs(hash(str(path.resolve())))}_{path.stem}"
