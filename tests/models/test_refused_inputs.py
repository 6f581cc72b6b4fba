"""Inputs that would be taken for something else, or that a model cannot run on: refused with the numbers and a way."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import LoadedModel, load

DIM, VOCABULARY, POSITIONS = 8, 30, 20


class Reader(nn.Module):
    """Attention over ids, with positions added from a parameter or looked up."""

    def __init__(self, *, looked_up: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.looked_up = nn.Embedding(VOCABULARY, DIM), looked_up
        self.positions = nn.Embedding(POSITIONS, DIM)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.words(ids) + (self.positions(places) if self.looked_up else self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return x


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def reader() -> LoadedModel:
    return load(Reader().eval())


@pytest.fixture(scope="module")
def bert() -> LoadedModel:
    return load("init:tiny-bert")


REFUSED: dict[str, tuple[Any, str]] = {
    "inputs and targets": ((ids(4, 7), ids(4, 7)), r"inputs\[0\].*{'ids': inputs\[0\], 'scale': inputs\[1\]}"),
    "a list of inputs and labels": ([ids(4, 7), torch.arange(4)], r"list of tensors of shape \(4, 7\) and \(4,\)"),
    "an id that has no embedding": (torch.full((3, 7), 30), r"IndexError.*largest id is 30.* 30 \(words.weight\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_item_8_what_would_be_taken_for_something_else_is_asked(case: str, reader: LoadedModel) -> None:
    given, why = REFUSED[case]
    with pytest.raises(InputError, match=why):
        prepare_inputs(reader, given)


def test_item_8_what_the_errors_advise_works(reader: LoadedModel) -> None:
    both = (ids(4, 7), torch.ones(4, 7))
    assert prepare_inputs(reader, both[0]).sequences == 4
    assert prepare_inputs(reader, {"ids": both[0], "scale": both[1]}).sequences == 4
    assert prepare_inputs(reader, [both[0], both[0]]).sequences == 8
    assert prepare_inputs(reader, ids(3, POSITIONS)).sequences == 3


def test_item_4_rows_that_a_table_of_positions_does_not_have() -> None:
    with pytest.raises(InputError, match=r"of shape \(\d, 33\).* 20 \(positions.weight\) rows"):
        prepare_inputs(load(Reader(looked_up=True).eval()), ids(3, 33))


def test_item_4_an_id_that_only_a_late_batch_holds() -> None:
    late = ids(6, 7)
    late[5, 3] = 99
    with pytest.raises(InputError, match="largest id is 99"):
        rs.measure(Reader().eval(), rs.Inputs(late, batch=2), metrics=["relative_residual"])


@pytest.mark.parametrize("text", ["corpus.txt", "/data/corpus", "~/notes.md", "../a.jsonl"])
def test_item_8_a_text_that_looks_like_a_path_is_refused(text: str, bert: LoadedModel) -> None:
    with pytest.raises(InputError, match="looks like the name of a file"):
        prepare_inputs(bert, text)
    with pytest.raises(InputError, match="looks like the name of a file"):
        prepare_inputs(bert, ["a text", text])


def test_item_8_the_name_of_a_file_is_not_its_text(bert: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "two words"
    path.write_text("The cat sat on the mat.")
    with pytest.raises(InputError, match=r"Pass pathlib.Path\("):
        prepare_inputs(bert, str(path))
    assert prepare_inputs(bert, path).sequences == 1
    for text in ("and/or", "Open notes.txt", "1.5 km/h", "Yes."):
        assert prepare_inputs(bert, text).sequences == 1


def test_item_8_sequences_that_were_cut_are_said_in_the_verdict() -> None:
    run = rs.measure("init:tiny-roberta", rs.Inputs(tokens=100_000, sequences=1), metrics=["relative_residual"])
    assert "at most 510 tokens, not 100,000" in run.verdict


def test_item_8_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="head_dim=33"):
        rs.Design(depth=2, width=100, heads=3)
    assert rs.Design(depth=2, width=100, heads=3, head_dim=33).head_dim == 33


@pytest.mark.parametrize("ending", [".npz", ".pt", "repeated.pt"])
def test_few_bytes_that_stand_for_many_are_not_unpacked(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"batch{ending}"
    if ending == "repeated.pt":
        torch.save(torch.zeros(1, dtype=torch.long).expand(2**40), path)
    else:
        monkeypatch.setattr("rankscope.models.inputs.opening.LARGEST_UNPACKED", 2**16)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data/0.npy", bytes(2**20 + 1))
    assert path.stat().st_size < 2**12
    with pytest.raises(InputError, match="unpacks to"):
        rs.measure(Reader(), path)


def test_more_tokens_than_can_be_counted_are_not_drawn() -> None:
    with pytest.raises(InputError, match="at most"):
        rs.measure("init:tiny-bert", rs.Inputs(sequences=10**18, random_tokens=True))


def test_a_batch_in_a_file_is_the_batch(tmp_path: Path) -> None:
    batch = ids(3, 5)
    np.savez_compressed(tmp_path / "batch.npz", ids=batch.numpy())
    torch.save(batch, tmp_path / "batch.pt")
    given: list[Any] = [batch, tmp_path / "batch.npz", tmp_path / "batch.pt"]
    one, other, third = (list(rs.measure(Reader(), each).curve("mu").mean) for each in given)
    assert one == other == third


class Video(nn.Module):
    """Several rows of the inputs, its frames, are one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, frames: int) -> Tensor:
        x = x.flatten(2).mean(-1).reshape(len(x) // frames, frames, DIM)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_batch_of_which_two_rows_are_no_sequences_is_refused() -> None:
    with pytest.raises(InputError, match=r"runs on these 8 sequences, but not on 2 of them.*shape '\[0, 4, 8\]'"):
        rs.measure(Video().eval(), {"x": torch.randn(8, DIM, 3, 3), "frames": 4})


def test_a_model_that_fails_on_the_whole_batch_keeps_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        rs.measure(Video().eval(), {"x": torch.randn(6, DIM, 3, 3), "frames": 4})
