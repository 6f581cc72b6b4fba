"""Files that are not what they seem: refused in words, within a moment, and without filling memory."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.models.loading import load
from tests.faults.conftest import Outcome, Warm

SMALL = ["--sequences", "1", "--tokens", "8", "--quiet"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in several shards."""
    place = tmp_path_factory.mktemp("model") / "sharded"
    load("init:tiny-bert").model.save_pretrained(place, max_shard_size="60KB")
    assert (place / INDEX).is_file()
    return place


def copied(model: Path, place: Path) -> tuple[Path, list[Path]]:
    place.mkdir()
    for path in model.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place, sorted(place.glob("*.safetensors"))


def with_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The same bytes behind another header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = json.dumps(change(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def cut_short(folder: Path, shards: list[Path]) -> None:
    os.truncate(shards[0], shards[0].stat().st_size - 100)


def lying_length(folder: Path, shards: list[Path]) -> None:
    shards[0].write_bytes((2**62).to_bytes(8, "little") + shards[0].read_bytes()[8:])


def huge_header(folder: Path, shards: list[Path]) -> None:
    """A header of 80 MB, which the format allows, all of it blanks, in a sparse file."""
    with shards[0].open("wb") as stream:
        stream.write((80_000_000).to_bytes(8, "little"))
        stream.truncate(80_000_008)


def missing(folder: Path, shards: list[Path]) -> None:
    shards[0].unlink()


def wrong_format(folder: Path, shards: list[Path]) -> None:
    with_header(shards[0], lambda header: {name: {**one, "dtype": "F64"} for name, one in header.items()})


def elsewhere(folder: Path, shards: list[Path]) -> None:
    """The index names a good shard of another folder."""
    shards[0].rename(folder.parent / shards[0].name)
    found = json.loads((folder / INDEX).read_text())
    names = {key: f"../{name}" if name == shards[0].name else name for key, name in found["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({**found, "weight_map": names}))


def linked_to_a_secret(folder: Path, shards: list[Path]) -> None:
    (folder.parent / "secret.txt").write_text("the password is swordfish\n" * 9)
    shards[0].unlink()
    shards[0].symlink_to(folder.parent / "secret.txt")


def linked_to_itself(folder: Path, shards: list[Path]) -> None:
    shards[0].unlink()
    shards[0].symlink_to(shards[0].name)


def pipe(folder: Path, shards: list[Path]) -> None:
    shards[0].unlink()
    os.mkfifo(shards[0])


def nested_index(folder: Path, shards: list[Path]) -> None:
    (folder / INDEX).write_text("[" * 100_000)


def nested_header(folder: Path, shards: list[Path]) -> None:
    text = b'{"a":' * 50_000
    shards[0].write_bytes(len(text).to_bytes(8, "little") + text)


DAMAGE: dict[str, Callable[[Path, list[Path]], None]] = {
    "shard cut short": cut_short,
    "shard whose header length lies": lying_length,
    "shard with a huge header": huge_header,
    "shard missing": missing,
    "shard in another format than its header says": wrong_format,
    "index that names ../": elsewhere,
    "shard that links to a secret": linked_to_a_secret,
    "shard that links to itself": linked_to_itself,
    "shard that is a pipe": pipe,
    "index nested without end": nested_index,
    "header nested without end": nested_header,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", ["whole", "streamed"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_weights_are_refused(warm: Warm, model: Path, tmp_path: Path, name: str, way: str) -> None:
    """100 bytes taken off the end of a safetensors shard."""
    folder, shards = copied(model, tmp_path / "model")
    DAMAGE[name](folder, shards)
    outcome = warm.run(["measure", "model", *SMALL, *(["--offload"] if way == "streamed" else [])], tmp_path)
    assert outcome.explained, outcome
    assert "swordfish" not in outcome.out + outcome.err


def test_links_of_a_hub_cache_are_followed(warm: Warm, model: Path, tmp_path: Path) -> None:
    """Each shard is a link to a file elsewhere, named by its hash."""
    _, shards = copied(model, tmp_path / "model")
    for number, shard in enumerate(shards):
        shard.rename(tmp_path / f"blob{number}")
        shard.symlink_to(tmp_path / f"blob{number}")
    linked = warm.run(["measure", "model", *SMALL[:-1], "--json"], tmp_path)
    plain = warm.run(["measure", str(model), *SMALL[:-1], "--json"], tmp_path)
    assert linked.code == plain.code == 0, linked.err
    assert json.loads(linked.out)["rows"] == json.loads(plain.out)["rows"]


def refused(warm: Warm, words: list[str], folder: Path, *said: str, megabytes: int = 700) -> Outcome:
    """Refused in words, within an address space that leaves room for no bomb."""
    outcome = warm.run(words, folder, "little_memory", megabytes=megabytes)
    assert outcome.explained, outcome
    assert all(word in outcome.err for word in said), outcome.err
    return outcome


def test_a_configuration_that_is_no_file(warm: Warm, model: Path, tmp_path: Path) -> None:
    """A FIFO that nobody writes to, and a link to /dev/zero, in place of config.json."""
    folder, _ = copied(model, tmp_path / "model")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(warm, ["measure", "model"], tmp_path, "config.json")
    refused(warm, ["predict", "model"], tmp_path, "config.json")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    refused(warm, ["measure", "init:model"], tmp_path, "config.json")


def test_text_without_end(warm: Warm, tmp_path: Path) -> None:
    """`--text /dev/zero`, and a sparse file of 1 TiB."""
    with (tmp_path / "long.txt").open("wb") as stream:
        stream.truncate(2**40)
    for name, why in (("/dev/zero", "regular file"), ("long.txt", "268,435,456 bytes")):
        refused(warm, ["measure", "init:tiny-bert", "--text", name], tmp_path, why, megabytes=1500)


def test_odd_texts(warm: Warm, tmp_path: Path) -> None:
    """`--text` names a file of NULs, of bytes that are no UTF-8, an empty one, and a link in a loop."""
    (tmp_path / "nul.txt").write_bytes(b"\0" * 4096)
    (tmp_path / "mixed.txt").write_bytes(b"some words\0and more\0" * 20)
    (tmp_path / "half.txt").write_bytes(b"abc\xff\xfe")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    for name in ("mixed.txt", "nul.txt"):
        assert warm.run(["measure", "init:tiny-bert", *SMALL, "--text", name], tmp_path).code == 0
    for name in ("half.txt", "empty.txt"):
        refused(warm, ["measure", "init:tiny-bert", "--text", name], tmp_path, name)
    loop = warm.run(["measure", "init:tiny-bert", "--text", "loop.txt"], tmp_path)
    assert loop.code == 2
    assert "loop.txt" in loop.err
    assert "Traceback" not in loop.err


@pytest.mark.slow
def test_a_zip_bomb(warm: Warm, tmp_path: Path) -> None:
    """A .npz of 1 MB whose arrays unpack to 1 GiB, and one whose directory lies about that."""
    zeros = bytes(2**20)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("format", "shape"):
            archive.writestr(f"{name}.npy", b"")
        with archive.open("data.npy", "w", force_zip64=True) as entry:
            for _ in range(1024):
                entry.write(zeros)
    raw = (tmp_path / "bomb.npz").read_bytes()
    claimed = (2**30).to_bytes(4, "little")
    (tmp_path / "liar.npz").write_bytes(raw.replace(claimed, (64).to_bytes(4, "little")))
    for name in ("bomb.npz", "liar.npz"):
        refused(warm, ["graph", f"adjacency('{name}')", "--tokens", "4"], tmp_path, name)
