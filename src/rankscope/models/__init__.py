"""Models: how they are loaded, what they are fed, and how their heads are described."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.models.heads.family import Family, register
    from rankscope.models.inputs import TokensPolicy, prepare_inputs
    from rankscope.models.loading import LoadedModel, load
    from rankscope.models.pretrained import pretrained_folder
    from rankscope.models.stream import Stream

__all__ = [
    "Family",
    "LoadedModel",
    "Stream",
    "TokensPolicy",
    "load",
    "prepare_inputs",
    "pretrained_folder",
    "register",
]

_HOME = {
    "Family": "rankscope.models.heads.family",
    "LoadedModel": "rankscope.models.loading",
    "Stream": "rankscope.models.stream",
    "TokensPolicy": "rankscope.models.inputs",
    "load": "rankscope.models.loading",
    "prepare_inputs": "rankscope.models.inputs",
    "pretrained_folder": "rankscope.models.pretrained",
    "register": "rankscope.models.heads.family",
}

__getattr__ = names_of(__name__, _HOME)
