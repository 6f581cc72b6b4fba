"""Cosines between the tokens of the first sequence after each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rankscope.linalg.precision import as_float64
from rankscope.models.inputs import Prepared
from rankscope.runs.similarity import packed, shown_positions
from rankscope.stream.sites import SiteRef
from rankscope.verbs.reader import SiteReader

SITE = "block.out"
LONGEST_LABEL = 200


class SimilarityReader:
    """Stores the cosines between at most 64 evenly spaced tokens of sequence 0.

    Args:
        reader: knows the batch and which tokens count.
        labels: the tokens of sequence 0, or empty.
    """

    def __init__(self, reader: SiteReader, labels: list[str]) -> None:
        self._reader = reader
        self._labels = labels
        self._stacks: dict[str, dict[str, Any]] = {}

    def __call__(self, ref: SiteRef, seen: Tensor) -> None:
        """Reduce the observed tensor at once."""
        if ref.site == SITE and self._reader.first_sequence == 0:
            self._take(ref, seen)

    def seen(self) -> dict[str, Any]:
        """The entry of the run; see :mod:`rankscope.runs.similarity`."""
        return {"sequence": 0, "site": SITE, "stacks": self._stacks}

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Take over what another reader stored."""
        self._stacks |= seen["stacks"]

    def _take(self, ref: SiteRef, x: Tensor) -> None:
        keep = self._reader.valid(x)
        counted = list(range(x.shape[1])) if keep is None else keep[0].nonzero().flatten().tolist()
        positions = [counted[place] for place in shown_positions(len(counted))]
        stack = self._stacks.setdefault(
            str(ref.stack or ""),
            {
                "tokens": len(counted),
                "positions": positions,
                "labels": self._labels_at(positions, x.shape[1]),
                "blocks": [],
                "cosines": [],
            },
        )
        stack["blocks"].append(ref.layer)
        stack["cosines"].append(packed(cosines(x[0, positions])))

    def _labels_at(self, positions: list[int], tokens: int) -> list[str]:
        return [self._labels[place] for place in positions] if len(self._labels) == tokens else []


def cosines(x: Tensor) -> NDArray[np.float64]:
    r"""Cosine of every pair of tokens, :math:`\langle x_i, x_j\rangle / (\|x_i\|\|x_j\|)`. Exact; NaN for a zero token.

    Example:
        >>> import torch
        >>> cosines(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])).tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    wide = as_float64(x)
    scaled = wide / wide.abs().amax(-1, keepdim=True)
    unit = scaled / scaled.norm(dim=-1, keepdim=True)
    cosines: NDArray[np.float64] = (unit @ unit.T).clamp(-1.0, 1.0).cpu().numpy()
    return cosines


def labels_of(prepared: Prepared, tokenizer: Any | None) -> list[str]:
    """The tokens of sequence 0 as the model's tokenizer writes them; empty without a tokenizer or without ids."""
    ids = prepared[0].inputs.get("input_ids")
    if tokenizer is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        return []
    return [str(token)[:LONGEST_LABEL] for token in tokenizer.convert_ids_to_tokens(ids[0].tolist())]
