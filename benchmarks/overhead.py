"""What measuring costs: each way of getting the numbers, as a ratio to the bare forward pass.

Every round runs every contestant once, interleaved, in one process; the ratio is of medians over the rounds.
Peers that are not installed are left out. Run it with::

    python -m benchmarks.overhead --rounds 15
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import tokenizers
import torch
import transformers

from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS, METRICS, NORM_METRICS
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import view_of
from rankscope.verbs.reader import SiteReader

Contestant = Callable[[], object]


def bert_base(sequences: int, tokens: int) -> tuple[torch.nn.Module, Batch]:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.BertConfig()).eval()
    ids = torch.randint(1000, 30000, (sequences, tokens))
    return model, Batch({"input_ids": ids}, None, 0, sequences)


def rankscope_pass(view: ModelView, batch: Batch, metrics: tuple[str, ...], sites: tuple[str, ...]) -> Contestant:
    specs = [METRICS[name] for name in metrics]
    selection = SiteSelection.parse(sites)

    def run() -> object:
        writer = RowWriter()
        reader = SiteReader(specs, "content", writer)
        reader.start(batch)
        with trace(view, selection, reader):
            batch.run(view.model)
        return writer.table()

    return run


def hidden_states_and_svd(model: torch.nn.Module, ids: torch.Tensor) -> Contestant:
    def run() -> object:
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        return [torch.linalg.svdvals(state) for state in states[1:]]

    return run


def transformer_lens(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Contestant]:
    """TransformerLens wraps a checkpoint with its head, which is part of its bare forward."""
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        return {}
    is_bert = model.config.model_type == "bert"
    with tempfile.TemporaryDirectory() as folder:
        auto = transformers.AutoModelForMaskedLM if is_bert else transformers.AutoModelForCausalLM
        whole = auto.from_config(model.config)
        whole.base_model.load_state_dict(model.state_dict(), strict=False)
        whole.save_pretrained(folder)
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(model.config.vocab_size - 5))]
        vocabulary = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(vocabulary), unk_token="[UNK]", pad_token="[PAD]", bos_token="[CLS]",
            eos_token="[SEP]",
        ).save_pretrained(folder)  # fmt: skip
        bridge = TransformerBridge.boot_transformers(folder, device="cpu")

    def with_svd() -> object:
        cache = bridge.run_with_cache(ids)[1]
        return [torch.linalg.svdvals(cache[f"blocks.{layer}.hook_out"]) for layer in range(len(bridge.blocks))]

    return {
        "TransformerLens bare (with its LM head)": lambda: bridge(ids),
        "TransformerLens run_with_cache": lambda: bridge.run_with_cache(ids),
        "TransformerLens run_with_cache + svdvals": with_svd,
    }


def nnsight(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Contestant]:
    try:
        from nnsight import NNsight
    except ImportError:
        return {}
    wrapped = NNsight(model)
    layers = wrapped.encoder.layer if model.config.model_type == "bert" else wrapped.layers

    def run() -> object:
        saved: list[Any] = []
        with wrapped.trace(input_ids=ids):
            for layer in layers:
                saved.append(layer.output.save())  # noqa: PERF401 (traced line by line)
        return [torch.linalg.svdvals(s[0] if isinstance(s, tuple) else s) for s in saved]

    return {"nnsight saved blocks + svdvals": run}


def contest(contestants: dict[str, Contestant], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    model, batch = bert_base(args.sequences, args.tokens)
    ids = batch.inputs["input_ids"]
    with torch.no_grad():
        view = view_of(model, batch)
        everything = (*DEFAULT_TOKEN_METRICS, *DEFAULT_ATTENTION_METRICS)
        contestants: dict[str, Contestant] = {
            "bare forward": lambda: batch.run(model),
            "rankscope, norm metrics at block.out": rankscope_pass(view, batch, NORM_METRICS, ("block.out",)),
            "rankscope, token battery at block.out": rankscope_pass(view, batch, DEFAULT_TOKEN_METRICS, ("block.out",)),
            "rankscope, battery + attention": rankscope_pass(view, batch, everything, ("block.out", "attention.probs")),
            "transformers output_hidden_states + svdvals": hidden_states_and_svd(model, ids),
        }
        if args.peers:
            contestants |= nnsight(model, ids) | transformer_lens(model, ids)
        times = contest(contestants, args.rounds)
    bare = statistics.median(times["bare forward"])
    print(f"BERT-base, {args.sequences} x {args.tokens} tokens, float32, {torch.get_num_threads()} threads, ", end="")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, median of {args.rounds}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:45s} {median * 1e3:8.0f} ms   {median / bare:5.2f} x bare")


if __name__ == "__main__":
    main()
