"""Train a tiny model through TRL's and sentence-transformers' own trainers under the gauge, and record what it saw.

Needs ``trl``, ``sentence-transformers`` and ``datasets``; nothing is downloaded::

    python scripts/monitor_trainers.py [--only trl] [--out docs/data/monitor/trainers.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rankscope.models.inputs.text import sample_text
from rankscope.monitor import read_record
from rankscope.monitor.hosts.hugging_face import GaugeCallback

OUT = Path(__file__).parents[1] / "docs" / "data" / "monitor" / "trainers.json"
STEPS, LAYERS = 6, 3
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of the sample text, one id each."""
    words = sorted(set(sample_text().split()))
    names = ("[PAD]", "[UNK]", "[EOS]", *words)
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(names)}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", model_max_length=32
    )


def sentences(count: int) -> list[str]:
    """Stretches of twelve words."""
    words = sample_text().split()
    return [" ".join(words[12 * place : 12 * place + 12]) for place in range(count)]


def with_trl(folder: Path) -> dict[str, Any]:
    """``SFTTrainer`` on a Llama."""
    from trl import SFTConfig, SFTTrainer

    known = tokenizer()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(known), max_position_embeddings=32, **SHAPE))
    settings = SFTConfig(
        str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=4, report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, logging_steps=1, max_length=16,
    )  # fmt: skip
    data = Dataset.from_list([{"text": text} for text in sentences(32)])
    trainer = SFTTrainer(model, settings, train_dataset=data, processing_class=known)
    probe = known(sentences(8), return_tensors="pt", padding=True)
    probe.pop("token_type_ids", None)
    GaugeCallback(dict(probe), schedule=2, record=folder / "record", strict=True).attach(trainer)
    trainer.train()
    return seen(folder / "record", trainer.state.log_history)


def with_sentence_transformers(folder: Path) -> dict[str, Any]:
    """``SentenceTransformerTrainer`` on a BERT."""
    import sentence_transformers as st
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    known = tokenizer()
    BertModel(BertConfig(vocab_size=len(known), max_position_embeddings=32, **SHAPE)).save_pretrained(folder / "bert")
    known.save_pretrained(folder / "bert")
    model = st.SentenceTransformer(str(folder / "bert"), device="cpu")  # adds mean pooling
    inner = next(name for name, module in model.named_modules() if isinstance(module, BertModel))
    settings = st.SentenceTransformerTrainingArguments(
        str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=4, report_to="none", save_strategy="no",
        use_cpu=True, logging_steps=1,
    )  # fmt: skip
    texts = sentences(33)
    data = Dataset.from_dict({"anchor": texts[:-1], "positive": texts[1:]})
    loss = MultipleNegativesRankingLoss(model)
    trainer = st.SentenceTransformerTrainer(model, settings, train_dataset=data, loss=loss)
    probe = dict(known(sentences(8), return_tensors="pt", padding=True))
    GaugeCallback(probe, model=inner, schedule=2, record=folder / "record", strict=True).attach(trainer)
    trainer.train()
    return {"model": inner, **seen(folder / "record", trainer.state.log_history)}


def seen(record: Path, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps and layers that were read, and how many readings the trainer itself logged."""
    readings = read_record(record).readings
    layers = {tuple(sorted(reading.values("relative_residual"))) for reading in readings}
    assert layers == {tuple(range(LAYERS))}, layers
    logged = sum("rankscope/relative_residual/least" in entry for entry in history)
    gradients = sum(bool(reading.values("qk_to_v_gradient")) for reading in readings)
    return {
        "steps": [reading.step for reading in readings],
        "layers": list(range(LAYERS)),
        "readings_with_gradients": gradients,
        "logged_by_the_trainer": logged,
    }


HOSTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "trl": with_trl,
    "sentence-transformers": with_sentence_transformers,
}


def main() -> None:
    """Run the hosts, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=HOSTS, nargs="+", default=tuple(HOSTS))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.manual_seed(0)
    told = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            facts = HOSTS[name](Path(folder))
        versions = {package: version(package) for package in (name, "transformers", "torch")}
        told[name] = {"date": date.today().isoformat(), "versions": versions, **facts}
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
