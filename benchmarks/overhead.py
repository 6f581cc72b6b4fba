"""The contestants of :mod:`benchmarks.speed`: ways of getting the numbers, each timed next to a bare forward pass."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers

from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
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


class Pairs(NamedTuple):
    """Times of a contestant, and of the bare pass next to each of them."""

    contestant: list[float]
    bare: list[float]

    def ratio(self) -> dict[str, float]:
        """Median of the ratios of neighbours, and their quartiles."""
        ratios = [one / other for one, other in zip(self.contestant, self.bare, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
        return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def contest(contestants: Mapping[str, tuple[Contestant, Contestant]], rounds: int) -> dict[str, Pairs]:
    """Run every contestant next to its own bare pass, before and after it in turns, all once per round.

    A machine drifts within a round: two times that are compared must be neighbours.
    """
    found = {name: Pairs([], []) for name in contestants}
    for run, bare in contestants.values():
        run()
        bare()
    for number in range(rounds):
        for name, (run, bare) in contestants.items():
            both = [(run, found[name].contestant), (bare, found[name].bare)]
            for call, times in both if number % 2 else reversed(both):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
    return found
