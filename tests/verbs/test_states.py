"""Hidden states from elsewhere give the values of the model itself, or are refused by name."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import rankscope
from rankscope.cli.app import command_line
from rankscope.errors import InputError, LoadError
from rankscope.linalg.precision import float_floor
from rankscope.metrics import DEFAULT_TOKEN_METRICS
from rankscope.models.pretrained import pretrained_folder
from rankscope.runs.run import Run

METRICS = list(DEFAULT_TOKEN_METRICS)
VLLM = "tokens layers dim"


@contextmanager
def kept(blocks: nn.ModuleList, final: nn.Module | None = None) -> Iterator[dict[str, Tensor]]:
    """The streams of a model, through hooks written by hand."""
    found: dict[str, Tensor] = {}

    def keep(name: str, value: Any) -> None:
        found[name] = (value[0] if isinstance(value, tuple) else value).detach().clone()

    hooks = [blocks[0].register_forward_pre_hook(lambda module, given: keep("block.in@0", given[0]))]
    for number, block in enumerate(blocks):
        hooks.append(block.register_forward_hook(lambda module, given, out, n=number: keep(f"block.out@{n}", out)))
    if final is not None:
        hooks.append(final.register_forward_hook(lambda module, given, out: keep(f"final@{len(blocks) - 1}", out)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def values(run: Run) -> dict[tuple[Any, ...], tuple[bytes, str]]:
    """Value, to the bit, and status of each row."""
    return {
        (row["metric"], row["site"], row["layer"], row["sequence"]): (struct.pack("<d", row["value"]), row["status"])
        for row in run.table.to_pylist()
    }


@pytest.fixture(scope="module")
def gpt2() -> tuple[Run, dict[str, Tensor], Tensor]:
    model = rankscope.load("init:tiny-gpt2").model
    ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    with kept(model.h, model.ln_f) as states, torch.no_grad():
        model(ids)
    return rankscope.measure(model, {"input_ids": ids}, metrics=METRICS), states, ids


def test_states_of_a_dictionary_have_the_values_of_the_model(gpt2) -> None:
    run, states, ids = gpt2
    found = rankscope.judge({**states, "token_ids": ids}, metrics=METRICS)
    assert values(found) == values(run)
    assert found.verdict == run.verdict
    assert found.floor == run.floor
    assert found.provenance.inputs_hash == run.provenance.inputs_hash
    assert rankscope.compare(run, found).paired


@pytest.mark.parametrize("form", ["safetensors", "npz", "compressed"])
def test_states_of_a_file_have_the_values_of_the_model(gpt2, form: str, tmp_path: Path) -> None:
    run, states, _ = gpt2
    path = tmp_path / f"states.{'safetensors' if form == 'safetensors' else 'npz'}"
    if form == "safetensors":
        save_file(states, path)
    else:
        save = np.savez if form == "npz" else np.savez_compressed
        save(path, **{name: value.numpy() for name, value in states.items()})
    found = rankscope.judge(path, metrics=METRICS)
    assert values(found) == values(run)
    assert found.provenance.inputs_hash is None  # nothing says which tokens these are
    assert not rankscope.compare(run, found).paired


@pytest.mark.slow
def test_states_of_minilm_have_the_values_of_the_model() -> None:
    folder = pretrained_folder("minilm")
    if not folder.is_dir():
        pytest.skip("minilm is not in the cache; fetch it with scripts/fetch_pretrained.py")
    model = rankscope.load(folder).model
    ids = torch.randint(1000, 20000, (4, 32), generator=torch.Generator().manual_seed(0))
    with kept(model.encoder.layer) as states, torch.no_grad():
        model(ids)
    run = rankscope.measure(model, {"input_ids": ids}, metrics=METRICS, sites=["block.in@0", "block.out"])
    assert values(rankscope.judge({**states, "token_ids": ids}, metrics=METRICS)) == values(run)


def as_vllm_writes(folder: Path, name: str, states: Tensor, ids: Tensor) -> None:
    """One request: ``hidden_states`` of ``[tokens, layers, width]`` and ``token_ids``."""
    save_file({"hidden_states": states.contiguous(), "token_ids": ids}, folder / f"{name}.safetensors")


def test_a_folder_of_requests_has_one_sequence_per_file(tmp_path: Path) -> None:
    """Requests have different lengths; each must have the values it has alone."""
    random = torch.Generator().manual_seed(1)
    given = {name: torch.randn(n, 4, 16, generator=random) for name, n in (("a", 9), ("b", 30), ("c", 12))}
    for name, states in given.items():
        as_vllm_writes(tmp_path, name, states, torch.arange(states.shape[0]))
    run = rankscope.judge(tmp_path, layout=VLLM)
    assert run.provenance.lengths == (9, 30, 12)
    for number, states in enumerate(given.values()):
        for layer in range(4):
            alone = rankscope.judge(
                {f"layers.{layer}": states[:, layer]}, layout="tokens dim", metrics=["effective_rank"]
            )
            mine = [row["value"] for row in run.select(metric="effective_rank", layer=layer).to_pylist()]
            assert mine[number] == alone.table["value"][0].as_py()
    assert rankscope.judge(tmp_path, rankscope.Inputs(sequences=2), layout=VLLM).provenance.lengths == (9, 30)
    mixed = [str(tmp_path / "c.safetensors"), str(tmp_path / "a.safetensors")]
    assert rankscope.judge(mixed, layout=VLLM).provenance.lengths == (12, 9)


def test_axes_that_could_be_read_two_ways_are_refused() -> None:
    """With as many tokens as layers, swapping them would give other numbers in silence."""
    x = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(2))
    for states in (x, {"hidden_states": x, "token_ids": torch.arange(4)}):
        with pytest.raises(InputError, match="needs its axes declared"):
            rankscope.judge(states)
    one, other = (rankscope.judge(x, layout=f"{order} dim") for order in ("tokens layers", "layers tokens"))
    assert values(one) != values(other)
    assert values(one) == values(rankscope.judge(x.transpose(0, 1), layout="layers tokens dim"))
    with pytest.raises(InputError, match="one array per layer or one per sequence"):
        rankscope.judge([x, x])
    assert rankscope.judge([x, x], layout="batch tokens dim").provenance.sequences == 4
    assert rankscope.judge([x, x], layout="layers tokens dim").provenance.sequences == 2


def test_four_axes_are_read_as_declared() -> None:
    x = torch.randn(2, 7, 3, 8, generator=torch.Generator().manual_seed(2))
    states = {"hidden_states": x, "input_ids": torch.zeros(2, 7, dtype=torch.int32)}
    with pytest.raises(InputError, match="needs its axes declared"):
        rankscope.judge(states)
    run = rankscope.judge(states, layout="batch tokens layers dim")
    assert (run.provenance.sequences, run.provenance.lengths) == (2, (7, 7))
    assert run.curve("relative_residual", "block.out").layers.tolist() == [0, 1, 2]


def test_sites_are_those_of_the_names_or_as_declared() -> None:
    x = {f"model.layers.{number}.out": torch.randn(6, 8) for number in (10, 2)}
    assert rankscope.judge(x, layout="tokens dim").curve("relative_residual", "block.out").layers.tolist() == [2, 10]
    run = rankscope.judge(x, layout="tokens dim", at=["block.in@0", "final@1"])
    assert run.table["site"].unique().to_pylist() == ["block.in", "final"]
    last = rankscope.judge({"layers.0": x["model.layers.10.out"]}, layout="tokens dim")
    expected = last.select(metric="relative_residual")["value"]
    assert run.select(metric="relative_residual", site="final")["value"] == expected
    with pytest.raises(InputError, match="names 3 sites"):
        rankscope.judge(x, at="block.out@0-2")
    with pytest.raises(InputError, match="not a stream site"):
        rankscope.judge(x, at="attention.probs@0-1")


REFUSED = {
    "another name": ({"layers.0": (4, 8), "lm_head": (4, 8)}, "'lm_head' is not the name of a layer"),
    "two numbers": ({"a0.b0": (4, 8), "a1.b1": (4, 8)}, "'a1.b1' is not the name of a layer like 'a0.b0'"),
    "the same block": ({"layers.1": (4, 8), "layers.01": (4, 8)}, "same block"),
    "a site and a number": ({"block.out@0": (4, 8), "layers.1": (4, 8)}, "is not a site such as"),
    "an unknown site": ({"block.end@0": (4, 8)}, "is not a site such as"),
    "other lengths": ({"layers.0": (1, 4, 8), "layers.1": (1, 5, 8)}, "different shapes"),
    "transposed": ({"layers.0": (1, 8, 4), "layers.1": (1, 8, 5)}, "last axis is not the width"),
    "one axis": ({"layers.0": (8,)}, "has shape"),
    "empty": ({"layers.0": (1, 0, 8)}, "is empty"),
    "rows of a matrix": ({"layers.0": (4, 8)}, "4 tokens of one sequence.*layout='batch dim'"),
    "rows of one array": ({"states": (4, 8)}, "4 tokens of one sequence.*layout='batch dim'"),
    "nothing": ({}, "no hidden states"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_clear_is_refused(case: str) -> None:
    shapes, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        rankscope.judge({name: torch.randn(shape) for name, shape in shapes.items()})


def test_requests_of_different_models_are_refused(tmp_path: Path) -> None:
    as_vllm_writes(tmp_path, "a", torch.randn(5, 3, 8), torch.arange(5))
    as_vllm_writes(tmp_path, "b", torch.randn(5, 4, 8), torch.arange(5))
    with pytest.raises(InputError, match="holds 4 layers"):
        rankscope.judge(tmp_path, layout=VLLM)
    as_vllm_writes(tmp_path, "b", torch.randn(5, 3, 9), torch.arange(5))
    with pytest.raises(InputError, match="width 9"):
        rankscope.judge(tmp_path, layout=VLLM)


def test_padding_is_left_out() -> None:
    random = torch.Generator().manual_seed(4)
    short, padded = torch.randn(1, 5, 8, generator=random), torch.randn(2, 9, 8, generator=random)
    padded[0, :5] = short[0]
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, 5:] = 0
    run = rankscope.judge({"layers.0": padded, "attention_mask": mask}, metrics=["relative_residual"])
    alone = rankscope.judge({"layers.0": short}, metrics=["relative_residual"])
    assert run.provenance.lengths == (5, 9)
    assert run.table["value"][0].as_py() == pytest.approx(alone.table["value"][0].as_py(), rel=1e-14)
    fewer = rankscope.judge({"layers.0": padded, "attention_mask": mask}, rankscope.Inputs(tokens_policy="no-first"))
    assert fewer.provenance.lengths == (4, 8)
    with pytest.raises(InputError, match="other values than 0 and 1"):
        rankscope.judge({"layers.0": padded, "attention_mask": 2 * mask})
    with pytest.raises(InputError, match="do not fit 2 sequences of 9 tokens"):
        rankscope.judge({"layers.0": padded, "attention_mask": mask.T})
    with pytest.raises(InputError, match="special tokens"):
        rankscope.judge({"layers.0": padded}, rankscope.Inputs(tokens_policy="no-special"))


def test_bfloat16_saved_as_float32_has_the_bfloat16_floor() -> None:
    random = torch.Generator().manual_seed(5)
    wide = {f"layers.{layer}": torch.randn(6, 16, generator=random) for layer in range(3)}
    rounded = {name: x.to(torch.bfloat16).float() for name, x in wide.items()}
    assert rankscope.judge(rounded, layout="tokens dim").floor["dtype"] == "bfloat16"
    assert rankscope.judge(rounded, layout="tokens dim", computed_in="float32").floor["dtype"] == "float32"
    assert rankscope.judge(wide, layout="tokens dim").floor["dtype"] == "float32"
    assert rankscope.judge(wide, layout="tokens dim", computed_in="bfloat16").floor["relative"] == float_floor(
        torch.bfloat16
    )
    halves = {name: x.to(torch.float16).double() for name, x in wide.items()}
    assert rankscope.judge(halves, layout="tokens dim").floor["dtype"] == "float16"
    # Embeddings that are the rounded weights of a checkpoint do not make a float32 model a bfloat16 one.
    assert rankscope.judge({**wide, "layers.0": rounded["layers.0"]}, layout="tokens dim").floor["dtype"] == "float32"


def test_the_status_of_a_row_follows_the_format_the_model_ran_in() -> None:
    base = torch.ones(6, 16)
    near = base + 1e-3 * torch.randn(6, 16, generator=torch.Generator().manual_seed(6))
    found = {
        dtype: rankscope.judge({"layers.0": near}, layout="tokens dim", computed_in=dtype).code
        for dtype in ("float32", "bfloat16")
    }
    assert found == {"float32": "collapsed", "bfloat16": "floor"}


def test_states_that_are_not_finite_are_called_so() -> None:
    x = torch.randn(6, 16)
    x[2, 3] = torch.nan
    assert rankscope.judge({"layers.0": torch.randn(6, 16), "layers.1": x}, layout="tokens dim").code == "not finite"


class Foreign:
    """An array of another library."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __dlpack__(self, **settings: Any) -> Any:
        return self._x.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()


def test_arrays_of_other_libraries_come_through_dlpack() -> None:
    x = torch.randn(3, 6, 16)
    expected = values(rankscope.judge(x, layout="layers tokens dim"))
    assert values(rankscope.judge(Foreign(x), layout="layers tokens dim")) == expected
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    assert values(rankscope.judge(frozen, layout="layers tokens dim")) == expected
    for odd in (np.zeros((2, 2), dtype=object), np.zeros((2, 2), dtype=complex), "nowhere.pt", 3, None):
        with pytest.raises((InputError, LoadError)):
            rankscope.judge(odd, layout="tokens dim")
    with pytest.raises(InputError, match="hidden states are float64"):
        rankscope.judge({"layers.0": torch.zeros(3, 4, dtype=torch.int64)})


def header(entries: object, data: bytes = b"") -> bytes:
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + data


DAMAGED = {
    "truncated": header({"layers.0": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}, b"\0" * 100),
    "too long": (2**62).to_bytes(8, "little") + b"{}",
    "float8": header({"layers.0": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 4),
    "negative": header({"layers.0": {"dtype": "F32", "shape": [-4, -8], "data_offsets": [0, 128]}}, b"\0" * 128),
    "overflow": header({"layers.0": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}, b"\0" * 8),
    "not JSON": (4).to_bytes(8, "little") + b"oops",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_safetensors_are_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(DAMAGED[case])
    with pytest.raises(InputError):
        rankscope.judge(path)


def npy(array: np.ndarray[Any, Any], **settings: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **settings)
    return stream.getvalue()


def npz(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_damaged_npz_is_refused(tmp_path: Path) -> None:
    good = npy(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
    path = tmp_path / "x.npz"
    assert rankscope.judge(npz(path, {"layers.0.npy": good}), layout="tokens dim").provenance.lengths == (4,)
    cases = {
        "objects": npy(np.array([[{}]], dtype=object), allow_pickle=True),
        "big end": npy(np.zeros((4, 8), dtype=">f4")),
        "truncated": good[:-4],
        "bfloat16": npy(np.zeros((4, 8), dtype=np.int16).view("V2")),
        "no array": b"hello",
        "fields": npy(np.zeros(3, dtype=[("a", "f4")])),
    }
    for content in cases.values():
        for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            with pytest.raises(InputError):
                rankscope.judge(npz(path, {"layers.0.npy": content}, kind))
    raw = npz(path, {"layers.0.npy": good}).read_bytes()
    for cut in range(0, len(raw), 37):
        path.write_bytes(raw[:cut])
        with pytest.raises(InputError):
            rankscope.judge(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"anything")
    with pytest.raises(LoadError, match=r"not a \.safetensors or \.npz"):
        rankscope.judge(tmp_path / "x.pt")
    with pytest.raises(LoadError, match=r"holds no \.safetensors or \.npz"):
        rankscope.judge(tmp_path)
    with pytest.raises(InputError, match="There is no file"):
        rankscope.judge(tmp_path / "nowhere.npz")


def test_measure_takes_a_model_or_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = {"layers.0": torch.randn(1, 4, 8)}
    assert rankscope.judge(x).kind == "measure"
    for name, value in {"tokens": 5, "tokenizer": "x", "padding": torch.zeros(1), "batch": 2, "data": ["a"]}.items():
        with pytest.raises(InputError, match=f"{name} is about running a model"):
            rankscope.judge(x, rankscope.Inputs(**{name: value}))
    with pytest.raises(InputError, match="attention_entropy is measured on attention"):
        rankscope.judge(x, metrics=["attention_entropy"])
    np.savez("states.npz", **{name: value.numpy() for name, value in x.items()})
    for words, said in {
        "init:tiny-bert --states states.npz": "not both",
        "": "Nothing to measure",
        "init:tiny-bert --at block.out@0": "--at says where",
        **{
            f"--states states.npz {option}": "is about running a model"
            for option in (
                "--tokens 5",
                "--offload",
                "--blocks h.*",
                "--batch 2",
                "--device cuda:7",
                "--skip 0",
                "--sites final",
                "--attention-algorithm dense",
            )
        },
    }.items():
        with pytest.raises(InputError, match=said):
            command_line()(["measure", *words.split()], standalone_mode=False)


def test_rows_of_a_matrix_are_tokens_or_inputs_as_declared() -> None:
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    for states in ({"block.out@0": x}, x):
        tokens = rankscope.judge(states, layout="tokens dim")
        assert tokens.provenance.lengths == (7,)
        inputs = rankscope.judge(states, layout="batch dim")
        assert inputs.provenance.lengths == (1,) * 7
        assert values(inputs) == values(rankscope.judge({"block.out@0": x[:, None]}))
        (between,) = inputs.select(metric="relative_residual", site="inputs.mean")["value"].to_pylist()
        wide = x.double()
        assert between == pytest.approx(float((wide - wide.mean(0)).norm() / wide.norm()), rel=1e-6)


def test_a_saved_run_of_states_is_read_again(gpt2, tmp_path: Path) -> None:
    run = rankscope.judge(gpt2[1], null=True, similarity=True)
    again = rankscope.load_run(run.save(tmp_path / "run"))
    assert again.provenance.origin == "states"
    assert again.verdict == run.verdict
    assert "relative_residual" in str(again)
    assert rankscope.report(tmp_path / "run", tmp_path / "report.html").is_file()
