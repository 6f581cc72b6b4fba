"""Turns sums of paths into rows of numbers: size, share of the output, and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankscope.ext.paths.lengths import relative_error
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import MetricSpec, evaluate
from rankscope.models.inputs import Batch, TokensPolicy
from rankscope.runs.rows import RowWriter

COORDINATES = ("length", "paths", "origin")


@dataclass
class PathReader:
    """Writes rows for sums of paths.

    Args:
        metrics: token metrics, computed for each sum as if it were the stream.
        policy: which tokens count.
        writer: with the columns of :data:`COORDINATES`.
        unembedding: (dim,) direction of the chosen token's logit, or None.
    """

    metrics: Sequence[MetricSpec]
    policy: TokensPolicy
    writer: RowWriter
    unembedding: Tensor | None = None
    batch: Batch | None = None
    dtypes: set[torch.dtype] = field(default_factory=set)
    lengths: dict[str | None, dict[int, int]] = field(default_factory=dict)
    sum_error: float = 0.0

    def keep(self, out: Tensor) -> Tensor | None:
        """Which tokens of the stream count, (batch, tokens); None for all."""
        assert self.batch is not None
        keep = self.batch.keep
        if keep is None:
            if self.policy != "no-first":
                return None
            keep = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
            keep[:, 0] = False
            return keep
        if keep.shape[0] != out.shape[0] or keep.shape[1] > out.shape[1]:
            return None
        return torch.nn.functional.pad(keep.to(out.device), (0, out.shape[1] - keep.shape[1]), value=False)

    def check(self, sums: Tensor, out: Tensor) -> None:
        """Compare the sum over lengths with the stream itself."""
        self.sum_error = max(self.sum_error, relative_error(sums, out, self.keep(out)))

    def read(
        self,
        sums: Tensor,
        out: Tensor,
        *,
        site: str,
        stack: str | None,
        layer: int,
        at: Mapping[str, str | int | None],
        counted: str | None = "length",
        head_axis: bool = False,
    ) -> None:
        """Write rows for (sums, batch, tokens, dim); the first axis is numbered in the column ``counted``, or heads."""
        assert self.batch is not None
        keep = self.keep(out)
        self.dtypes.add(out.dtype)
        columns = [self._values(part, out, keep) for part in sums]
        names = list(columns[0])
        for name in names:
            values = torch.stack([column[name][0] for column in columns], dim=1).cpu().numpy()
            statuses = torch.stack([column[name][1] for column in columns], dim=1).cpu().numpy()
            for number in range(1 if head_axis else len(columns)):
                place = dict(at) if counted is None else {**at, counted: number}
                self.writer.add(
                    metric=name,
                    site=site,
                    stack=stack,
                    layer=layer,
                    first_sequence=self.batch.first_sequence,
                    values=values if head_axis else values[:, number],
                    statuses=statuses if head_axis else statuses[:, number],
                    head_axis=head_axis,
                    at=place,
                )
        counts = self.lengths.setdefault(stack, {})
        for offset in range(out.shape[0]):
            tokens = out.shape[1] if keep is None else int(keep[offset].sum())
            counts[self.batch.first_sequence + offset] = tokens

    def _values(self, part: Tensor, out: Tensor, keep: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
        s, x = part.double(), out.double()
        if keep is not None:
            s, x = s * keep[..., None], x * keep[..., None]
        power = x.square().sum(dim=(-2, -1))
        ok = torch.zeros(power.shape, dtype=torch.int8)
        values = {
            "projection_share": ((s * x).sum(dim=(-2, -1)) / power, ok),
            "norm_share": ((s.square().sum(dim=(-2, -1)) / power).sqrt(), ok),
        }
        if self.unembedding is not None:
            last = self._last(keep, x)
            rows = s[torch.arange(s.shape[0]), last]
            values["logit"] = (rows @ self.unembedding.double(), ok)
        reading = evaluate(self.metrics, Tokens(part, keep), float_floor(out.dtype))
        for spec, value, status in zip(self.metrics, reading.values, reading.statuses, strict=True):
            values[spec.name] = (value, status)
        return values

    def _last(self, keep: Tensor | None, x: Tensor) -> Tensor:
        """Position of the last token that counts."""
        if keep is None:
            return torch.full((x.shape[0],), x.shape[1] - 1)
        return (keep * torch.arange(x.shape[1], device=keep.device)).argmax(dim=1)
