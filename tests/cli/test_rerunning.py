"""``rankscope rerun``, which runs the command of a saved run in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankscope.cli.rerunning import command_again
from rankscope.errors import InputError

FEW = ("--sequences", "2", "--tokens", "8", "--metrics", "relative_residual")


def test_a_saved_run_comes_out_again_to_the_bit_and_a_changed_number_is_found(cli, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for place, seed in ((run, "3"), (other, "4")):
        assert cli("measure", "init:tiny-bert", *FEW, "-q", "--seed", seed, "--out", str(place)).code == 0
    shown = cli("rerun", str(run), "--show")
    assert shown.out.strip() == f"rankscope measure init:tiny-bert {' '.join(FEW)} --seed 3"
    again = cli("rerun", str(run), "--json", "--out", str(tmp_path / "again"))
    assert again.code == 0, again.err
    assert json.loads(again.out)["same"] is True
    facts, rows = json.loads((other / "run.json").read_text()), json.loads((run / "run.json").read_text())
    facts["provenance"]["command"] = rows["provenance"]["command"]
    (other / "run.json").write_text(json.dumps(facts))
    changed = cli("rerun", str(other))
    assert changed.code == 1
    assert "Not the same" in changed.out


@pytest.mark.parametrize(
    "command", [["rm", "-rf", "x"], ["rankscope"], ["rankscope", "play"], ["python", "measure", "x"], []]
)
def test_nothing_but_a_verb_of_rankscope_is_started(command: list[str]) -> None:
    with pytest.raises(InputError, match="not a single rankscope command"):
        command_again(command)
