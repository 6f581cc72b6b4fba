"""``Model``, ``Inputs`` and ``Surgery``: fields, checks, coercions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import rankscope as rs
from rankscope import options
from rankscope.errors import InputError, RankscopeError
from rankscope.models.inputs import as_inputs
from rankscope.models.model import as_model, load
from rankscope.surgery.operation import Operation
from rankscope.surgery.surgery import as_surgery


@pytest.mark.parametrize(
    ("noun", "declared", "others"),
    [
        (rs.Inputs, options.INPUTS_FIELDS, {"data"}),
        (rs.Surgery, options.SURGERY_FIELDS, set()),
        (
            rs.Model,
            options.MODEL_FIELDS,
            {
                "source",
                "revision",
                "trust_remote_code",
                "allow_pickle",
                "model_class",
            },
        ),
    ],
)
def test_fields_are_the_declared_options(noun, declared, others):
    names = {entry.name for entry in fields(noun)}
    assert names - others == {option.name for option in declared} - {"inputs"}


def test_what_is_accepted_in_their_place():
    texts, ids, mapping = ["one", "two"], torch.ones(2, 4, dtype=torch.long), {"input_ids": torch.ones(1, 4)}
    for data in (texts, "one", ids, mapping, Path("file.txt"), None):
        assert as_inputs(data).data is data
    inputs, cut, model = rs.Inputs(texts), rs.Surgery(skip=0), rs.Model("init:tiny-bert")
    assert (as_inputs(inputs), as_surgery(cut), as_model(model)) == (inputs, cut, model)
    assert as_surgery(None).changes_nothing
    assert as_surgery({"skip": 0}).operation == cut.operation == Operation(attention_skip=0.0, mlp_skip=0.0)
    module = torch.nn.Linear(2, 2)
    assert as_model(module).model is load(module).model is module


def test_numbers_of_numpy_and_torch_are_numbers():
    inputs = rs.Inputs(tokens=np.int64(16), batch=torch.tensor(4), random_tokens=np.bool_(True))
    assert (inputs.tokens, inputs.batch, inputs.random_tokens) == (16, 4, True)
    assert type(inputs.tokens) is int
    assert rs.Surgery(skip=np.float32(0.5), layers=2, heads={0, 1}).operation.layers == {2}


ODD = (
    None,
    True,
    -1,
    0,
    1.5,
    float("nan"),
    10**30,
    "",
    "2",
    "contnet",
    b"x",
    [],
    ["x"],
    {},
    object(),
    int,
    torch.ones(2),
)


@pytest.mark.parametrize("noun", [rs.Model, rs.Inputs, rs.Surgery])
def test_odd_values_are_refused_in_our_words(noun):
    first = ("init:tiny-bert",) if noun is rs.Model else ()
    names = [entry.name for entry in fields(noun) if entry.name not in ("source", "data")]
    for name in names:
        for value in ODD:
            with suppress(RankscopeError):
                noun(*first, **{name: value})


@pytest.mark.parametrize(
    ("noun", "arguments", "said"),
    [
        (rs.Inputs, {"tokens": -1}, "tokens=-1: expected a whole number, 1 or more"),
        (rs.Inputs, {"sequences": "2"}, "sequences='2': expected a whole number"),
        (rs.Inputs, {"sequences": True}, "sequences=True"),
        (rs.Inputs, {"tokens_policy": "contnet"}, "Did you mean 'content'"),
        (rs.Inputs, {"axes": "tokens first"}, "'batch tokens' or 'tokens batch'"),
        (rs.Inputs, {"random_tokens": "yes"}, "True or False"),
        (rs.Inputs, {"seed": 2**70}, "The largest is"),
        (rs.Surgery, {"mlp": "remove"}, "'keep' or 'drop'"),
        (rs.Surgery, {"skip": "0"}, "skip='0': expected a finite number"),
        (rs.Surgery, {"skip": float("inf")}, "finite"),
        (rs.Surgery, {"layers": [-1]}, "0 or more"),
    ],
)
def test_what_is_said(noun, arguments, said):
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        noun(**arguments)


def test_a_dictionary_with_another_entry_is_refused():
    with pytest.raises(RankscopeError, match="skip"):
        as_surgery({"skipp": 0})
    with pytest.raises(InputError, match="surgery is a list"):
        as_surgery(["skip"])


def test_a_model_is_loaded_once_and_not_for_offload():
    model = load("init:tiny-bert", seed=3)
    assert model.loaded is model.loaded
    assert model.loaded.seed == 3
    assert "_kept" not in vars(load("init:tiny-bert", offload=True))
    with pytest.raises(InputError, match="block by block"):
        _ = rs.Model("init:tiny-bert", offload=True).loaded
