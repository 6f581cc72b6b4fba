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


def affine_rank(rows: Rows):
    top = singular_values(rows)[0]
    return mpf(sum(v > mpf("0.01") * top for v in singular_values(centre(rows))))


def energy_rank_99(s):
    total, held = sum(v**2 for v in s), mpf(0)
    if not total:
        return mp.nan
    for k, v in enumerate(s, start=1):
        held += v**2
        if held >= mpf(99) / 100 * total:
            return mpf(k)
    raise AssertionError("the whole spectrum holds 100%")


def alpha_req(s):
    """Weighted least squares from the normal equations, over values down to 1e-4 of the largest."""
    used = [(mp.log(j), 2 * mp.log(v), mpf(1) / j) for j, v in enumerate(s, start=1) if v >= mpf("1e-4") * s[0] > 0]
    if len(used) < 2:
        return mp.nan
    w, wx, wy = (sum(f(x, y) * w for x, y, w in used) for f in (lambda x, y: 1, lambda x, y: x, lambda x, y: y))
    wxx, wxy = (sum(f(x, y) * w for x, y, w in used) for f in (lambda x, y: x * x, lambda x, y: x * y))
    return -(w * wxy - wx * wy) / (w * wxx - wx * wx)


def uniformity(rows: Rows):
    units = [[v / mp.sqrt(dot(r, r)) for v in r] for r in rows if any(r)]
    pairs = [(a, b) for i, a in enumerate(units) for b in units[:i]]
    return mp.log(sum(mp.exp(-2 * gap(a, b) ** 2) for a, b in pairs) / len(pairs))


def of_spectrum(measure: Callable) -> Callable[[Rows], mpf]:
    return lambda rows: measure(singular_values(rows))


def of_centred_spectrum(measure: Callable) -> Callable[[Rows], mpf]:
    """The last of n singular values of CX is zero when n <= d; it is no direction of the tokens."""
    return lambda rows: measure(singular_values(centre(rows))[: min(len(rows) - 1, len(rows[0]))])


def unit_rows(rows: Rows):
    """Tokens as unit vectors and lengths, after channels of over 100 times the median energy are scaled down to that.

    Each channel's energy is that of the unit vectors. The lower of two medians counts.
    """
    lengths = [mp.sqrt(dot(r, r)) for r in rows]
    units = [[v / s for v in r] if s else r for r, s in zip(rows, lengths, strict=True)]
    energies = [dot(c, c) for c in zip(*units, strict=True)]
    nonzero = sorted(e for e in energies if e)
    limit = 100 * nonzero[(len(nonzero) - 1) // 2]
    weights = [mp.sqrt(limit / e) if e > limit else mpf(1) for e in energies]
    weighed = [[v * w for v, w in zip(r, weights, strict=True)] for r in units]
    rest = [mp.sqrt(dot(r, r)) for r in weighed]
    units = [[v / s for v in r] if s else r for r, s in zip(weighed, rest, strict=True)]
    return units, [a * b for a, b in zip(lengths, rest, strict=True)]


def gap(a, b):
    return mp.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def pair_distances(rows: Rows):
    """Distance of each pair relative to the longer one, straight from the difference; two zero tokens are equal."""
    units, lengths = unit_rows(rows)
    scaled = [[v * s for v in r] for r, s in zip(units, lengths, strict=True)]
    return {
        (i, j): gap(scaled[i], scaled[j]) / (max(lengths[i], lengths[j]) or 1)
        for i in range(len(rows))
        for j in range(len(rows))
        if i != j
    }


def lower_median(values):
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def typical_residual(rows: Rows):
    return lower_median(d for (i, j), d in pair_distances(rows).items() if i < j) / mp.sqrt(2)


def direction_residual(rows: Rows):
    directed = [unit for unit, length in zip(*unit_rows(rows), strict=True) if length]
    return lower_median(gap(a, b) for i, a in enumerate(directed) for b in directed[:i]) / mp.sqrt(2)


def members(rows: Rows):
    """How many tokens are copies of each, itself included."""
    near = pair_distances(rows)
    limit = mp.sqrt(2) * mpf(3) / 100
    return [1 + sum(near[i, j] <= limit for j in range(len(rows)) if j != i) for i in range(len(rows))]


REFERENCE: dict[str, Callable[[Rows], mpf]] = {
    "stream_rms": lambda x: frobenius(x) / mp.sqrt(len(x) * len(x[0])),
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
    "typical_residual": typical_residual,
    "direction_residual": direction_residual,
    "largest_cluster_share": lambda x: mpf(max(members(x))) / len(x),
    "copied_token_share": lambda x: mpf(sum(m > 1 for m in members(x))) / len(x),
    "distinct_tokens": lambda x: sum(mpf(1) / m for m in members(x)),
    "stable_rank": of_spectrum(stable_rank),
    "centred_stable_rank": of_centred_spectrum(stable_rank),
    "effective_rank": of_spectrum(effective_rank),
    "centred_effective_rank": of_centred_spectrum(effective_rank),
    "participation_ratio": of_spectrum(participation_ratio),
    "centred_participation_ratio": of_centred_spectrum(participation_ratio),
    "energy_rank_99": of_spectrum(energy_rank_99),
    "centred_energy_rank_99": of_centred_spectrum(energy_rank_99),
    "affine_rank": affine_rank,
    "least_singular_value": of_spectrum(lambda s: s[-1] / s[0]),
    "rankme": of_spectrum(effective_rank),
    "alpha_req": of_centred_spectrum(alpha_req),
    "uniformity": uniformity,
    "centred_least_singular_value": of_centred_spectrum(lambda s: s[-1] / s[0]),
}
