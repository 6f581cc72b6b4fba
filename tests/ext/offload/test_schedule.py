"""One block at a time: what is in memory, what is read, and what is left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rankscope.errors import LoadError
from rankscope.ext.offload.meta_model import open_meta_model
from rankscope.ext.offload.schedule import BlockSchedule, plan_schedule
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.models.weight_files.files import LocalFile
from tests.ext.offload.folders import saved


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved("init:tiny-llama", tmp_path / "llama")


def schedule_of(folder: Path) -> BlockSchedule:
    meta_model = open_meta_model(folder)
    prepared = prepare_inputs(meta_model.loaded, None, sequences=4, tokens=12, batch=2)
    return plan_schedule(meta_model, prepared)


def test_one_block_is_present_at_a_time(llama: Path) -> None:
    schedule = schedule_of(llama)
    model, whole = schedule.view.model, load(llama).model.state_dict()
    for stage in schedule.stages(final=True):
        present = {name for name, value in model.named_parameters() if not value.is_meta and name.startswith("layers.")}
        expected = {name for name in whole if name.startswith(f"layers.{stage.number}.")}
        assert present == expected
        assert all(torch.equal(model.get_parameter(name), whole[name]) for name in present)
        assert stage.view.depth == 3
        for part in schedule.prepared:
            with stage.through(part):
                part.run(model)
    assert schedule.tally == {"blocks_read": 3}
    assert all(value.is_meta for name, value in model.named_parameters() if name.startswith("layers."))


def test_only_rows_of_tokens_that_occur_are_read(llama: Path) -> None:
    schedule = schedule_of(llama)
    ids = torch.cat([part.inputs["input_ids"] for part in schedule.prepared])
    table = schedule.view.model.embed_tokens
    whole = load(llama).model.embed_tokens
    assert table.weight.shape[0] == len(ids.unique()) < whole.weight.shape[0]
    assert torch.equal(table(ids), whole(ids))


def go_through(schedule: BlockSchedule) -> None:
    for stage in schedule.stages():
        for part in schedule.prepared:
            with stage.through(part):
                part.run(schedule.view.model)


def test_every_byte_of_a_block_is_read_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    own = LocalFile.read

    def count(file: LocalFile, offset: int, places: Sequence[memoryview]) -> None:
        seen.extend((file.name, byte) for byte in range(offset, offset + sum(map(len, places))))
        own(file, offset, places)

    schedule = schedule_of(llama)
    monkeypatch.setattr(LocalFile, "read", count)
    go_through(schedule)
    slots = [slot for slot in schedule.meta_model.slots.values() if slot.name.startswith("layers.")]
    assert len(seen) == len(set(seen)) == sum(slot.stored.nbytes for slot in slots if slot.stored is not None)


def test_states_go_to_files_that_do_not_stay(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    schedule = replace(schedule_of(llama), in_memory=False)
    for stage in schedule.stages():
        for part in schedule.prepared:
            with stage.through(part):
                part.run(schedule.view.model)
        states = list(tmp_path.glob("rankscope-stream-*/state-*.safetensors"))
        assert len(states) == 2 * (1 if stage.number == 0 else 2)
    assert not list(tmp_path.glob("rankscope-stream-*"))


def test_a_checkpoint_without_a_block_is_refused(llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in llama.glob("*.safetensors"):
        kept = {name: value for name, value in load_file(path).items() if "layers.1.mlp" not in name}
        save_file(kept, path)
    with pytest.raises(LoadError, match=r"no tensor for layers\.1\.mlp"):
        schedule_of(llama)


def test_weights_of_another_shape_are_refused(llama: Path) -> None:
    text = (llama / "config.json").read_text()
    (llama / "config.json").write_text(text.replace('"intermediate_size": 64', '"intermediate_size": 32'))
    assert '"intermediate_size": 32' in (llama / "config.json").read_text()
    with pytest.raises(LoadError, match="has the shape"):
        schedule_of(llama)
