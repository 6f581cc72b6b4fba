"""Every token metric straight from its definition, in 60-digit arithmetic: slow, obvious, independent."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from mpmath import mp, mpf

Rows = list[list[mpf]]

DIGITS = 60


def exact_rows(x) -> Rows:
    """The numbers a float tensor holds, as they are."""
    return [[mpf(float(value)) for value in row] for row in x]


def centre(rows: Rows) -> Rows:
    n = len(rows)
    mean = [sum(column) / n for column in zip(*rows, strict=True)]
    return [[v - m for v, m in zip(row, mean, strict=True)] for row in rows]


def dot(a, b):
    return sum((x * y for x, y in zip(a, b, strict=True)), mpf(0))


def frobenius(rows: Rows):
    return mp.sqrt(sum(dot(row, row) for row in rows))


def one_norm(rows: Rows):
    return max(sum(abs(v) for v in column) for column in zip(*rows, strict=True))


def inf_norm(rows: Rows):
    return max(sum(abs(v) for v in row) for row in rows)


def composite(rows: Rows):
    return mp.sqrt(one_norm(rows) * inf_norm(rows))


def max_norm(rows: Rows):
    return max(abs(v) for row in rows for v in row)


def about(rows: Rows, centre_of: Callable) -> Rows:
    point = [centre_of(sorted(column)) for column in zip(*rows, strict=True)]
    return [[v - c for v, c in zip(row, point, strict=True)] for row in rows]


def median(ordered):
    n = len(ordered)
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def midrange(ordered):
    return (ordered[0] + ordered[-1]) / 2


def mean_cosine(rows: Rows):
    """Zero tokens have no direction."""
    rows = [row for row in rows if any(row)]
    pairs = list(permutations(rows, 2))
    return sum(dot(a, b) / mp.sqrt(dot(a, a) * dot(b, b)) for a, b in pairs) / len(pairs)


def correlation(rows: Rows):
    pairs = list(permutations(rows, 2))
    overlap = sum(dot(a, b) for a, b in pairs) / len(pairs)
    return overlap / (sum(dot(a, a) for a in rows) / len(rows))


def singular_values(rows: Rows):
    return sorted(mp.svd_r(mp.matrix(rows), compute_uv=False), reverse=True)


def stable_rank(s):
    return sum(v**2 for v in s) / s[0] ** 2


def effective_rank(s):
    p = [v / sum(s) for v in s]
    return mp.exp(-sum(v * mp.log(v) for v in p if v > 0))


def participation_ratio(s):
    return sum(v**2 for v in s) ** 2 / sum(v**4 for v in s)


def energy_rank_99(s):
    total, held = sum(v**2 for v in s), mpf(0)
    for k, v in enumerate(s, start=1):
        held += v**2
        if held >= mpf(99) / 100 * total:
            return mpf(k)
    raise AssertionError("the whole spectrum holds 100%")


def of_spectrum(measure: Callable) -> Callable[[Rows], mpf]:
    return lambda rows: measure(singular_values(rows))


def of_centred_spectrum(measure: Callable) -> Callable[[Rows], mpf]:
    """The last of n singular values of CX is zero when n <= d; it is no direction of the tokens."""
    return lambda rows: measure(singular_values(centre(rows))[: min(len(rows) - 1, len(rows[0]))])


REFERENCE: dict[str, Callable[[Rows], mpf]] = {
    "residual": lambda x: frobenius(centre(x)),
    "relative_residual": lambda x: frobenius(centre(x)) / frobenius(x),
    "mu": lambda x: frobenius(centre(x)),
    "mu_over_norm": lambda x: frobenius(centre(x)) / frobenius(x),
    "composite_residual": lambda x: composite(centre(x)),
    "relative_composite_residual": lambda x: composite(centre(x)) / composite(x),
    "median_relative_residual": lambda x: one_norm(about(x, median)) / one_norm(x),
    "midrange_relative_residual": lambda x: max_norm(about(x, midrange)) / max_norm(x),
    "mean_cosine": mean_cosine,
    "centred_mean_cosine": lambda x: mean_cosine(centre(x)),
    "correlation": correlation,
    "largest_token_share": lambda x: max(dot(r, r) for r in x) / frobenius(x) ** 2,
    "largest_channel_share": lambda x: max(dot(c, c) for c in zip(*x, strict=True)) / frobenius(x) ** 2,
    "stable_rank": of_spectrum(stable_rank),
    "centred_stable_rank": of_centred_spectrum(stable_rank),
    "effective_rank": of_spectrum(effective_rank),
    "centred_effective_rank": of_centred_spectrum(effective_rank),
    "participation_ratio": of_spectrum(participation_ratio),
    "centred_participation_ratio": of_centred_spectrum(participation_ratio),
    "energy_rank_99": of_spectrum(energy_rank_99),
    "centred_energy_rank_99": of_centred_spectrum(energy_rank_99),
    "least_singular_value": of_spectrum(lambda s: s[-1] / s[0]),
    "centred_least_singular_value": of_centred_spectrum(lambda s: s[-1] / s[0]),
}
