"""``remedy``: its numbers are those of ``measure`` under the remedy, its rank is by them, its words say no more."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rankscope import Inputs, Model, Surgery
from rankscope.errors import InputError, UnknownNameError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.remedies import REMEDIES, applied, evidence_for
from rankscope.runs.run import load_run
from rankscope.surgery.operating import operate
from rankscope.verbs.measure.run import measure
from rankscope.verbs.remedy.judge import judge_remedies
from rankscope.verbs.remedy.run import remedy
from rankscope.verbs.remedy.trial import gradient_norms
from tests.own_models import GPT, ids


@pytest.fixture(scope="module")
def run():
    return remedy("init:tiny-bert", Inputs(sequences=2, tokens=12))


def test_every_remedy_is_there_or_said_to_be_left_out(run) -> None:
    names = {entry["name"] for entry in run.extra["remedies"]}
    assert names == {"none", *REMEDIES}
    causal = remedy("init:tiny-llama", Inputs(sequences=1, tokens=8), remedies=["deepnorm", "qk_norm"], gradients=False)
    assert any(note.startswith("deepnorm was left out: ") for note in causal.notes)


def test_the_rank_is_by_trainings_rescued_then_by_the_last_residual(run) -> None:
    entries, seen = run.extra["remedies"], evidence_for("post-norm", ["token_collapse"])

    def place(entry) -> tuple[float, float]:
        known = seen.get(entry["name"])
        assert entry.get("trained") == (
            known and {"rescued": known.rescued, "trained": known.trained, "words": known.words}
        )
        untried = -1.0 if entry.get("strength") == 0.0 else 0.0
        return untried if known is None else known.share or -1.0, entry["residual_last"]

    assert [place(entry) for entry in entries] == sorted((place(entry) for entry in entries), reverse=True)
    assert {entry["rank"] for entry in entries} == {None}, "the model is healthy: nothing is ranked"
    assert "none of the" in run.verdict
    for entry in entries:
        assert np.isclose(np.prod(entry["factors"]), entry["residual"][-1] / entry["residual"][0], rtol=1e-12)
        assert np.isclose(entry["factor"] ** len(entry["factors"]), np.prod(entry["factors"]), rtol=1e-12)


def test_the_numbers_are_those_of_measure_under_the_remedy(run) -> None:
    model = load("init:tiny-bert").model
    for name in ("none", "centred_attention", "deepnorm"):
        entry = next(entry for entry in run.extra["remedies"] if entry["name"] == name)
        if name == "none":
            found = measure(model, Inputs(sequences=2, tokens=12))
        else:
            with applied(model, name):
                found = measure(model, Inputs(sequences=2, tokens=12))
        expected = found.curve("relative_residual", "block.out").mean
        assert np.allclose(entry["residual"][1:], expected, rtol=1e-12, atol=0)


def test_text_json_figure_and_storage(run, tmp_path) -> None:
    text = str(run)
    assert all(name in text for name in REMEDIES)
    assert "it does not show which remedy trains best" in run.verdict
    answer = json.loads(json.dumps(run.to_json(), allow_nan=False))
    assert {row["remedy"] for row in answer["rows"]} >= {"none", "neutreno"}
    run.plot().savefig(tmp_path / "figure.png")
    run.save(tmp_path / "run")
    assert str(load_run(tmp_path / "run")) == text


def test_a_strength_is_given_with_the_name() -> None:
    run = remedy("init:tiny-bert", Inputs(sequences=1, tokens=8), remedies=["stronger_skip=1", "stronger_skip=3"])
    by_name = {entry["name"]: entry for entry in run.extra["remedies"]}
    assert by_name["stronger_skip=1"]["residual"] == by_name["none"]["residual"]
    assert by_name["stronger_skip=3"]["strength"] == 3.0
    assert by_name["stronger_skip=3"]["trained"] is None, "trainings used the default strength"


def test_wrong_words_are_refused() -> None:
    with pytest.raises(InputError, match="stronger_skip=NUMBER"):
        remedy("init:tiny-bert", remedies=["stronger_skip=much"])
    with pytest.raises(UnknownNameError, match="stronger_skip"):
        remedy("init:tiny-bert", remedies=["strong_skip"])
    with pytest.raises(InputError, match=r"None of the remedies.*needs post-norm"):
        remedy("init:tiny-llama", Inputs(sequences=1, tokens=8), remedies=["deepnorm"])


def test_a_model_of_ones_own_without_head_weights_known() -> None:
    torch.manual_seed(0)
    model = GPT("pre").double().train()
    run = remedy(model, ids(2, 7), remedies=["residual_scale", "neutreno"])
    assert all(entry["qk_over_v"] is None for entry in run.extra["remedies"])
    assert any("Gradients were left out" in note for note in run.notes)
    assert model.training


def test_the_network_under_surgery_is_what_is_treated() -> None:
    run = remedy("init:tiny-bert", Inputs(sequences=2, tokens=12), {"skip": 0.0}, remedies=["value_skipinit"])
    model = load("init:tiny-bert").model
    with operate(model, Surgery(skip=0.0)):
        expected = measure(model, Inputs(sequences=2, tokens=12)).curve("relative_residual", "block.out").mean
    entry = next(entry for entry in run.extra["remedies"] if entry["name"] == "none")
    assert np.allclose(entry["residual"][1:], expected, rtol=1e-12, atol=0)
    treated = next(entry for entry in run.extra["remedies"] if entry["name"] == "value_skipinit")
    assert treated["residual_last"] > entry["residual_last"]
    assert treated["trained"]["words"].endswith("small networks without skips")


def bert():
    loaded = load("init:tiny-bert", dtype="float64")
    return loaded, prepare_inputs(loaded, None, sequences=2, tokens=9, batch=2)[0]


def test_gradient_norms_are_those_of_backward() -> None:
    from rankscope.stream.viewing import view_of

    loaded, batch = bert()
    found = gradient_norms(loaded, view_of(loaded.model, batch), batch, seed=5)
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    out = batch.run(loaded.model).last_hidden_state
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ((direction * out).sum() / (out.shape[1] * out.shape[2]) ** 0.5).backward()
    for norm, layer in zip(found, loaded.model.encoder.layer, strict=True):
        own = layer.attention.self
        expected = [float(part.weight.grad.norm()) for part in (own.query, own.key, own.value)]
        assert np.allclose([norm.query, norm.key, norm.value], expected, rtol=1e-10, atol=0)


def test_gradients_of_queries_and_keys_vanish_where_attention_is_uniform() -> None:
    from rankscope.stream.viewing import view_of

    loaded, batch = bert()
    view = view_of(loaded.model, batch)
    with operate(loaded.model, Surgery(attention="uniform")):
        found = gradient_norms(loaded, view, batch)
    assert all(norm.query == 0 and norm.key == 0 and norm.value > 0 for norm in found)


def entry(name: str, last: float, *, at_floor: bool = False) -> dict[str, object]:
    return {
        "name": name, "residual_last": last, "mean_cosine_last": 1 - last, "factor": 0.9, "factors": [0.9] * 3,
        "qk_over_v": None, "parameters": 0, "at_floor": at_floor, "residual": [0.9, 0.9, 0.9, last],
    }  # fmt: skip


def test_the_verdict_counts_only_what_can_be_told() -> None:
    entries = [entry("a", 0.5), entry("b", 0.104), entry("none", 0.1), entry("c", 0.01)]
    verdict = judge_remedies(entries, 2, is_random=True)
    sentence = verdict.sentence
    assert (verdict.code, verdict.evidence[-1]["state"]) == ("mean offset", "collapsed")
    assert sentence.startswith(
        "1 of 3 remedies help. First: a. Relative residual after 3 blocks: 0.5 with a, 0.1 without"
    )
    assert "1 bring tokens closer together: c" in sentence
    seen = {"rescued": 3, "trained": 3, "words": "rescued 3 of 3"}
    entries = [
        {**entry("b", 0.4), "trained": seen},
        entry("none", 0.1),
        {**entry("a", 0.5), "trained": {**seen, "rescued": 0}},
    ]
    sentence = judge_remedies(entries, 2, is_random=True).sentence
    assert sentence.startswith(
        "1 of 2 remedies help. First: b. b rescued 3 of 3. Relative residual after 3 blocks: 0.4"
    )
    assert "Not suggested, because they rescued no training of such networks: a" in sentence
    floored = [entry("a", 4e-7, at_floor=True), entry("none", 1e-7, at_floor=True)]
    sentence = judge_remedies(floored, 1, is_random=False).sentence
    assert "cannot be quantified" in sentence
    assert sentence.startswith("No remedy to suggest: none of 1 helps.")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_fifty_blocks_do_what_the_papers_say(seed: int, tmp_path) -> None:
    """Random networks of 50 blocks: every remedy lowers correlation but ``qk_norm``, which only acts on scores.

    Once tokens agree there is no difference for it to act on.
    """
    config = {
        "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 50, "num_attention_heads": 4,
        "intermediate_size": 256, "vocab_size": 1000, "max_position_embeddings": 64, "initializer_range": 0.125,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = remedy(
        Model(f"init:{tmp_path}", dtype="float64", seed=seed),
        Inputs(random_tokens=True, sequences=1, tokens=48),
    )
    ends = {entry["name"]: 1 - entry["correlation_last"] for entry in run.extra["remedies"]}
    for name in set(ends) - {"none", "qk_norm"}:
        assert ends[name] > 2 * ends["none"], name
    assert ends["residual_scale"] > 1e3 * ends["none"]
    ratios = {entry["name"]: entry["qk_over_v"] for entry in run.extra["remedies"]}
    assert ratios["none"] < 1e-4
    assert ratios["residual_scale"] > 1e-2
