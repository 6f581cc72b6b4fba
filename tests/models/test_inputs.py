"""Inputs: rows, masks, policies, sources, and what the model then computes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from rankscope.errors import InputError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.inputs.rows import hash_tokenizer, special_ids
from rankscope.models.inputs.synthetic import chirps, smooth_images
from rankscope.models.inputs.text import sample_text
from rankscope.models.loading import LoadedModel, load

TEXTS = ["The cat sat.", "A much longer sentence about a river, a bridge and a boat."]


@pytest.fixture(scope="module")
def bert() -> LoadedModel:
    return load("init:tiny-bert")


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return load("init:tiny-llama")


def test_padding_is_masked_and_changes_nothing(llama: LoadedModel) -> None:
    """A padded sequence gives, on its own tokens, what it gives alone."""
    prepared = prepare_inputs(llama, TEXTS)
    assert prepared.lengths == (5, 15)
    batch = prepared[0]
    assert batch.keep is not None
    assert batch.inputs["attention_mask"].tolist() == batch.keep.long().tolist()
    assert batch.inputs["use_cache"] is False
    alone = prepare_inputs(llama, TEXTS[0])[0]
    assert alone.keep is None
    assert "attention_mask" not in alone.inputs
    with torch.no_grad():
        together, single = batch.run(llama.model)[0], alone.run(llama.model)[0]
    torch.testing.assert_close(together[0][batch.keep[0]], single[0])


def test_sequences_are_cut_and_batched_in_order(bert: LoadedModel) -> None:
    prepared = prepare_inputs(bert, sequences=5, tokens=16, batch=2)
    assert [(part.first_sequence, part.sequences) for part in prepared] == [(0, 2), (2, 2), (4, 1)]
    assert prepared.sequences == 5
    assert all(part.inputs["input_ids"].shape[1] == 16 for part in prepared)
    whole = prepare_inputs(bert, sequences=5, tokens=16, batch=5)[0].inputs["input_ids"]
    assert torch.equal(torch.cat([part.inputs["input_ids"] for part in prepared]), whole)


def test_the_sample_text_fills_eight_sequences_of_128_and_is_cycled_beyond(bert: LoadedModel) -> None:
    assert prepare_inputs(bert).notes == ()
    longer = prepare_inputs(bert, sequences=40, tokens=128)
    assert "overlap" in longer.notes[0]
    rows = torch.cat([part.inputs["input_ids"] for part in longer])
    assert len({tuple(row.tolist()) for row in rows}) == 40
    assert sample_text().isascii()


def test_policies_leave_out_what_they_say(llama: LoadedModel) -> None:
    kept = {
        policy: prepare_inputs(llama, TEXTS, tokens_policy=policy) for policy in ("content", "no-first", "no-special")
    }  # type: ignore[arg-type]
    assert [kept[policy].lengths for policy in kept] == [(5, 15), (4, 14), (4, 14)]
    ids = kept["no-special"][0].inputs["input_ids"]
    assert ids[0, 0] == 1
    assert not torch.isin(ids[kept["no-special"][0].keep], torch.tensor([0, 1, 2])).any()
    with pytest.raises(InputError, match="leaves no token in sequence 0"):
        prepare_inputs(llama, torch.tensor([[1, 2]]), tokens_policy="no-special")


def test_hashed_words_are_stable_and_never_special(llama: LoadedModel) -> None:
    encoder = hash_tokenizer(llama.config)
    ids = encoder.encode(sample_text())
    assert encoder.encode("River river, RIVER")[0] == encoder.encode("river")[0]
    digest = int.from_bytes(hashlib.blake2b(b"river", digest_size=8).digest(), "big")
    assert encoder.encode("river") == [3 + digest % 97]
    assert not set(ids) & set(encoder.special)
    assert set(ids) <= set(range(100))
    assert encoder.prefix == (1,)
    assert encoder.suffix == ()


def test_random_tokens_are_seeded_and_ordinary(bert: LoadedModel) -> None:
    def ids(seed: int) -> torch.Tensor:
        return prepare_inputs(bert, random_tokens=True, sequences=64, batch=64, seed=seed)[0].inputs["input_ids"]

    assert torch.equal(ids(0), ids(0))
    assert not torch.equal(ids(0), ids(1))
    assert set(ids(0).unique().tolist()) == set(range(1, 100))
    with pytest.raises(InputError, match="random_tokens"):
        prepare_inputs(bert, TEXTS, random_tokens=True)


def test_an_encoder_decoder_reads_its_input_shifted_right() -> None:
    bart = load("init:tiny-bart")
    inputs = prepare_inputs(bart, TEXTS)[0].inputs
    start = special_ids(bart.config)["decoder_start"][0]
    assert inputs["decoder_input_ids"][:, 0].tolist() == [start, start]
    assert torch.equal(inputs["decoder_input_ids"][:, 1:], inputs["input_ids"][:, :-1])
    assert torch.equal(inputs["decoder_attention_mask"], inputs["attention_mask"])


def test_a_text_file_is_one_stream(bert: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text(" ".join(f"word{i}" for i in range(20)), encoding="utf-8")
    prepared = prepare_inputs(bert, path, tokens=8, sequences=8)
    assert prepared.lengths == (8, 8, 4)
    assert prepared.source == "text file story.txt, words hashed to ids"
    assert "fills 3 sequences" in prepared.notes[0]


def test_bad_texts_are_named(bert: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="byte 3 is 0xe9"):
        prepare_inputs(bert, path)
    with pytest.raises(InputError, match="could not be read"):
        prepare_inputs(bert, tmp_path / "none.txt")
    with pytest.raises(InputError, match="Text 1 has no tokens"):
        prepare_inputs(bert, ["good", "  "])
    with pytest.raises(InputError, match="empty"):
        prepare_inputs(bert, [])
    with pytest.raises(InputError, match="tokens=0"):
        prepare_inputs(bert, tokens=0)
    with pytest.raises(InputError, match="no-first"):
        prepare_inputs(bert, tokens_policy="all")  # type: ignore[arg-type]


def test_sequences_longer_than_the_position_table_are_cut_and_it_is_said() -> None:
    roberta = load("init:tiny-roberta")
    prepared = prepare_inputs(roberta, sequences=1, tokens=600)
    assert prepared.caveats == ("Sequences have at most 510 tokens, not 600: this roberta takes no more.",)
    with torch.no_grad():
        assert prepared[0].run(roberta.model)[0].shape[1] == 510


def test_own_tensors_go_through_unchanged(bert: LoadedModel) -> None:
    ids, mask = torch.randint(1, 90, (5, 7)), torch.ones(5, 7, dtype=torch.long)
    mask[4, 5:] = 0
    prepared = prepare_inputs(bert, {"input_ids": ids, "attention_mask": mask}, batch=2)
    assert [part.keep is None for part in prepared] == [True, True, False]
    assert torch.equal(torch.cat([part.inputs["input_ids"] for part in prepared]), ids)
    assert torch.equal(prepare_inputs(bert, ids, batch=8)[0].inputs["input_ids"], ids)
    assert prepare_inputs(bert, ids, sequences=3, batch=2).sequences == 3
    with pytest.raises(InputError, match="disagree"):
        prepare_inputs(bert, {"input_ids": ids, "attention_mask": mask[:2]})


def test_a_module_of_ones_own_takes_positional_tensors_and_lists() -> None:
    module = load(torch.nn.Linear(4, 4))
    data = torch.randn(5, 3, 4)
    with pytest.raises(InputError, match="no tokens act on each other"):
        prepare_inputs(module, data)
    prepared = prepare_inputs(module, data, batch=2, axes="batch tokens")
    torch.testing.assert_close(torch.cat([part.run(module.model) for part in prepared]), module.model(data))
    parts = prepare_inputs(module, [data, {"input": data[:2]}], axes="batch tokens")
    assert [(part.first_sequence, part.sequences) for part in parts] == [(0, 5), (5, 2)]
    torch.testing.assert_close(parts[1].run(module.model), module.model(data[:2]))
    without_first = prepare_inputs(module, data, tokens_policy="no-first", axes="batch tokens")[0].keep
    assert without_first is not None
    assert without_first.tolist() == 5 * [[False, True, True]]
    with pytest.raises(InputError, match="Pass a tensor"):
        prepare_inputs(module)
    with pytest.raises(InputError, match=r"Entry 1 .* int"):
        prepare_inputs(module, [data, 3])


def test_synthetic_images_have_structure_and_depend_on_seed_and_number_only() -> None:
    images = smooth_images(3, 3, 32, 48, seed=0)
    assert images.shape == (3, 3, 32, 48)
    assert torch.equal(images[:2], smooth_images(2, 3, 32, 48, seed=0))
    assert not torch.equal(images[0], images[1])
    neighbours = (images[..., 1:] - images[..., :-1]).square().mean()
    assert neighbours < 0.5  # white noise of unit variance has 2
    torch.testing.assert_close(images.std(dim=(1, 2, 3)), torch.ones(3))
    assert torch.equal(chirps(2, 400, seed=3)[0], chirps(1, 400, seed=3)[0])


def test_images_are_read_at_the_size_and_dtype_of_the_model() -> None:
    vit = load("init:tiny-vit", dtype="bfloat16")
    prepared = prepare_inputs(vit, sequences=3, tokens_policy="no-first")
    assert prepared[0].inputs["pixel_values"].shape == (3, 3, 32, 32)
    assert prepared[0].inputs["pixel_values"].dtype is torch.bfloat16
    assert prepared[0].keep is not None
    assert prepared[0].keep.shape == (3, 17)
    assert prepared[0].keep.sum() == 3 * 16
    with pytest.raises(InputError, match="reads image"):
        prepare_inputs(vit, "text")
    with pytest.raises(InputError, match="about text"):
        prepare_inputs(vit, tokens_policy="no-special")


@pytest.mark.parametrize("tokens", [5, 40])
def test_sounds_have_as_many_frames_as_tokens_asked_for(tokens: int) -> None:
    loaded = load("init:tiny-wav2vec2")
    prepared = prepare_inputs(loaded, sequences=2, tokens=tokens)
    with torch.no_grad():
        assert prepared[0].run(loaded.model)[0].shape[1] == tokens
