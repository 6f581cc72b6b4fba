"""Example networks to start with."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.ext.playground.choices import Choices

SCENES: Mapping[str, Choices] = {
    "Attention alone": Choices(skip_gain=0.0, mlp="none", norm="none"),
    "Attention alone, causal": Choices(skip_gain=0.0, mlp="none", norm="none", mask="causal"),
    "Attention and skips": Choices(mlp="none", norm="none"),
    "No skips": Choices(skip_gain=0.0),
    "Post-norm (BERT)": Choices(),
    "Pre-norm (GPT)": Choices(norm_place="pre", mask="causal"),
    "Rescued by a remedy": Choices(skip_gain=0.0, remedy="value_skipinit"),
}
"""By what a button says."""
