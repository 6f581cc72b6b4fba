"""What was changed in a model before it was measured, in words: the end of every title and the start of its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NORMS = {"scale": "norms that only divide by length", "rms": "norms that only divide by the root mean square"}
MODES = {
    "replace": "under the mask {}",
    "intersect": "with its mask intersected with {}",
    "unite": "with its mask united with {}",
}
KNOWN = frozenset({"attention_skip", "mlp_skip", "mlp", "norm", "mask", "mask_mode", "temperature", "attention"})
KNOWN |= {"attention_scale", "heads", "layers", "stack"}


def changes_in_words(operations: Sequence[Mapping[str, Any]]) -> str:
    """The surgery recorded with a run, as it continues the name of a model; empty if nothing was changed.

    Args:
        operations: descriptions of operations and grafts, in order; see ``Provenance.operations``.

    Example:
        >>> changes_in_words([{"attention_skip": 0.0, "mlp_skip": 0.0, "norm": "identity", "mask": "causal"}])
        'without skip connections and norms, under the mask causal'
        >>> changes_in_words([{"attention_skip": 0.5, "layers": [0, 1]}])
        'with attention skips scaled by 0.5 (blocks 0 and 1)'
    """
    return "; ".join(filter(None, map(_checked, operations)))


def _checked(described: Mapping[str, Any]) -> str:
    """A description comes from a file that anyone may have edited: one that makes no sense must not stop a title."""
    try:
        return _words(described)
    except (TypeError, ValueError, KeyError):
        return "with changes that cannot be read"


def _words(described: Mapping[str, Any]) -> str:
    if "graft" in described:
        return f"with {described['graft']} added"
    gains = {name: float(described.get(f"{name}_skip", 1.0)) for name in ("attention", "mlp")}
    if gains["attention"] == gains["mlp"]:
        skips = {"skip connections": gains["mlp"]}
    else:
        skips = {"attention skips": gains["attention"], "MLP skips": gains["mlp"]}
    removed = [name for name, gain in skips.items() if gain == 0.0]
    removed += ["MLPs"] if described.get("mlp") == "drop" else []
    removed += ["norms"] if described.get("norm") == "identity" else []
    heads = described.get("heads")
    removed += [f"head{'s' if len(heads) > 1 else ''} {_listed(heads)}"] if heads else []
    words = [f"without {_listed(removed)}"] if removed else []
    words += [f"with {name} scaled by {gain:g}" for name, gain in skips.items() if gain not in (0.0, 1.0)]
    words += [f"with {NORMS[described['norm']]}"] if described.get("norm") in NORMS else []
    words += [MODES[described.get("mask_mode", "replace")].format(described["mask"])] if "mask" in described else []
    words += [f"with {described['attention']} attention"] if "attention" in described else []
    words += [f"at attention temperature {described['temperature']:g}"] if "temperature" in described else []
    if "attention_scale" in described:
        words.append(f"with deviations from uniform attention scaled by {described['attention_scale']:g}")
    words += [f"with {name} {described[name]}" for name in described if name not in KNOWN]
    if not words:
        return ""
    stack, layers = described.get("stack"), described.get("layers")
    where = [f"{stack} only"] if stack else []
    where += [f"block{'s' if len(layers) > 1 else ''} {_listed(layers)}"] if layers is not None else []
    return ", ".join(words) + (f" ({', '.join(where)})" if where else "")


def _listed(items: Sequence[object]) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last
