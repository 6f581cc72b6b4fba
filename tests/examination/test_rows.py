"""Every row is found in its bad program and not in its good one, and claims no more than its level allows."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope as rs
import rankscope.examination
from rankscope.errors import InputError, UnknownNameError
from rankscope.examination import ROWS, RowSpec, examine, find
from rankscope.examination.outcomes import EXPERIMENTS, Outcome
from rankscope.examination.rows.programs import CLASSIFIER, DECODER, ENCODER, Program
from rankscope.models.inputs import Inputs
from rankscope.models.model import as_model
from rankscope.verbs.doctor.checks import DoctorReport
from rankscope.verbs.doctor.explaining import explained
from rankscope.verbs.doctor.reaching import batch_for

FOLDER = Path(rankscope.examination.__file__).parent


def asked(program: Program) -> DoctorReport:
    return rs.doctor(
        program.model, program.inputs, labels=program.labels, loss=program.loss, optimizer=program.optimizer
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # that is what a bad program does
@pytest.mark.sampled(3)
@pytest.mark.parametrize("spec", ROWS.values(), ids=lambda spec: spec.code)
def test_a_row_tells_its_bad_program_from_its_good_one(spec: RowSpec) -> None:
    torch.manual_seed(0)
    found = asked(spec.bad()).findings[0]
    assert (found.code, found.kind) == (spec.code, spec.level)
    torch.manual_seed(0)
    good = asked(spec.good()).findings
    assert [one.code for one in good if one.kind == "fault" or one.code == spec.code] == []


def test_what_was_not_read_supports_no_claim() -> None:
    assert not Outcome(True, None).shown
    assert not Outcome(None, False).shown
    assert not Outcome(True, True).shown
    assert Outcome(True, False).shown


def test_every_experiment_is_read() -> None:
    read = {spec.reads for spec in ROWS.values()}
    text = "".join(path.read_text() for path in FOLDER.rglob("*.py"))
    assert [name for name in EXPERIMENTS if name not in read and f'outcome("{name}")' not in text] == []


def test_no_control_is_written_down() -> None:
    """The control of an outcome that was seen is a reading: never a constant."""
    controls = [
        (path.name, node.lineno, node.args[1])
        for path in FOLDER.joinpath("experiments").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Outcome"
    ]
    assert len(controls) > 30
    assert [(name, line) for name, line, control in controls if isinstance(control, ast.Constant)] == []


def test_every_experiment_names_its_control() -> None:
    assert [name for name, run in EXPERIMENTS.items() if "control" not in (run.__doc__ or "").casefold()] == []


def test_a_row_is_explained_with_its_programs() -> None:
    text = explained("causal_mask")
    assert text.startswith("causal_mask (fault): A causal mask that is missing")
    for words in (
        "control are two equal rows",
        "-         scores = scores.masked_fill(hidden, -torch.inf)\n",
        "+         scores.masked_fill(hidden, -torch.inf)\n",
        "There is no causal mask",
    ):
        assert words in text, words
    with pytest.raises(UnknownNameError, match="no row named 'causal_masks'"):
        explained("causal_masks")


@pytest.mark.parametrize("part", ["not in the text", "self.mix"])
def test_a_part_of_a_program_that_is_not_there_once_is_not_replaced(part: str) -> None:
    with pytest.raises(ValueError, match="in the program, and not once"):
        CLASSIFIER.but(part, "")


def test_squares_that_overflow_inside_a_norm_are_found_where_they_do() -> None:
    """All that is seen outside are zeros: the mean of the squares is infinite, and the norm divides by it."""
    forward = "    def forward(self, x):\n        return x / (x.half() ** 2).mean(-1, True) ** 0.5\n\n\n"
    norm = f"class Norm(nn.Module):\n{forward}"
    large = "= Model()\nmodel.embed.weight.data *= {}\n"
    for size, codes in ((1.0, []), (1e3, ["float16_overflow"])):
        script = DECODER.but(
            "class Model(", f"{norm}class Model(", "nn.LayerNorm(32), nn.Linear(32, 20)", "Norm(), nn.Linear(32, 20)",
            "self.place[: ids.shape[1]]", "0.0", "= Model()\n", large.format(size),
        )  # fmt: skip
        torch.manual_seed(0)
        report = asked(script())
        assert report.to_json()["codes"] == codes
        assert all("pow in `Norm.forward`" in one.sentence for one in report.faults)


def test_a_head_of_zeros_answers_all_tokens_alike_and_is_healthy() -> None:
    torch.manual_seed(0)
    assert asked(DECODER.but("= Model()\n", "= Model()\nnn.init.zeros_(model.head.weight)\n")()).faults == ()


def test_a_loss_that_cannot_be_called_is_refused() -> None:
    """Classes have to be the second axis; else half of the rows would be left out in silence."""
    program = DECODER.but("output.flatten(0, 1), labels.flatten()", "output, labels")()
    with pytest.raises(InputError, match=r"loss raises .*\(12, 11, 20\) and \(12, 11\)\): RuntimeError"):
        asked(program)


def test_an_edit_is_data_that_a_program_can_carry_out() -> None:
    torch.manual_seed(0)
    script = ROWS["inputs_ignored"].bad
    report = asked(script())
    (edit,) = report.to_json()["findings"][0]["edits"]
    assert (edit["function"], edit["old"], edit["new"]) == ("Model.forward", "self.embed(ids) * 0", "self.embed(ids)")
    torch.manual_seed(0)
    assert asked(script.but(edit["old"], edit["new"])()).faults == ()
    json.dumps(report.to_json())


def test_the_fields_of_the_answer_are_those_of_its_schema() -> None:
    """Programs read them: whoever renames or removes one raises the schema."""
    torch.manual_seed(0)
    answer = asked(ROWS["inputs_ignored"].bad()).to_json()
    assert (answer["schema"], answer["kind"]) == (1, "doctor")
    assert answer.keys() == {
        "schema", "kind", "answer", "codes", "findings", "model", "architecture", "stacks", "checks", "claims",
        "not_examined", "passes", "structure_passes", "passed",
    }  # fmt: skip
    assert answer["findings"][0].keys() == {
        "code", "sentence", "change", "certainty", "kind", "tried", "measured", "before", "after", "intervention",
        "where", "curves", "edits", "evidence",
    }  # fmt: skip
    assert answer["findings"][0]["edits"][0].keys() == {"file", "function", "old", "new"}
    assert answer["checks"][0].keys() == {"name", "status", "detail"}
    assert rs.doctor("init:tiny-gpt2").to_json()["claims"][0].keys() == {"about", "stack", "says", "proven_by"}


FAINT = ENCODER.but(
    "= nn.LayerNorm(32), Attention(), nn.LayerNorm(32)\n",
    "= nn.LayerNorm(32), Attention(), nn.LayerNorm(32)\n        self.carry = nn.Parameter(torch.ones(1))\n",
    "x = x + self.attention", "x = self.carry * x + self.attention",
    "return x + self.mlp", "return self.carry * x + self.mlp",
    "range(2)", "range(8)",
)  # fmt: skip
"""Blocks whose skips carry what they are told to."""


def faint() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = FAINT().model
    return model


def test_a_function_that_builds_the_model_tells_training_from_architecture() -> None:
    """Gains that training made small are no fault of the architecture: at its beginning, tokens stay apart."""
    model, ids = faint(), FAINT().inputs
    for block in model.layers:  # type: ignore[union-attr]
        nn.init.constant_(block.carry, 0.2)  # type: ignore[arg-type, union-attr]
    batch = batch_for(as_model(model), Inputs(ids)).batch
    assert [one.code for one in find(examine(model, batch)).findings] == ["weak_skips"]
    assert [one.code for one in find(examine(model, batch, build=faint)).findings] == []


def test_a_function_that_builds_the_model_is_examined() -> None:
    ids = FAINT().inputs
    assert rs.doctor(faint, ids).faults == ()
    program = ROWS["no_skips"].bad
    assert rs.doctor(lambda: program().model, ids).to_json()["codes"] == ["no_skips"]
