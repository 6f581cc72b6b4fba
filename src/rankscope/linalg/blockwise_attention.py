"""Attention of long sequences: the reductions of every attention metric, without a matrix of queries by keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope._errors import InputError
from rankscope.linalg.attention_pass import PassSums, attention_pass
from rankscope.linalg.attention_start import attention_start
from rankscope.linalg.attention_view import AttentionSums, AttentionView
from rankscope.linalg.largest_singular_value import SingularValue, largest_singular_value, singular_value_within
from rankscope.linalg.precision import float64_home, is_wide
from rankscope.linalg.score_tiles import HeadScores, row_log_sums
from rankscope.linalg.support_rows import SupportRows

PASS_ENTRIES = 1 << 30
"""Probabilities of one head that iterations for its largest singular value may go through by default."""

_MOST_PASSES = 400
_TOLERANCE = {True: 1e-10, False: 1e-5}
_UNKNOWN = SingularValue(math.nan, math.nan, False, 0)


@dataclass(frozen=True)
class _Matrix:
    mass: Tensor
    p_log_p: Tensor
    first_mass: Tensor
    energy: Tensor
    centred_energy: Tensor
    top: SingularValue


class BlockwiseAttention(AttentionView):
    r"""Attention probabilities of ``query`` and ``key``, made tile by tile when a reduction is asked for.

    All sums come from one walk over the tiles of each head. Memory is linear in the number of tokens. The largest
    singular value of CP takes further walks: as many as it needs to converge, if ``passes`` allow; otherwise it is the
    bound from below that was reached, and :attr:`is_spectrum_estimated` says so. Tiles are in the format of ``query``
    (float32 for half precision), sums over tiles in float64.

    Args:
        query: ``(batch, heads, query, dim)``.
        key: ``(batch, key heads, key, dim)``; heads a multiple of key heads (grouped queries).
        mask: broadcastable to ``(batch, heads, query, key)``: True where a key is visible, or what is added to scores.
        is_causal: a row sees keys up to its own place, counted from the first.
        scale: of the scores, 1/sqrt(dim) when left out.
        keep: which query rows count, ``(batch, query)``.
        log_sums: logarithm of each row's sum of exponentials ``(batch, heads, query)``, where the kernel has told it;
            it saves a walk.
        spectrum: whether the largest singular value will be asked for: then the first walk serves it as well.
        passes: walks per head for the largest singular value; as many as :data:`PASS_ENTRIES` pays for by default.

    Raises:
        InputError: shapes that do not fit.

    Example:
        >>> q = torch.zeros(1, 1, 4, 2)
        >>> view = BlockwiseAttention(q, q)
        >>> round(float(view.relative_deviation), 12)
        0.0
    """

    def __init__(
        self,
        query: Float[Tensor, "batch heads query dim"],
        key: Float[Tensor, "batch key_heads key dim"],
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        keep: Bool[Tensor, "batch query"] | None = None,
        log_sums: Float[Tensor, "batch heads query"] | None = None,
        spectrum: bool = False,
        passes: int | None = None,
    ) -> None:
        _check(query, key, keep, passes)
        home = float64_home(query)
        self._query, self._key = query.detach().to(home), key.detach().to(home)
        self.batch_shape = tuple(query.shape[:2])
        self.keys = key.shape[2]
        self._scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        self._keep = None if keep is None else keep.detach().to(home)
        self._log_sums = None if log_sums is None else log_sums.detach().to(home)
        shape = (query.shape[0], query.shape[1], query.shape[2], self.keys)
        self._support = SupportRows(shape, home, None if mask is None else mask.detach().to(home), is_causal=is_causal)
        self._spectrum, self._passes = spectrum, passes

    @property
    def dtype(self) -> torch.dtype:
        """Format of the tiles."""
        return torch.promote_types(self._query.dtype, torch.float32)

    @cached_property
    def kept(self) -> Bool[Tensor, "matrices query"]:
        """Which rows count."""
        shape = (*self.batch_shape, self._query.shape[2])
        if self._keep is None:
            return torch.ones(shape, dtype=torch.bool, device=self._query.device).flatten(0, 1)
        return self._keep.unsqueeze(1).expand(shape).flatten(0, 1)

    @cached_property
    def count(self) -> Float[Tensor, " matrices"]:
        """Number of query rows that count."""
        return self.kept.sum(-1).double()

    @property
    def fewest(self) -> int:
        """A number of rows that every matrix has at least."""
        return self._query.shape[2] if self._keep is None else 0

    @property
    def support_size(self) -> Float[Tensor, "matrices query"]:
        """Number of keys each row may see."""
        return self._support.size

    @property
    def sees_first(self) -> Bool[Tensor, "matrices query"]:
        """Whether a row may see the first key."""
        return self._support.sees_first

    @cached_property
    def sums(self) -> AttentionSums:
        """Mass, p log p and squares; rows that do not count have mass 1."""
        found = self._matrices
        return AttentionSums(
            self._by_row([one.mass for one in found], 1.0),
            self._by_row([one.p_log_p for one in found], 0.0),
            self._by_matrix([one.energy for one in found]),
            self._by_matrix([one.centred_energy for one in found]),
        )

    @cached_property
    def first_mass(self) -> Float[Tensor, "matrices query"]:
        """Probability that each row gives to the first key; 0 in rows that do not count."""
        return self._by_row([one.first_mass for one in self._matrices], 0.0)

    @property
    def largest_centred_singular_value(self) -> Float[Tensor, " matrices"]:
        """Largest singular value of CP, or what is known to lie below it; NaN for P = 0."""
        return self._of_tops([top.lower for top in self.singular_values])

    @property
    def centred_singular_value_bound(self) -> Float[Tensor, " matrices"]:
        """What the largest singular value of CP lies below, up to rounding; NaN for P = 0."""
        return self._of_tops([top.upper for top in self.singular_values])

    @property
    def is_spectrum_estimated(self) -> Bool[Tensor, " matrices"]:
        """Where the iterations for the largest singular value did not converge."""
        return self._of_tops([top.is_estimate for top in self.singular_values]).bool()

    @cached_property
    def singular_values(self) -> list[SingularValue]:
        """The largest singular value of CP of each matrix, with the interval that holds it."""
        found = self._matrices if self._spectrum else self._read_all(spectrum=True)
        return [one.top for one in found]

    @cached_property
    def _matrices(self) -> list[_Matrix]:
        return self._read_all(spectrum=self._spectrum)

    def _read_all(self, *, spectrum: bool) -> list[_Matrix]:
        batch, heads = self.batch_shape
        return [self._read(b, h, spectrum) for b in range(batch) for h in range(heads)]

    def _read(self, b: int, h: int, spectrum: bool) -> _Matrix:
        logs = self._logs(b, h)
        passes = self._budget(logs.rows)
        reference, probes = attention_start(logs, directions=spectrum)
        first = attention_pass(logs, reference, probes, image=spectrum and passes > 1)
        r = reference.to(self.dtype).double()
        n = logs.rows
        shift = first.column / max(1, n)
        centred = (first.energy - n * shift.square().sum()).clamp_min(0.0)
        energy = centred + n * (r + shift).square().sum()
        key = int(self._support.first_key[b, h])
        at_first = _column(logs, key).double() / first.mass.masked_fill(first.mass == 0, 1.0)
        top = _UNKNOWN
        if spectrum and bool(energy > 0) and bool(energy.isfinite()):
            top = self._top(logs, r, probes, first, float(centred), passes)
        return _Matrix(first.mass, first.p_log_p, at_first, energy, centred, top)

    def _logs(self, b: int, h: int) -> HeadScores:
        """Logarithms of the probabilities of the rows that count."""
        heads, tokens = self.batch_shape[1], self._query.shape[2]
        kept = torch.ones(tokens, dtype=torch.bool) if self._keep is None else self._keep[b]
        places = kept.nonzero().flatten().to(self._query.device)
        scores = HeadScores.of(
            self._query[b, h],
            self._key[b, h // (heads // self._key.shape[1])],
            self._scale,
            places,
            causal=self._support.is_causal,
            mask=self._support.mask_of(b, h),
        )
        if self._log_sums is None:
            largest, rest = row_log_sums(scores)
            shift, later = largest + rest, torch.zeros_like(rest)
        else:
            shift = self._log_sums[b, h, places].to(scores.query)
            later = torch.zeros_like(shift)
        # Every key hidden by a huge negative number: scores are rounded away beside it, and the row is uniform.
        hidden = (shift.abs() * torch.finfo(self.dtype).eps > 0.25).nonzero().flatten()
        if hidden.numel() == 0:
            return scores.less(shift)
        scores.query[hidden] = 0.0
        shift[hidden], later[hidden] = row_log_sums(scores.pick(hidden))
        return scores.less(shift, later)

    def _budget(self, rows: int) -> int:
        """Walks for the largest singular value."""
        affordable = max(1, min(_MOST_PASSES, PASS_ENTRIES // max(1, rows * self.keys)))
        return affordable if self._passes is None else self._passes

    def _top(
        self, logs: HeadScores, r: Tensor, probes: Tensor, first: PassSums, energy: float, passes: int
    ) -> SingularValue:
        # Rows sum to one, so the norm of P is at most the root of its largest column sum, and that of CP no larger.
        upper = float((first.column + logs.rows * r).amax().clamp_min(0.0).sqrt())
        tolerance = _TOLERANCE[is_wide(self.dtype)]
        if first.image is None:
            gram = first.gram - torch.outer(first.total, first.total) / logs.rows
            return singular_value_within(gram, energy, upper=upper, tolerance=tolerance)

        def centred(found: PassSums) -> Tensor:
            assert found.image is not None
            return found.image - torch.outer(found.column / logs.rows, found.total)

        return largest_singular_value(
            lambda Z: centred(attention_pass(logs, r, Z, sums=False, image=True)),
            probes,
            centred(first),
            energy,
            upper=upper,
            passes=passes,
            tolerance=tolerance,
        )

    def _by_row(self, parts: list[Tensor], otherwise: float) -> Tensor:
        found = torch.full(self.kept.shape, otherwise, dtype=torch.float64, device=self._query.device)
        return found.masked_scatter_(self.kept, torch.cat(parts)) if parts else found

    def _by_matrix(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts) if parts else self.count.new_zeros(0)

    def _of_tops(self, values: list[float] | list[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._query.device)


def _column(logs: HeadScores, key: int) -> Tensor:
    """The exponentials of one column."""
    logarithm = logs.query @ logs.key[key]
    if logs.mask is not None:
        column = logs.mask[logs.places, key]
        visible = column.dtype == torch.bool
        logarithm = logarithm.masked_fill(~column, -torch.inf) if visible else logarithm + column
    if logs.later is not None:
        logarithm = logarithm - logs.later
    return logarithm.masked_fill(logs.places < key, -torch.inf).exp() if logs.causal else logarithm.exp()


def _check(query: Tensor, key: Tensor, keep: Tensor | None, passes: int | None) -> None:
    fits = query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0] and query.shape[-1] == key.shape[-1]
    if not fits or key.shape[2] == 0 or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise InputError(
            f"query has the shape {tuple(query.shape)} and key {tuple(key.shape)}. Expected (batch, heads, tokens, "
            "dim) of the same batch and dim, at least one key, and heads of query a multiple of those of key."
        )
    expected = (query.shape[0], query.shape[2])
    if keep is not None and (keep.dtype != torch.bool or tuple(keep.shape) != expected):
        raise InputError(
            f"keep is a {keep.dtype} tensor of shape {tuple(keep.shape)}. Expected booleans of shape {expected}, "
            "one per query: pass attention_mask.bool()."
        )
    if passes is not None and passes < 1:
        raise InputError(f"passes={passes}: expected at least one walk per head.")
