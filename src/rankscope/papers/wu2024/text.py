"""What we see under masks and LayerNorm, in words whose every number comes from the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.papers._lines import Line, has_line, line
from rankscope.papers.wu2024.figure import FLOORS, VARIANTS, masks_in
from rankscope.runs.curves import names_in
from rankscope.views import number

if TYPE_CHECKING:
    from rankscope.runs.run import Run

BASE_DEPTH = 12
INIT = {"part": "figure", "model": "BERT", "weights": "init", "temperature": "1"}


def describe_figure(run: Run) -> str:
    """What we see, where it differs from the paper and why."""
    parts = [
        _size(run),
        _pure(run),
        _table(run),
        _norm(run),
        _scaling(run),
        _trained(run),
        _temperature(run),
        _deep(run),
    ]
    return "\n\n".join(part for part in parts if part)


def is_small(run: Run) -> bool:
    """Whether the run is of a tiny model, from which nothing follows about the paper."""
    return int(_line(run, "mu", "SAN", "complete", "float64").depth[-1]) != BASE_DEPTH


def _size(run: Run) -> str:
    if not is_small(run):
        return ""
    seen = _line(run, "mu", "SAN", "complete", "float64")
    return (
        f"**Small size.** A tiny BERT of {seen.depth[-1]} blocks on {seen.sequences} short sequences, not "
        f"BERT-base: the "
        "pieces work, and nothing here speaks for or against the paper."
    )


def conclude_figure(run: Run) -> str:
    """One sentence."""
    narrow, wide = (_end(run, "SAN+LN", "complete", dtype) for dtype in ("float32", "float64"))
    size = "Small size, a tiny BERT: attention" if is_small(run) else "Attention"
    return (
        f"{size} with LayerNorm under the complete mask ends at a relative {number(narrow)} in float32 and "
        f"{number(wide)} in float64."
    )


def _line(run: Run, metric: str, variant: str, mask: str, dtype: str) -> Line:
    return line(run.table, metric, **INIT, variant=variant, mask=mask, dtype=dtype)


def _end(run: Run, variant: str, mask: str, dtype: str = "float64", metric: str = "mu_over_norm") -> float:
    return float(_line(run, metric, variant, mask, dtype).mean[-1])


def _pure(run: Run) -> str:
    ends = {mask: (_end(run, "SAN", mask, metric="mu"), _end(run, "SAN", mask)) for mask in masks_in(run)}
    start = float(_line(run, "mu", "SAN", "complete", "float64").mean[0])
    listed = "; ".join(f"{mask}: mu {number(mu)}, relative {number(share)}" for mask, (mu, share) in ends.items())
    return (
        f"**What we see.** Pure attention at initialisation, float64: mu starts at {number(start)} and ends at, "
        f"{listed}. In mu "
        "itself every mask falls, as printed. Part of that fall is only the tokens getting smaller, since "
        "nothing rescales them: "
        "the relative number says how far the tokens have come together; 0 means that float64 holds no difference any "
        "more (how far it went is asked with `rankscope exact`)."
    )


def _table(run: Run) -> str:
    lines = [
        "| last block, relative, float64 | " + " | ".join(masks_in(run)) + " |",
        "|---|" + "---|" * len(masks_in(run)),
    ]
    for variant in VARIANTS:
        cells = (number(_end(run, variant, mask)) for mask in masks_in(run))
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _norm(run: Run) -> str:
    narrow, wide = (_end(run, "SAN+LN", "complete", dtype) for dtype in ("float32", "float64"))
    mu32, mu64 = (_end(run, "SAN+LN", "complete", dtype, "mu") for dtype in ("float32", "float64"))
    words = (
        "**LayerNorm alone.** The paper reads that with LayerNorm mu no longer goes to zero at initialisation. "
        "Under the "
        f"complete mask it ends at {number(mu32)} in float32 and at {number(mu64)} in float64; relative to the "
        f"tokens, "
        f"{number(narrow)} and {number(wide)}."
    )
    if not is_small(run) and narrow <= FLOORS["float32"] and wide <= FLOORS["float64"]:
        words += (
            " Here we differ. Both are rounding of their own format (float32 shows nothing below "
            f"{number(FLOORS['float32'])}, float64 nothing below {number(FLOORS['float64'])}): LayerNorm brings "
            f"the tokens "
            "back to full size in every block, and the rounding error with them, so the curve stops at the floor of "
            "whatever format is used. A float32 plateau is no sign that the norm stops the fall."
            " Below the float64 floor these curves cannot tell."
        )
    with_norm, without = _end(run, "SAN+LN", "causal"), _end(run, "SAN", "causal")
    return words + (
        f" Under the causal mask the fall is slower: {number(with_norm)} at the last block with LayerNorm, "
        f"{number(without)} without."
    )


def _scaling(run: Run) -> str:
    variant = "SAN+row scaling"
    if not has_line(run.table, **INIT, variant=variant):
        return ""
    listed = ", ".join(f"{mask} {number(_end(run, variant, mask))}" for mask in masks_in(run))
    return (
        "**The paper's LayerNorm.** In the theorems LayerNorm only scales each token to unit length. Read that "
        "way, attention "
        f"with it ends at: {listed}; as in the model, with centring and gain: "
        + ", ".join(f"{mask} {number(_end(run, 'SAN+LN', mask))}" for mask in masks_in(run))
        + "."
    )


def _trained(run: Run) -> str:
    names = [name for name in names_in(run.table, "model") if has_line(run.table, model=name, weights="trained")]
    if not names:
        return "No trained weights were at hand."
    sentences = []
    for name in names:
        where = {"part": "figure", "model": name, "weights": "trained", "dtype": "float64", "mask": "complete"}
        ends = {
            variant: number(float(line(run.table, "mu_over_norm", **where, variant=variant).mean[-1]))
            for variant in VARIANTS
        }
        sentences.append(f"{name}: " + ", ".join(f"{variant} {value}" for variant, value in ends.items()) + ".")
    return "**Trained weights**, complete mask, float64, relative, last block. " + " ".join(sentences)


def _temperature(run: Run) -> str:
    where = {"part": "temperature", "variant": "SAN", "mask": "complete"}
    if not has_line(run.table, **where):
        return ""
    temperatures = sorted(names_in(run.table, "temperature"), key=float)
    seen = {
        t: line(run.table, "mu_over_norm", **where, temperature=t)
        for t in temperatures
        if has_line(run.table, **where, temperature=t)
    }
    listed = ", ".join(f"T = {t}: {number(float(found.mean[2]))}" for t, found in seen.items())
    return f"**Temperature.** Pure attention, complete mask, relative, after two blocks: {listed}."


def _deep(run: Run) -> str:
    where = {"part": "deep", "dtype": "float64"}
    if not has_line(run.table, **where):
        return ""
    sentences = []
    for variant in VARIANTS:
        if has_line(run.table, **where, variant=variant):
            ends = {
                mask: line(run.table, "mu_over_norm", **where, variant=variant, mask=mask) for mask in masks_in(run)
            }
            listed = ", ".join(f"{mask} {number(float(found.mean[-1]))}" for mask, found in ends.items())
            sentences.append(f"{variant}: {listed}.")
    depth = line(run.table, "mu_over_norm", **where, variant="SAN", mask="complete").depth[-1]
    return f"**At {depth} blocks**, relative, float64. " + " ".join(sentences)
