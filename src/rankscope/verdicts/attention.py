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
from rankscope.verdicts.sentences import blocks_in_words, say
from rankscope.verdicts.states import DOMINANT_SHARE, LEAST_TOKENS, ONE_HOT_ENTROPY, UNIFORM_ENTROPY, State

SITES: Mapping[str, str] = {"attention.probs": "Attention", "cross_attention.probs": "Cross-attention"}
ENTROPY, SINK = "attention_entropy", "first_token_sink_rate"

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
    name = f"{name} of the {stack}" if stack else name
    uniform = [place for place, (low, _) in entropy.items() if low >= UNIFORM_ENTROPY]
    one_hot = [place for place, (_, high) in entropy.items() if high <= ONE_HOT_ENTROPY]
    sinking = [place for place, (low, _) in sinks.items() if low > DOMINANT_SHARE]
    least, most = min(low for low, _ in entropy.values()), max(high for _, high in entropy.values())
    code, value = State.HEALTHY, least
    if len(uniform) == len(entropy):
        code, words = State.COLLAPSED, say("uniform", name=name)
    elif len(one_hot) == len(entropy):
        code, value, words = State.COLLAPSED, most, say("one-hot", name=name)
    else:
        # A head that picks the first token, and nothing else, is a sink.
        picking = [place for place in one_hot if place not in sinking]
        told = [
            say("attention", name=name, kind=kind, heads=_where(heads, entropy))
            for kind, heads in (("uniform", uniform), ("one-hot", picking))
            if heads
        ]
        told += [say("sinks", sinking=len(sinking), heads=len(entropy))] if sinking else []
        words = " ".join(told)
    place = next(one for one, ends in entropy.items() if value in ends)
    evidence = {"code": code.code, "metric": ENTROPY, "site": site, "stack": stack, "layer": place[0], "head": place[1],
                "value": value}  # fmt: skip
    listed = (f"  {kind} heads in {_listed(heads)}" for kind, heads in
              (("uniform", uniform), ("one-hot", one_hot), ("sink", sinking)) if heads)  # fmt: skip
    details = "\n".join([f"{name}: relative entropy of the heads from {least:.4f} to {most:.4f}.", *listed])
    usual = code is State.HEALTHY or bool(uniform)
    return AxisFinding("attention", code.code, words, (evidence,), is_usual_at_first=usual, details=details)


def _where(heads: Sequence[tuple[int, int]], every: Heads) -> str:
    """How many heads, and the blocks they are in: ``182 of 192 heads (all from block 9 on)``."""
    layers = sorted({layer for layer, _ in every})
    within = sorted({layer for layer, _ in heads})
    whole = [row for row, layer in enumerate(layers) if all(one in heads for one in every if one[0] == layer)]
    blocks = f"all {span_of(whole, np.array(layers))}" if whole else blocks_in_words(within)
    return f"{len(heads)} of {len(every)} heads ({blocks})"


def _listed(heads: Sequence[tuple[int, int]]) -> str:
    by_block: dict[int, list[str]] = {}
    for layer, head in heads:
        by_block.setdefault(layer, []).append(str(head))
    return "; ".join(f"block {layer}: {', '.join(names)}" for layer, names in by_block.items())
