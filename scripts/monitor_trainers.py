"""Train a tiny model through the trainers of other libraries under the gauge, and record what it read on each rank.

Each host runs with the gauge and without, in one process and in two (gloo, on the processor), and the final weights are
compared. Nothing is downloaded. Needs the packages of the hosts that are named, which may want different versions of
torch; the output is merged into what is recorded already::

    python scripts/monitor_trainers.py --only trl sentence-transformers
    python scripts/monitor_trainers.py --only olmo-core     # pip install ai2-olmo-core
    python scripts/monitor_trainers.py --only composer      # pip install mosaicml
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rankscope.models.inputs.text import sample_text
from rankscope.monitor import read_record

OUT = Path(__file__).parents[1] / "docs" / "data" / "monitor" / "trainers.json"
STEPS, LAYERS, TOKENS = 6, 3, 16
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
RESIDUAL = "rankscope/relative_residual/least"
Ran = tuple[nn.Module, list[int]]
"""The trained model, and the steps at which the trainer logged a reading."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of the sample text, one id each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

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


def probe_of(known: PreTrainedTokenizerFast, *names: str) -> dict[str, torch.Tensor]:
    """Eight sentences as arguments of a forward pass."""
    probe = known(sentences(8), return_tensors="pt", padding=True)
    return {name: probe[name] for name in names}


def llama(known: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama without trained weights."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(known), max_position_embeddings=32, **SHAPE))


def with_trl(folder: Path, *, watched: bool) -> Ran:
    """``SFTTrainer`` on a Llama."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from rankscope.monitor.hosts.hugging_face import GaugeCallback

    known = tokenizer()
    settings = SFTConfig(
        str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=4, report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, logging_steps=1, max_length=TOKENS,
    )  # fmt: skip
    data = Dataset.from_list([{"text": text} for text in sentences(64)])
    trainer = SFTTrainer(llama(known), settings, train_dataset=data, processing_class=known)
    if watched:
        probe = probe_of(known, "input_ids", "attention_mask")
        GaugeCallback(probe, schedule=2, record=folder / "record", strict=True).attach(trainer)
    trainer.train()
    return trainer.model, [entry["step"] for entry in trainer.state.log_history if RESIDUAL in entry]


def with_sentence_transformers(folder: Path, *, watched: bool) -> Ran:
    """``SentenceTransformerTrainer`` on a BERT."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    from rankscope.monitor.hosts.hugging_face import GaugeCallback

    known = tokenizer()
    BertModel(BertConfig(vocab_size=len(known), max_position_embeddings=32, **SHAPE)).save_pretrained(folder / "bert")
    known.save_pretrained(folder / "bert")
    model = st.SentenceTransformer(str(folder / "bert"), device="cpu")  # adds mean pooling
    settings = st.SentenceTransformerTrainingArguments(
        str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=4, report_to="none", save_strategy="no",
        use_cpu=True, logging_steps=1,
        ddp_find_unused_parameters=True,  # the pooler of a BERT is not part of the loss
    )  # fmt: skip
    texts = sentences(65)
    data = Dataset.from_dict({"anchor": texts[:-1], "positive": texts[1:]})
    loss = MultipleNegativesRankingLoss(model)
    trainer = st.SentenceTransformerTrainer(model, settings, train_dataset=data, loss=loss)
    if watched:
        probe = probe_of(known, "input_ids", "attention_mask")
        GaugeCallback(probe, model="0.model", schedule=2, record=folder / "record", strict=True).attach(trainer)
    trainer.train()
    return model, [entry["step"] for entry in trainer.state.log_history if RESIDUAL in entry]


def with_composer(folder: Path, *, watched: bool) -> Ran:
    """Composer's ``Trainer`` on a Llama."""
    from composer import ComposerModel, Trainer
    from composer.loggers import InMemoryLogger
    from composer.utils import dist
    from torch.utils.data import DataLoader

    from rankscope.monitor.hosts.composer import GaugeCallback

    class Wrapped(ComposerModel):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: dict[str, torch.Tensor]) -> Any:
            return self.net(**batch)

        def loss(self, outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = outputs.loss
            return loss

    known, memory = tokenizer(), InMemoryLogger()
    ids = known(sentences(64), return_tensors="pt", padding=True)["input_ids"]
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    sampler = dist.get_sampler(data, shuffle=False)
    model = Wrapped(llama(known))
    probe = probe_of(known, "input_ids", "attention_mask")
    gauge = GaugeCallback(probe, model="net", schedule=2, record=folder / "record", strict=True)
    trainer = Trainer(
        model=model, train_dataloader=DataLoader(data, batch_size=4, sampler=sampler), max_duration=f"{STEPS}ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3), device="cpu", loggers=memory, progress_bar=False,
        callbacks=[gauge] if watched else [],
    )  # fmt: skip
    trainer.fit()
    logged = [stamp.batch.value for stamp, _ in memory.data.get(RESIDUAL, ())]
    trainer.close()
    return model, logged


def with_olmo_core(folder: Path, *, watched: bool) -> Ran:
    """OLMo-core's ``Trainer`` on its own transformer; FSDP in two processes."""
    import numpy as np
    from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
    from olmo_core.train.callbacks import Callback
    from olmo_core.train.train_module import TransformerTrainModuleConfig
    from olmo_core.train.train_module.transformer import TransformerDataParallelConfig

    from rankscope.monitor.hosts.olmo_core import GaugeCallback

    logged: list[int] = []

    class Logged(Callback):
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            logged.extend([step] if RESIDUAL in metrics else [])

    known, device = tokenizer(), torch.device("cpu")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        prepare_training_environment(seed=0, backend="gloo")
    config = TransformerConfig.llama_like(
        d_model=32, vocab_size=len(known), n_layers=LAYERS, n_heads=2, hidden_size_multiple_of=32
    )
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=4 * TOKENS, max_sequence_length=TOKENS, optim=AdamWConfig(lr=1e-3),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp) if several else None,
    ).build(config.build(init_device="cpu"), device=device)  # fmt: skip
    shared = folder.parent
    (shared / f"tokens-{folder.name}.npy").write_bytes(np.array(known(sample_text())["input_ids"], np.uint16).tobytes())
    names = TokenizerConfig(len(known), eos_token_id=known.eos_token_id, pad_token_id=known.pad_token_id)
    data = NumpyFSLDatasetConfig(
        paths=[str(shared / f"tokens-{folder.name}.npy")], sequence_length=TOKENS, tokenizer=names, work_dir=str(shared)
    ).build()
    size = (2 if several else 1) * 4 * TOKENS
    loader = NumpyDataLoaderConfig(global_batch_size=size, seed=0).build(data, dp_process_group=module.dp_process_group)
    trainer = TrainerConfig(
        save_folder=str(shared / "out"), max_duration=Duration.steps(STEPS), metrics_collect_interval=1, device="cpu",
        no_checkpoints=True, no_evals=True,
    ).build(module, loader)  # fmt: skip
    trainer.add_callback("logged", Logged())
    if watched:
        probe = probe_of(known, "input_ids")
        trainer.add_callback("gauge", GaugeCallback(probe, schedule=2, record=folder / "record", strict=True))
    trainer.fit()
    return module.model, logged


@dataclass(frozen=True)
class Host:
    """A library that trains: its package, what to import before processes are forked, and a training with it."""

    package: str
    module: str
    train: Callable[..., Ran]


HOSTS = {
    "trl": Host("trl", "trl.trainer.sft_trainer", with_trl),
    "sentence-transformers": Host("sentence-transformers", "sentence_transformers", with_sentence_transformers),
    "composer": Host("mosaicml", "composer", with_composer),
    "olmo-core": Host("ai2-olmo-core", "olmo_core.train", with_olmo_core),
}


def weights_of(model: nn.Module) -> str:
    """A hash of all bits."""
    tensors: Iterator[Any] = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in tensors)).hexdigest()


def run_rank(name: str, rank: int, world: int, port: int, folder: Path, *, watched: bool) -> None:
    """One training on one rank, in the environment that ``torchrun`` would make."""
    if world > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "NODE_RANK": 0}
        os.environ.update({key: str(value) for key, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="trainers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    own = folder / str(rank)
    own.mkdir(parents=True)
    model, logged = HOSTS[name].train(own, watched=watched)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    (own / "told.json").write_text(json.dumps({"weights": weights_of(model), "logged": logged, "ranks": ranks}))


def run(name: str, folder: Path, processes: int, *, watched: bool) -> list[dict[str, Any]]:
    """One training in so many processes, forked so that imports are paid once; what each rank told."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    fork = torch.multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run_rank, args=(name, rank, processes, port, folder), kwargs={"watched": watched})
        for rank in range(processes)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * processes, f"{name} failed"
    return [json.loads((folder / str(rank) / "told.json").read_text()) for rank in range(processes)]


def seen(name: str, folder: Path, processes: int) -> dict[str, Any]:
    """Steps and layers that were read on each rank, and whether the weights are those of a run without a gauge."""
    watched = run(name, folder / "watched", processes, watched=True)
    bare = run(name, folder / "bare", processes, watched=False)
    record = read_record(folder / "watched" / "0" / "record")
    assert [one["ranks"] for one in watched] == [processes] * processes, watched
    return {
        "steps": [reading.step for reading in record.readings],
        "layers_read_by_rank": {rank: dict(one["metrics"]) for rank, one in record.facts["status"]["ranks"].items()},
        "not_watched": dict(record.facts["status"]["not_watched"]),
        "readings_with_gradients": sum(bool(reading.values("qk_to_v_gradient")) for reading in record.readings),
        "logged_by_the_trainer": watched[0]["logged"],
        "weights_are_those_without_a_gauge": [one["weights"] for one in watched] == [one["weights"] for one in bare],
    }


def main() -> None:
    """Run the hosts, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=HOSTS, nargs="+", default=tuple(HOSTS))
    parser.add_argument("--processes", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    told = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only:
        versions = {package: version(package) for package in (HOSTS[name].package, "transformers", "torch")}
        importlib.import_module(HOSTS[name].module)
        facts: dict[str, Any] = {"date": date.today().isoformat(), "versions": versions, "processes": {}}
        for processes in options.processes:
            with tempfile.TemporaryDirectory() as folder:
                facts["processes"][str(processes)] = seen(name, Path(folder), processes)
            told[name] = facts
            options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
