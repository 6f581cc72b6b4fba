"""Reading tensors straight into memory: the same bytes as safetensors gives, and no belief in a damaged header."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rankscope.errors import LoadError
from rankscope.models.weight_files import tensors
from rankscope.models.weight_files.folders import LocalFolder, stored_tensors
from rankscope.models.weight_files.tensors import read_header, read_metadata

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    drawn = {str(dtype): (torch.randn(5, 3) * 4).to(dtype) for dtype in DTYPES}
    drawn |= {"none": torch.empty(0, 7), "one": torch.tensor(2.5)}
    save_file(drawn, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def test_the_bytes_are_those_safetensors_reads(file: Path) -> None:
    theirs = load_file(file)
    ours = read_header(file)
    assert set(ours) == set(theirs)
    assert read_metadata(file) == {"format": "pt"}
    for name, expected in theirs.items():
        place = torch.full_like(expected, 1)
        ours[name].read_into(place)
        assert torch.equal(place, expected), name


@pytest.mark.parametrize("at_once", [1, 4, 15, 100])
def test_formats_are_converted_as_torch_converts_them(
    file: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_CONVERTED_AT_ONCE", at_once)
    place = torch.empty(5, 3, dtype=torch.bfloat16)
    read_header(file)["torch.float32"].read_into(place)
    assert torch.equal(place, load_file(file)["torch.float32"].to(torch.bfloat16))


def test_rows_by_number_in_any_order(file: Path) -> None:
    rows = read_header(file)["torch.float32"].read_rows([4, 0, 4], torch.float64)
    assert torch.equal(rows, load_file(file)["torch.float32"][[4, 0, 4]].double())


def test_an_index_names_the_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "y.safetensors")
    save_file({"a": torch.zeros(9)}, tmp_path / "stale.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    assert {name: entry.shape for name, entry in stored_tensors(LocalFolder(tmp_path)).items()} == {
        "a": (2,),
        "b": (3,),
    }
    index.unlink()
    with pytest.raises(LoadError, match="both contain 'a'"):
        stored_tensors(LocalFolder(tmp_path))


@pytest.mark.parametrize("name", ["../../secret.safetensors", "absent.safetensors", "/etc/hostname"])
def test_an_index_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match="not a file of"):
        stored_tensors(LocalFolder(tmp_path))


def written(path: Path, header: object, data: bytes = bytes(16), length: int | None = None) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "entry",
    [
        {**ENTRY, "shape": [5]},
        {**ENTRY, "shape": [-2, -2]},
        {**ENTRY, "data_offsets": [4, 20]},
        {**ENTRY, "data_offsets": [-4, 12]},
        {**ENTRY, "data_offsets": [16, 0]},
        {**ENTRY, "dtype": "F8_E4M3"},
        {"dtype": "F32"},
        "F32",
        None,
    ],
)
def test_a_header_is_checked_before_it_is_believed(tmp_path: Path, entry: object) -> None:
    with pytest.raises(LoadError, match="'a'"):
        read_header(written(tmp_path / "m.safetensors", {"a": entry}))


@pytest.mark.parametrize("length", [0, 10**6, 2**63])
def test_a_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(LoadError, match="not a safetensors file"):
        read_header(written(tmp_path / "m.safetensors", {"a": ENTRY}, length=length))


def test_a_file_cut_short_meanwhile_is_noticed(file: Path) -> None:
    entry = read_header(file)["torch.float64"]
    file.write_bytes(file.read_bytes()[: entry.offset + 8])
    with pytest.raises(LoadError, match="ended"):
        entry.read_into(torch.empty(5, 3, dtype=torch.float64))


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="hub:NAME"):
        stored_tensors(LocalFolder(tmp_path))
