"""Whether attention still chooses: heads that weight all tokens equally, heads that pick one, and sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import USABLE
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.axes import AxisFinding
from rankscope.verdicts.reading import span_of
from rankscope.verdicts.states import DOMINANT_SHARE, LEAST_TOKENS, ONE_HOT_ENTROPY, UNIFORM_ENTROPY, State
from rankscope.views import number

SITES: Mapping[str, str] = {"attention.probs": "Attention", "cross_attention.probs": "Cross-attention"}
ENTROPY, SINK = "attention_entropy", "first_token_sink_rate"

MOST_HEADS = 4
"""Heads that are named one by one."""

Heads = Mapping[tuple[int, int], tuple[float, float]]
"""Block and head to the least and the largest value over sequences."""


def attention_findings(table: pa.Table, lengths: Mapping[str | None, Mapping[int, int]]) -> list[AxisFinding]:
    r"""One finding per stack and kind of attention whose entropy was measured.

    A head is uniform if :math:`H/\log k \ge 0.999` in every sequence: by :math:`H \approx \log k - s^2/2` its scores
    then have a standard deviation of at most :math:`\sqrt{0.002 \log k}`, 0.12 for 1,024 keys, so weights vary by about
    a tenth. It is one-hot if :math:`H/\log k \le 0.02`: one key then has 99% of the weight. The code is ``collapsed``
    only if all heads of all blocks are the one or the other. A sink, a first token with more than half of the weight,
    is usual in trained models and no fault.

    Args:
        table: rows of a run at one length.
        lengths: by stack, the number of tokens of each sequence; sinks are not looked for in short ones.
    """
    stacks = stacks_of(table)
    findings = []
    for stack in stacks:
        mine = of_stack(table, stack)
        long = min(lengths.get(stack, {}).values(), default=0) >= LEAST_TOKENS
        for site, name in SITES.items():
            entropy = _heads(mine, ENTROPY, site)
            if entropy:
                sinks = _heads(mine, SINK, site) if long else {}
                findings.append(_finding(entropy, sinks, site, name, stack if len(stacks) > 1 else None))
    return findings


def _heads(table: pa.Table, metric: str, site: str) -> Heads:
    rows = only(table, metric=metric, site=site)
    by_head: dict[tuple[int, int], tuple[float, float]] = {}
    columns = (rows[name].to_pylist() for name in ("layer", "head", "value", "status"))
    for layer, head, value, status in zip(*columns, strict=True):
        if status in USABLE and np.isfinite(value):
            low, high = by_head.get((layer, head or 0), (value, value))
            by_head[layer, head or 0] = min(low, value), max(high, value)
    return by_head


def _finding(entropy: Heads, sinks: Heads, site: str, name: str, stack: str | None) -> AxisFinding:
    uniform = [place for place, (low, _) in entropy.items() if low >= UNIFORM_ENTROPY]
    one_hot = [place for place, (_, high) in entropy.items() if high <= ONE_HOT_ENTROPY]
    sinking = [place for place, (low, _) in sinks.items() if low > DOMINANT_SHARE]
    least, most = min(low for low, _ in entropy.values()), max(high for _, high in entropy.values())
    of = f" of the {stack}" if stack else ""
    code, value = State.HEALTHY, least
    if len(uniform) == len(entropy):
        code = State.COLLAPSED
        words = (
            "uniform: every head of every block gives all tokens it sees nearly the same weight (relative entropy at "
            f"least {least:.4f}), which is usual at initialisation and, after training, means that attention does not "
            "depend on the tokens"
        )
    elif len(one_hot) == len(entropy):
        code, value = State.COLLAPSED, most
        words = (
            f"one-hot: every head of every block gives nearly all weight to one token (relative entropy at most "
            f"{number(most)}), so that hardly any gradient reaches queries and keys"
        )
    else:
        # A head that picks the first token, and nothing else, is a sink.
        picking = [place for place in one_hot if place not in sinking]
        kinds = {
            "uniform (the same weight for all tokens)": uniform,
            "one-hot (nearly all weight on one token)": picking,
        }
        parts = [f"{kind} {_where(heads, entropy)}" for kind, heads in kinds.items() if heads]
        if sinking:
            share = f"{len(sinking)} of {len(entropy)} heads"
            parts.append(f"a sink on the first token in {share}, which is usual in trained models")
        words = "; ".join(parts) or "no head is uniform or one-hot"
    place = next(one for one, ends in entropy.items() if value in ends)
    evidence = {"code": code.code, "metric": ENTROPY, "site": site, "stack": stack, "layer": place[0], "head": place[1],
                "value": value}  # fmt: skip
    usual = code is State.HEALTHY or bool(uniform)
    return AxisFinding("attention", code.code, f"{name}{of}: {words}.", (evidence,), is_usual_at_first=usual)


def _where(heads: Sequence[tuple[int, int]], every: Heads) -> str:
    """``in all heads of blocks 0-2 and 3 other heads``, ``in 1 of 12 heads (block 4, head 2)``."""
    layers = np.array(sorted({layer for layer, _ in every}), dtype=np.int64)
    whole = [row for row, layer in enumerate(layers.tolist()) if _all_of(layer, heads, every)]
    rest = [place for place in heads if place[0] not in layers[whole]]
    shown = ", ".join(f"block {layer} head {head}" for layer, head in rest[:MOST_HEADS])
    shown += f" and {len(rest) - MOST_HEADS} more" if len(rest) > MOST_HEADS else ""
    if not whole:
        return f"in {len(heads)} of {len(every)} heads ({shown})"
    others = f" and in {len(rest)} other heads ({shown})" if rest else ""
    return f"in all heads {span_of(whole, layers)}{others}"


def _all_of(layer: int, heads: Sequence[tuple[int, int]], every: Heads) -> bool:
    return all(place in heads for place in every if place[0] == layer)
