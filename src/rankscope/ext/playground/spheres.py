"""Projects high-dimensional tokens to points on a sphere in three dimensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.playground.picture import Frame
from rankscope.verbs.exact.readings import LOG10


class Projector:
    """Projects one state after the other, each rotated so that its points follow the previous ones."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def frame(self, state: Deviation) -> Frame:
        r"""The tokens of a state as directions around their mean.

        With the mean token :math:`b` as pole, a token :math:`b + r` splits into a part along :math:`b` and a part
        :math:`t` across it; its angle from the pole is :math:`\arctan(|t| / (|b| + r\cdot b/|b|))`. **Exact**, however
        small: the scale of r is a logarithm. The drawing loses the part of :math:`t` outside its two principal
        directions.
        """
        if not state.terms:
            return self._together(state.shape[-2])
        term = state.terms[0]
        pole, size = _pole(state.base)
        rows = term.values.expand(state.shape).reshape(-1, state.shape[-1])
        along = rows @ pole
        across = rows - along[:, None] * pole
        lengths = torch.linalg.vector_norm(across, dim=-1)
        # Underflows to 0 near collapse: the points then meet at the pole, and the lens still shows their shape.
        scale = math.exp(term.log_scale)
        angles = torch.atan2(scale * lengths, size + scale * along)
        plane = self._plane(across)
        turns = torch.atan2(plane[:, 1], plane[:, 0])
        sphere = torch.stack([angles.sin() * turns.cos(), angles.sin() * turns.sin(), angles.cos()], dim=-1)
        farthest = float(torch.linalg.vector_norm(plane, dim=-1).max())
        lens = plane / farthest if farthest > 0 else plane
        return Frame(_points(sphere), _points(lens), self._log10_angle(angles, lengths, term.log_scale, size))

    def _plane(self, across: Tensor) -> Tensor:
        """Coordinates in the two principal directions, rotated and reflected to match the last frame."""
        _, _, directions = torch.linalg.svd(across, full_matrices=False)
        plane: Tensor = across @ directions[:2].T
        plane = torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
        if self._before is not None:
            # Orthogonal Procrustes: the U V^T of plane^T before is the rotation (or reflection) of least distance.
            left, _, right = torch.linalg.svd(plane.T @ self._before)
            plane = plane @ left @ right
        size = torch.linalg.vector_norm(plane)
        self._before = plane / size if float(size) > 0 else self._before
        return plane

    @staticmethod
    def _log10_angle(angles: Tensor, lengths: Tensor, log_scale: float, size: float) -> float:
        """log10 of an angle, from the logarithms if the angle itself underflows."""
        largest = float(angles.max())
        if largest > 1e-200:
            return math.log10(largest)
        longest = float(lengths.max())
        return (math.log(longest / size) + log_scale) / LOG10 if longest > 0 and size > 0 else -math.inf

    @staticmethod
    def _together(tokens: int) -> Frame:
        return Frame(((0.0, 0.0, 1.0),) * tokens, ((0.0, 0.0),) * tokens, -math.inf)


def _pole(base: Tensor) -> tuple[Tensor, float]:
    """Direction and length of the mean token; an arbitrary direction if it is zero."""
    row = base.reshape(-1, base.shape[-1])[0]
    size = float(torch.linalg.vector_norm(row))
    if size > 0:
        return row / size, size
    pole = torch.zeros_like(row)
    pole[0] = 1.0
    return pole, 0.0


def _points(rows: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in rows.tolist())
