"""transformers, which is an extra: its models are recognised without importing it, and loading by name asks for it.

A module or a configuration is one of transformers' own only if that part of transformers has been imported already.
"""

from __future__ import annotations

import sys
from typing import Any

from rankscope.errors import LoadError, MissingExtraError


def hf_model_class() -> Any | None:
    """The class of transformers' models; None if no model of transformers can be in memory."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


def is_hf_model(value: object) -> bool:
    """Whether ``value`` is a model of transformers."""
    kind = hf_model_class()
    return kind is not None and isinstance(value, kind)


def is_hf_config(value: object) -> bool:
    """Whether ``value`` is a configuration of transformers."""
    kind = getattr(sys.modules.get("transformers.configuration_utils"), "PretrainedConfig", None)
    return kind is not None and isinstance(value, kind)


def is_composite(config: Any) -> bool:
    """Whether a configuration of transformers has others inside it, as of text and vision."""
    named = getattr(config, "sub_configs", None)
    return bool(named) if named is not None else any(map(is_hf_config, vars(config).values()))


def require_transformers(what: str, *, at_least: tuple[int, int] = (4, 45)) -> None:
    """Import transformers, or refuse ``what``, the subject of a sentence.

    Raises:
        MissingExtraError: transformers is not installed.
        LoadError: it is too old.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError(what, "transformers", "hf") from error
    if release() < at_least:
        wanted = ".".join(map(str, at_least))
        raise LoadError(f"{what} needs transformers {wanted} or newer, and {transformers.__version__} is installed.")


def release() -> tuple[int, ...]:
    """Major and minor number of the installed transformers."""
    import transformers

    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def dtype_argument() -> str:
    """What ``from_pretrained`` of the installed transformers calls the dtype of the weights."""
    return "dtype" if release() >= (4, 56) else "torch_dtype"
