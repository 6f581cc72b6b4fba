"""The two models that are watched, and the task each learns: sorting, at once or one symbol after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2ForTokenClassification, PreTrainedModel

from rankscope.papers.dynamics.arms import Arm, Size
from rankscope.papers.training.networks import encoder_for
from rankscope.papers.training.tasks import IGNORED, Examples, Task, sort_task


def causal_sort_task(seed: int = 0, *, train: int = 1000, held: int = 200) -> Task:
    """Sort as a causal model can: read the sequence and a mark, then say the sorted symbols one after the other.

    The tokens are the sequence, the mark, and all sorted symbols but the last; from the mark on, each token is answered
    with the next sorted symbol, given those before it.

    Example:
        >>> task = causal_sort_task(0, train=2, held=1)
        >>> task.tokens, int((task.train.labels[0] >= 0).sum())
        (16, 8)
    """
    task = sort_task(seed, train=train, held=held, fresh=True)

    def spoken(examples: Examples) -> Examples:
        ids, labels = examples.inputs["input_ids"], examples.labels
        mark = torch.full_like(ids[:, :1], task.vocabulary)
        silent = torch.full_like(labels, IGNORED)
        return Examples(
            {"input_ids": torch.cat([ids, mark, labels[:, :-1]], dim=1)}, torch.cat([silent, labels], dim=1)
        )

    tokens = 2 * task.tokens
    return Task(
        "causal sort",
        seed,
        spoken(task.train),
        spoken(task.held),
        task.classes,
        tokens,
        task.vocabulary + 1,
        positions=True,
    )


def task_for(arm: Arm, size: Size, seed: int) -> Task:
    """What the network learns."""
    if arm.family == "causal":
        return causal_sort_task(seed, train=size.learnt, held=size.held)
    return sort_task(seed, train=size.learnt, held=size.held, fresh=True)


def network_for(arm: Arm, size: Size, task: Task, seed: int) -> PreTrainedModel:
    """The network before training, whole: what is cut is cut by ``operate``."""
    if arm.family == "causal":
        return decoder_for(task, layers=arm.depth, heads=size.heads, width=size.width, std=size.std, seed=seed)
    return encoder_for(
        task,
        layers=arm.depth,
        heads=size.heads,
        width=size.width,
        mlp_width=4 * size.width,
        std=size.std,
        seed=seed,
    )


def decoder_for(task: Task, *, layers: int, heads: int, width: int, std: float, seed: int) -> PreTrainedModel:
    """A GPT-2 that answers every token, drawn from ``seed``; the random state of the caller is left alone."""
    config = GPT2Config(
        vocab_size=task.vocabulary,
        n_positions=task.tokens,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        classifier_dropout=0.0,
        num_labels=task.classes,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2ForTokenClassification(config)
    return model.train()


def probe_of(task: Task, sequences: int) -> Tensor:
    """Sequences that are held out, as ids."""
    return task.held.inputs["input_ids"][:sequences]
