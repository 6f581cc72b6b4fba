"""Arguments of the public functions are checked against the declarations, in our words, as on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import typer.main

import rankscope as rs
from rankscope.cli.app import command_line
from rankscope.errors import InputError, RankscopeError, UnknownNameError
from rankscope.options import Option
from rankscope.runs.run import Run
from rankscope.verbs._spec import verbs_in_order

SMALL = rs.Inputs(sequences=2, tokens=8)
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2, 1.5, -0.0, float("nan"), float("inf"), 10**30, "", " ", "2", "none", "matchd", "contnet",
    "\0", b"x", [], [None], [""], ["x"], (), {}, {"x": 1}, {1, 2}, object(), int, len, torch.ones(2), np.zeros(3),
    torch.float16, 3j, "a" * 5000,
)  # fmt: skip
NO_MODEL = "./there/is/no/such/model"


def functions() -> dict[str, Callable[..., Any]]:
    """Every public function that is checked, called on something that names no model."""
    verbs = ("measure", "ablate", "exact", "decompose", "bound", "remedy", "doctor")
    found: dict[str, Callable[..., Any]] = {name: getattr(rs, name) for name in verbs}
    return {**found, "judge": rs.judge, "predict": rs.predict}


def test_odd_values_raise_our_errors_only() -> None:
    tried = 0
    for function in functions().values():
        _, *others = inspect.signature(function).parameters
        for name in others:
            for value in ODD:
                with pytest.raises(RankscopeError):
                    function(NO_MODEL, **{name: value})
                tried += 1
    assert tried > 1200


def test_odd_values_of_functions_without_a_model() -> None:
    for value in ODD:
        with suppress(RankscopeError):
            rs.graph("causal", value)
        with suppress(RankscopeError):
            rs.graph("causal", 4, seed=value)
        with suppress(RankscopeError):
            rs.Gauge(torch.nn.Linear(2, 2), rs.Inputs(torch.ones(1, 2), tokens=4), schedule=value)
        if value is not None:
            with pytest.raises(RankscopeError):
                rs.selftest(value)


VALUES = ("", "-1", "0", "1", "1.5", "nan", "1e400", "x", "matchd", "True", "9" * 30)


def natural(option: Option, text: str) -> Any:
    """The value that a Python user would write."""
    with suppress(ValueError):
        return option.kind(text) if option.kind in (int, float) else text
    return text


def test_python_accepts_nothing_that_the_command_line_refuses() -> None:
    commands = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]
    refused = 0
    for verb in verbs_in_order():
        for option in verb.options:
            if option.is_argument or option.kind is bool or option.several == "pair":
                continue
            flag = option.flags[0] if option.flags else f"--{option.name.replace('_', '-')}"
            for text in VALUES:
                words = [flag, text, *("x" for other in verb.options if other.is_argument)]
                try:
                    commands[verb.name].make_context(verb.name, words)
                except Exception:  # noqa: BLE001  (typer carries its own copy of click)
                    pass
                else:
                    continue
                if option.name == "inputs":  # a file that does not exist; in Python it is a text
                    continue
                value = natural(option, text)
                with pytest.raises(InputError):
                    option.checked([value] if option.several else value)
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rs.ablate(NO_MODEL, weights="matchd"), "weights='matchd': expected 'given', 'init' or 'both'"),
        (lambda: rs.measure(NO_MODEL, rs.Inputs(tokens=-1)), "tokens=-1: expected a whole number, 1 or more"),
        (lambda: rs.measure(NO_MODEL, rs.Inputs(sequences="2")), "sequences='2': expected a whole number"),
        (lambda: rs.measure(NO_MODEL, null="yes"), "null='yes': expected True or False"),
        (lambda: rs.measure(NO_MODEL, tokens=16), "it is a field of rankscope.Inputs"),
        (lambda: rs.measure(NO_MODEL, device="cuda"), "it is a field of rankscope.Model"),
        (lambda: rs.exact(NO_MODEL, skip=0.0), "it is a field of rankscope.Surgery"),
        (lambda: rs.exact(NO_MODEL, None, 0.0), "surgery is a float"),
        (lambda: rs.bound(NO_MODEL, rs.Inputs(tokens_policy="no-first")), "all tokens that attention reads"),
        (lambda: rs.measure(), "missing a required argument: 'model'"),
    ],
)
def test_what_is_said(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        call()
    assert said in str(refused.value)


def test_a_misspelt_argument_is_named() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'metrics'"):
        rs.measure(NO_MODEL, metric=["relative_residual"])


def test_one_name_is_a_list_of_one() -> None:
    one = rs.measure("init:tiny-bert", SMALL, metrics="relative_residual", sites="block.out")
    assert one.table.equals(
        rs.measure("init:tiny-bert", SMALL, metrics=["relative_residual"], sites=["block.out"]).table
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "measure": {"metrics": ["relative_residual", "attention_entropy"]},
    "ablate": {"variants": ["pure", "+skip"], "metrics": ["relative_residual"]},
    "exact": {"stability": True},
    "decompose": {},
    "bound": {"theorems": ["contraction_interval"]},
    "remedy": {"remedies": ["stronger_skip"], "gradients": False},
}
CUT = {"attention_skip": 0.5, "mask": "causal", "layers": [0, 1]}


def rows(run: Run) -> str:
    """All rows, to the last bit, with NaN equal to NaN."""
    return repr(run.table.to_pylist())


def told(run: Run) -> tuple[Any, ...]:
    return run.verdict, run.provenance.operations, run.code


@pytest.mark.sampled(3)
@pytest.mark.parametrize("verb", OPTIONS)
def test_surgery_of_a_call_is_surgery_around_it(verb: str) -> None:
    function, options = getattr(rs, verb), OPTIONS[verb]
    model = rs.load("init:tiny-bert")
    with rs.operate(model, CUT):
        around = function(model, SMALL, **options)
    whole = function(model, SMALL, **options)
    given = function(model, SMALL, rs.Surgery(**CUT), **options)
    assert told(given) == told(around)
    assert rows(given) == rows(around)
    assert rows(given) != rows(whole)
    assert function(model, SMALL, **options).provenance.operations == (), "the model is left as it was"


def test_surgery_on_a_module_of_ones_own_and_in_doctor() -> None:
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 8)
    with rs.operate(encoder, {"skip": 0}, inputs=x):
        around = rs.measure(encoder, x, metrics=["relative_residual"])
    assert rs.measure(encoder, x, {"skip": 0}, metrics=["relative_residual"]).table.equals(around.table)
    assert rs.doctor(encoder, x, {"skip": 0}).passed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("verb", ["measure", "ablate", "exact", "bound"])
def test_surgery_of_an_offloaded_model_is_that_of_one_in_memory(verb: str, tmp_path: Any) -> None:
    rs.load("init:tiny-gpt2").model.save_pretrained(tmp_path / "model")
    function, options, cut = getattr(rs, verb), OPTIONS[verb], {"attention_skip": 0.5, "layers": [1]}
    spec = str(tmp_path / "model")
    offloaded = function(rs.Model(spec, offload=True), SMALL, cut, **options)
    in_memory = function(spec, SMALL, cut, **options)
    assert rows(offloaded) == rows(in_memory)
    assert offloaded.provenance.operations == in_memory.provenance.operations != ()


def test_an_error_inside_leaves_no_surgery_behind() -> None:
    model = rs.load("init:tiny-bert")
    with pytest.raises(RankscopeError):
        rs.measure(model, SMALL, {"skip": 0}, sites=["block.out@99"])
    assert rs.measure(model, SMALL, metrics=["relative_residual"]).provenance.operations == ()
