"""A remedied design is the design of the model under that remedy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rankscope import Inputs, Model
from rankscope.errors import UnsupportedOperationError
from rankscope.ext.theory.predict.run import predict_remedies
from rankscope.models.design import Design
from rankscope.remedies import REMEDIES, remedied
from rankscope.verbs.remedy.run import remedy

WIDTH, DEPTH, TOKENS = 48, 10, 12
SAID = [name for name, entry in REMEDIES.items() if entry.design is not None]


def design() -> Design:
    return Design(depth=DEPTH, width=WIDTH, heads=4, tokens=TOKENS).changed(weight_std=WIDTH**-0.5)


@pytest.mark.parametrize("name", [name for name in SAID if REMEDIES[name].neutral is not None])
def test_the_neutral_strength_is_the_design_itself(name: str) -> None:
    assert remedied(design(), name, REMEDIES[name].neutral) == design()


def test_closed_forms() -> None:
    assert math.isclose(remedied(design(), "residual_scale").mlp_scale, 10**-0.5)
    assert math.isclose(remedied(design(), "deepnorm").attention_skip, 20**0.25)
    assert math.isclose(remedied(design(), "deepnorm").value_std, 80**-0.25 * WIDTH**-0.5)


@pytest.mark.parametrize("name", ["neutreno", "centred_attention"])
def test_what_a_design_cannot_say_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=f"rankscope remedy init:NAME --remedies {name}"):
        remedied(design(), name)


def test_what_a_design_cannot_undergo_is_refused() -> None:
    for name in ("pre_norm", "deepnorm"):
        with pytest.raises(UnsupportedOperationError, match="post-norm"):
            remedied(design().changed(norm_place="pre"), name)
    with pytest.raises(UnsupportedOperationError, match="already normed"):
        remedied(design().changed(qk_norm=1.0), "qk_norm")


BERT = {
    "model_type": "bert", "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
    "intermediate_size": 4 * WIDTH, "vocab_size": 400, "max_position_embeddings": 16,
    "initializer_range": WIDTH**-0.5,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 4, "vocab_size": 400, "n_positions": 16,
    "initializer_range": WIDTH**-0.5,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "names"),
    [(BERT, [name for name in SAID if name != "pre_norm"]), (GPT2, ["qk_norm"])],
)
def test_predicted_and_measured_remedies_agree(tmp_path, config: dict[str, object], names: list[str]) -> None:
    """The design under a remedy, sampled, against real random models under it: within four standard errors or 10%."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    found: dict[str, list[float]] = {}
    for seed in range(6):
        run = remedy(
            Model(f"init:{tmp_path}", dtype="float64", seed=seed),
            Inputs(random_tokens=True, sequences=1, tokens=TOKENS),
            remedies=names,
            gradients=False,
        )
        for entry in run.extra["remedies"]:
            found.setdefault(entry["name"], []).append(math.log10(entry["residual_last"]))
    predicted = predict_remedies(str(tmp_path), names, seeds=12, tokens=TOKENS, most_blocks=DEPTH)
    assert {entry["name"] for entry in predicted.extra["remedies"]} == {"none", *names}
    for entry in predicted.extra["remedies"]:
        measured = np.array(found[entry["name"]])
        error = measured.std(ddof=1) / len(measured) ** 0.5
        apart = abs(float(measured.mean()) - entry["log10_relative_residual"])
        assert apart <= max(4 * error, math.log10(1.1)), entry["name"]


def test_remedies_stand_beside_the_prediction() -> None:
    run = predict_remedies(design(), ["skipinit", "stronger_skip=1", "neutreno"], seeds=1, most_blocks=DEPTH)
    ends = {entry["name"]: entry["log10_relative_residual"] for entry in run.extra["remedies"]}
    assert list(ends) == sorted(ends, key=lambda name: -ends[name])
    assert ends["stronger_skip=1"] == ends["none"]
    assert ends["skipinit"] > ends["none"]
    assert "skipinit" in run.verdict
    assert any(note.startswith("neutreno was left out") for note in run.notes)
