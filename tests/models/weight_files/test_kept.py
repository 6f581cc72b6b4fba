"""Files of equal content are read once, and no stated hash gives wrong bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from rankscope.errors import InputError, LoadError
from rankscope.models.weight_files import kept
from rankscope.models.weight_files.folders import LocalFolder, model_folder
from tests.hub_server import Served, serving
from tests.models.weight_files.test_http import connect, everything, same

SIZES = {"a.safetensors": (300, 40), "b.safetensors": (200, 30)}


def drawn(folder: Path, seed: int, names: tuple[str, ...] = tuple(SIZES)) -> Path:
    """A model of two files; those in ``names`` depend on the seed."""
    folder.mkdir(exist_ok=True)
    for name, shape in SIZES.items():
        generator = torch.Generator().manual_seed(seed if name in names else 0)
        save_file({f"{name[0]}.{k}": torch.randn(shape, generator=generator) for k in range(3)}, folder / name)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A hub with a base model, and a cache of 1 MiB."""
    monkeypatch.setenv("RANKSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(kept.VARIABLE, str(2**-10))
    monkeypatch.setattr(kept, "_hashed_here", set())
    monkeypatch.setattr(kept, "_BETWEEN_SAMPLES", 1 << 12)
    with serving(Served(drawn(tmp_path / "base", 0))) as served:
        connect(monkeypatch, served)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 60.0)  # a retry would send bytes twice
        yield served


def read(hub: Served, folder: Path, **hashes: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """All tensors of a model, the bytes that its server sent, and those that were shared."""
    hub.folder, hub.hashes = folder, {f"{name}.safetensors": stated for name, stated in hashes.items()}
    before = hub.sent
    place = model_folder("hub:tiny")
    found = everything(place)
    assert place.traffic is not None
    assert place.traffic.received == hub.sent - before
    return found, hub.sent - before, place.traffic.described.get("bytes_shared", 0)


def sizes(folder: Path) -> list[int]:
    return [(folder / name).stat().st_size for name in SIZES]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_copy_reads_only_what_its_base_does_not_have(hub: Served, tmp_path: Path) -> None:
    base, copy = tmp_path / "base", drawn(tmp_path / "copy", 1, ("b.safetensors",))
    first, second = read(hub, base), read(hub, copy)
    headers = 2 * (1 << 15)
    assert same(first[0], everything(LocalFolder(base)))
    assert same(second[0], everything(LocalFolder(copy)))
    assert first[1] <= sum(sizes(base)) + headers
    assert second[1] <= sizes(base)[1] + headers + 0.3 * sizes(base)[0], "the shared file is only sampled"
    assert second[2] == 3 * 4 * 300 * 40
    assert read(hub, base)[2] == 3 * 4 * (300 * 40 + 200 * 30), "both files were read before"


def test_a_hash_that_another_model_states_wrongly_does_no_harm(hub: Served, tmp_path: Path) -> None:
    """A model that states the hash of another file, read first: the other model gets its own bits."""
    base, liar = tmp_path / "base", drawn(tmp_path / "liar", 5)
    read(hub, liar, a=sha256(base / "a.safetensors"))
    found, _, shared = read(hub, base)
    assert same(found, everything(LocalFolder(base)))
    assert shared == 0
    assert same(read(hub, base)[0], everything(LocalFolder(base)))


def test_a_model_that_states_a_wrong_hash_gets_its_own_bits_or_is_refused(hub: Served, tmp_path: Path) -> None:
    """The copy states the hash of the base and differs in every number."""
    base, liar = tmp_path / "base", drawn(tmp_path / "liar", 5)
    stated = sha256(base / "a.safetensors")
    read(hub, base)
    # So far the cache has ranges of the base; with the beginning of the other file they are not what the hash says.
    assert same(read(hub, liar, a=stated)[0], everything(LocalFolder(liar)))
    for _ in range(2):
        read(hub, base)
    with pytest.raises(LoadError, match=f"a.safetensors is not the file that its SHA-256 names.*{stated[:12]}"):
        read(hub, liar, a=stated)


def test_a_file_that_was_changed_in_the_cache_is_read_again(
    hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    read(hub, base)
    read(hub, base)
    path = tmp_path / "cache" / "weights" / sha256(base / "a.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr(kept, "_hashed_here", set())  # another process
    assert same(read(hub, base)[0], everything(LocalFolder(base)))


def test_a_range_that_was_changed_in_the_cache_is_not_used(hub: Served, tmp_path: Path) -> None:
    base = tmp_path / "base"
    read(hub, base)
    for part in (tmp_path / "cache" / "weights").glob("*.part"):
        with part.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"?")
    found, _, shared = read(hub, base)
    assert same(found, everything(LocalFolder(base)))
    assert shared == 0


@pytest.mark.parametrize("kept_bytes", [100_000, 250_000])
def test_the_cache_stays_within_its_size(
    hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setenv(kept.VARIABLE, str(kept_bytes / 2**30))
    for seed in range(4):
        model = drawn(tmp_path / f"model-{seed}", seed)
        for _ in range(2):
            assert same(read(hub, model)[0], everything(LocalFolder(model)))
            held = sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache" / "weights").iterdir())
            assert held <= kept_bytes + (1 << 14), "a block of the file system per file"


def test_a_few_ranges_are_read_again_until_the_whole_is_worth_it(hub: Served, tmp_path: Path) -> None:
    """One of three tensors at a time: the whole is made once as much was read as is missing."""
    from rankscope.models.weight_files.folders import stored_tensors

    counts = []
    for _ in range(4):
        place = model_folder("hub:tiny")
        stored = stored_tensors(place)["a.1"]
        found = torch.empty(stored.shape)
        stored.read_into(found)
        assert torch.equal(found, everything(LocalFolder(tmp_path / "base"))["a.1"])
        assert place.traffic is not None
        counts.append(place.traffic.described.get("bytes_shared", 0))
    assert counts[0] == 0
    assert counts[-1] == found.nbytes
    assert 0 < sum(counts) < 4 * found.nbytes


def test_nothing_is_kept_unless_asked(hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.VARIABLE, "lots")
    with pytest.raises(InputError, match="RANKSCOPE_KEEP_GIB='lots' is not a number of GiB"):
        read(hub, tmp_path / "base")
    monkeypatch.delenv(kept.VARIABLE)
    read(hub, tmp_path / "base")
    assert not (tmp_path / "cache").exists()
