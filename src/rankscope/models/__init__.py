"""Models: how they are loaded, what they are fed, and how their heads are described."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of

if TYPE_CHECKING:
    from rankscope.models.heads.family import Family, register
    from rankscope.models.inputs import InputsLike, TokensPolicy, as_inputs, prepare_inputs, prepare_planned
    from rankscope.models.inputs.text import sample_text
    from rankscope.models.loading import LoadedModel, load
    from rankscope.models.model import ModelLike, as_model
    from rankscope.models.pretrained import pretrained_folder
    from rankscope.models.stream import Stream

__all__ = [
    "Family",
    "InputsLike",
    "LoadedModel",
    "ModelLike",
    "Stream",
    "TokensPolicy",
    "as_inputs",
    "as_model",
    "load",
    "prepare_inputs",
    "prepare_planned",
    "pretrained_folder",
    "register",
    "sample_text",
]

__getattr__ = names_of(__name__)
