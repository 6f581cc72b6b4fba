"""What each command hands to its verb and prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope.cli.environment import EXTRAS
from rankscope.cli.verb_commands import split_names
from rankscope.runs.run import load_run
from rankscope.verbs.doctor.checks import Check, DoctorReport, StackFacts
from rankscope.verbs.selftest.run import PRINTED, SelfTest
from tests.runs.builders import make_run, profile


@dataclass
class Fake:
    """Stands for a verb, and remembers how it was called."""

    answer: object
    given: tuple[tuple[object, ...], dict[str, Any]] = ((), {})

    def __call__(self, *words: object, **options: object) -> object:
        self.given = (words, options)
        return self.answer


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Fake:
    table = profile({"relative_residual": [0.9, float("nan")]}).table()
    fake = Fake(make_run(table, notes=("the sample [text] was used",)))
    monkeypatch.setitem(vars(rankscope), "measure", fake)
    return fake


def no_constants(word: str) -> None:
    raise AssertionError(f"bare {word} in JSON")


def test_measure_prints_one_json_object(cli, measured: Fake) -> None:
    outcome = cli("measure", "init:tiny-bert", "--json")
    assert outcome.code == 0
    assert outcome.out.count("\n") == 1
    answer = json.loads(outcome.out, parse_constant=no_constants)
    assert list(answer) == [
        "schema",
        "kind",
        "provenance",
        "floor",
        "verdict",
        "code",
        "next_steps",
        "evidence",
        "null",
        "rows",
    ]
    assert {"metric", "site", "layer", "sequence", "value", "status"} == set(answer["rows"][0])
    assert outcome.err == "note: the sample [text] was used\n"


def test_measure_hands_over_every_option(cli, measured: Fake, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    options = (
        "--sequences 2 --tokens 16 --batch 1 --metrics stable_rank,mean_cosine --metrics mu --sites block.in@0,5,final"
    )
    more = "--tokens-policy no-first --dtype float64 --device cpu --seed 7 --null --blocks layers.* --quiet "
    more += "--random-tokens --tokenizer gpt2"
    layout = ("--layout", "batch dim tokens")
    cli("measure", "init:tiny-bert", "--text", str(text), *options.split(), *more.split(), *layout)
    words, given = measured.given
    model, inputs, surgery = words
    assert (model.source, inputs.data, surgery.changes_nothing) == ("init:tiny-bert", text, True)
    assert given == {
        "metrics": ["stable_rank", "mean_cosine", "mu"],
        "sites": ["block.in@0,5", "final"],
        "null": True,
        "similarity": False,
        "between_inputs": None,
        "attention_algorithm": None,
        "spectra": None,
        "progress": False,
    }
    fed = (inputs.sequences, inputs.tokens, inputs.batch, inputs.tokens_policy, inputs.random_tokens, inputs.tokenizer)
    assert fed == (2, 16, 1, "no-first", True, "gpt2")
    assert (model.dtype, model.device, model.seed, model.blocks) == ("float64", "cpu", 7, "layers.*")
    assert str(model.stream) == "batch dim tokens"
    assert (model.parallel, model.offload, model.memory) == (None, False, None)
    cli("measure", "init:tiny-bert", "--skip", "0", "--mlp", "drop", "--layers", "1")
    assert measured.given[0][2].operation.describe() == {
        "attention_skip": 0.0,
        "mlp_skip": 0.0,
        "mlp": "drop",
        "layers": [1],
    }


def test_offload_has_a_budget(cli, measured: Fake) -> None:
    cli("measure", "folder", "--offload", "--memory", "3GiB")
    model = measured.given[0][0]
    assert (model.offload, model.memory) == (True, "3GiB")


def test_measure_prints_a_table_and_saves(cli, measured: Fake, tmp_path: Path) -> None:
    outcome = cli("measure", "init:tiny-bert", "--out", str(tmp_path / "run"))
    assert "relative" in outcome.out
    assert "verdict" in outcome.out
    assert "undefined" in outcome.out
    assert "\x1b[" not in outcome.out
    assert f"saved in {tmp_path / 'run'}" in outcome.err
    assert load_run(tmp_path / "run").to_json() == measured.answer.to_json()


def test_quiet_measure_prints_the_verdict_only(cli, measured: Fake) -> None:
    outcome = cli("measure", "init:tiny-bert", "-q")
    assert outcome.out == f"{measured.answer.verdict}\n"
    assert outcome.err == ""


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("info", 0), ("refused", 0), ("fail", 1)])
def test_doctor(cli, monkeypatch: pytest.MonkeyPatch, status: str, code: int) -> None:
    stack = StackFacts(None, 2, "layer.*", (("attention", "mlp"),) * 2, (1, 1), "batch tokens dim", None)
    report = DoctorReport("m", "Model", (stack,), (Check("parity", status, "said [so]"),))
    fake = Fake(report)
    monkeypatch.setitem(vars(rankscope), "doctor", fake)
    outcome = cli("doctor", "init:tiny-bert", "--seed", "3")
    assert outcome.code == code
    assert ("said [so]" in outcome.out) is (code == 1), "a check is printed if it failed"
    model, inputs, surgery = fake.given[0]
    assert (model.source, model.seed, inputs.data, surgery.changes_nothing) == ("init:tiny-bert", 3, None, True)
    own = {"loss": None, "labels": None, "optimizer": None, "details": False}
    assert fake.given[1] == own
    outcome = cli("doctor", "init:tiny-bert", "--json")
    answer = json.loads(outcome.out)
    assert outcome.code == code
    assert answer["passed"] is (code == 0)
    assert answer["checks"] == [{"name": "parity", "status": status, "detail": "said [so]"}]


@pytest.mark.parametrize("passed", [True, False])
def test_selftest(cli, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    as_expected = {kind: tuple(map(float, digits)) for kind, digits in PRINTED.items()}
    wrong = {**as_expected, "iid Gaussian": (0.5,) * 8}
    monkeypatch.setitem(vars(rankscope), "selftest", Fake(SelfTest(as_expected if passed else wrong)))
    shown = cli("selftest").out
    assert "Gaussian" in shown
    assert ("All 40 values agree" in shown) == passed
    outcome = cli("selftest", "--json")
    assert json.loads(outcome.out)["passed"] is passed
    assert outcome.code == (0 if passed else 1)
    assert cli("selftest", "--quiet") == type(outcome)(outcome.code, "", "")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("verbs", {"name", "question", "answer", "offload", "parallel", "in_plans", "columns"}),
        ("metrics", {"name", "side", "symbol", "at_collapse", "needs", "summary", "cites"}),
        ("sites", {"name", "summary"}),
        ("presets", {"name", "model_type", "reads", "summary"}),
        ("families", {"name"}),
        ("masks", {"name", "signature", "is_causal", "self_loops", "example", "parameters", "summary", "cites"}),
    ],
)
def test_ls(cli, kind: str, fields: set[str]) -> None:
    answer = json.loads(cli("ls", kind, "--json").out, parse_constant=no_constants)
    assert set(answer) == {"schema", "kind", "entries"}
    assert answer["kind"] == kind
    assert answer["entries"]
    assert all(fields <= set(entry) for entry in answer["entries"])
    shown = cli("ls", kind).out
    assert all(entry["name"] in shown for entry in answer["entries"])


def test_env(cli) -> None:
    answer = json.loads(cli("env", "--json").out)
    assert answer["kind"] == "env"
    assert answer["versions"]["torch"]
    assert set(answer["extras"]) == set(EXTRAS)
    assert answer["versions"]["torch"] in cli("env").out


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, None),
        ([], None),
        ([","], None),
        (["a,b", " c "], ["a", "b", "c"]),
        (["block.in@0,5,block.out"], ["block.in@0,5", "block.out"]),
        (["block.in@0", "5"], ["block.in@0", "5"]),
        (["a,5"], ["a", "5"]),
    ],
)
def test_lists_on_the_command_line(given: list[str] | None, names: list[str] | None) -> None:
    assert split_names(given) == names


def test_a_figure_that_cannot_be_written_is_explained_after_the_result(cli, measured: Fake, tmp_path: Path) -> None:
    for name, words in (("figure.docx", ".png, .svg or .pdf"), ("missing/figure.png", "cannot be written")):
        outcome = cli("measure", "init:tiny-bert", "--figure", str(tmp_path / name))
        assert outcome.code == 2
        assert "init:tiny-bert" in outcome.out
        assert words in outcome.err
    assert cli("measure", "init:tiny-bert", "--quiet", "--figure", str(tmp_path / "figure.svg")).code == 0
    assert (tmp_path / "figure.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")


@pytest.mark.parametrize("verb", ["measure", "doctor"])
def test_a_terminal_is_told_that_the_model_is_read(cli, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal only, and not if it was asked to be quiet."""
    answers = {
        "measure": make_run(profile({"relative_residual": [0.9]}).table()),
        "doctor": DoctorReport("m", "Model", (), ()),
    }
    monkeypatch.setitem(vars(rankscope), verb, Fake(answers[verb]))
    assert "Loading" not in cli(verb, "init:tiny-bert").err
    monkeypatch.setattr("rankscope.cli.showing.sys.stderr.isatty", lambda: True, raising=False)
    outcome = cli(verb, "init:tiny-bert")
    assert "Loading init:tiny-bert ..." in outcome.err
    assert "Loading" not in outcome.out
    assert "Loading" not in cli(verb, "init:tiny-bert", "--quiet").err
