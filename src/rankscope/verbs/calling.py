"""How verbs are called: arguments of a Python call are checked, and flat options become the three nouns.

Both read the declarations of the verb. Imports nothing heavy before a call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from rankscope import options
from rankscope.errors import InputError, UnknownNameError
from rankscope.options import Option
from rankscope.verbs._spec import Verb

P = ParamSpec("P")
R = TypeVar("R")

PROGRESS = Option(name="progress", kind=bool, default=False, help="Show a progress bar.")
_NOUNS = {
    "rankscope.Model (rankscope.load)": options.MODEL_FIELDS,
    "rankscope.Inputs": options.INPUTS_FIELDS,
    "rankscope.Surgery": options.SURGERY_FIELDS,
}


def checked(*declared: Option) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a public function against its options, before anything is loaded.

    None stands for the default of a parameter. Parameters without an option are passed as they are.

    Args:
        declared: the options; those of the three nouns are checked by the nouns.
    """
    known = {option.name: option for option in (*declared, PROGRESS) if option.noun is None}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in signature.parameters:
                    raise _unknown(function.__name__, name, list(signature.parameters))
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise InputError(f"{function.__name__}(): {error}.") from None
            for name, value in given.arguments.items():
                usual = signature.parameters[name].default
                if name not in known:
                    continue
                if value is None and usual is inspect.Parameter.empty:
                    raise InputError(f"{name}=None: expected {known[name].expected}.")
                given.arguments[name] = usual if value is None else known[name].checked(value)
            return function(*given.args, **given.kwargs)

        return call

    return decorate


def _unknown(function: str, name: str, parameters: Sequence[str]) -> InputError | UnknownNameError:
    for noun, declared in _NOUNS.items():
        if any(option.name == name for option in declared):
            return InputError(f"{function}() has no argument {name!r}: it is a field of {noun}.")
    return UnknownNameError(f"argument of {function}()", name, parameters)


def nouns_of(declared: Sequence[Option], values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Flat values by option, as the positional arguments of a verb (those nouns that it has) and its own arguments.

    Args:
        declared: the options of the verb.
        values: the value of each, e.g. from a command line; ``progress`` may be among them.
    """
    from rankscope.models.inputs import Inputs
    from rankscope.models.model import Model
    from rankscope.surgery.surgery import Surgery

    noun_of = {option.name: option.noun for option in declared}
    fields: dict[str, dict[str, Any]] = {"model": {}, "inputs": {}, "surgery": {}}
    own = {}
    for name, value in values.items():
        noun = noun_of.get(name)
        if noun is None:
            own[name] = value
        else:
            fields[noun][name] = value
    nouns: list[Any] = []
    if "model" in noun_of:
        nouns.append(Model(fields["model"].pop("model"), **fields["model"]))
    if "inputs" in noun_of.values():
        nouns.append(Inputs(fields["inputs"].pop("inputs", None), **fields["inputs"]))
    if "surgery" in noun_of.values():
        nouns.append(Surgery(**fields["surgery"]))
    return nouns, own


def call_flat(verb: Verb, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call the function of a verb with flat values by option."""
    nouns, own = nouns_of(verb.options, values)
    return function(*nouns, **own)
