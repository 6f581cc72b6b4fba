"""Batches of token ids for text models: from texts, a file, the built-in sample, or at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from rankscope.errors import InputError
from rankscope.models.inputs.given import (
    batches_from_mapping,
    completed,
    on_device,
    refuse_ids_without_embedding,
)
from rankscope.models.inputs.record import InputPlan, Prepared
from rankscope.models.inputs.rows import (
    TextEncoder,
    TokenRows,
    all_or_some,
    kept_tokens,
    ordinary_ids,
    random_rows,
    read_text,
    rows_from_cycle,
    rows_from_stream,
    rows_from_texts,
    special_ids,
    text_encoder,
)
from rankscope.models.loading import LoadedModel


def sample_text() -> str:
    r"""The built-in sample: ten paragraphs about everyday subjects, separated by blank lines.

    Example:
        >>> len(sample_text().split("\n\n"))
        10
    """
    return files("rankscope.models.inputs").joinpath("sample_text.txt").read_text(encoding="utf-8").strip()


_MOSTLY_UNKNOWN = 0.5
_HASHED = "No tokenizer: words were hashed to token ids."


def prepare_text(
    loaded: LoadedModel, config: Any, given: str | Path | Sequence[str] | None, plan: InputPlan
) -> Prepared:
    """Batches of ids, padded on the right, with an attention mask if anything was padded."""
    tokenizer = loaded.tokenizer if plan.tokenizer is None else plan.tokenizer
    encoder = text_encoder(config, tokenizer)
    notes: list[str] = []
    caveats: list[str] = []
    limit = loaded.positions
    if limit is not None and plan.tokens > limit:
        caveats.append(
            f"Sequences have at most {limit} tokens, not {plan.tokens:,}: this {config.model_type} takes no more."
        )
        plan = replace(plan, tokens=limit)
    if plan.random_tokens and given is not None:
        raise InputError("random_tokens=True takes no texts; leave one of the two out.")
    rows, source = (
        _random(config, encoder, plan) if plan.random_tokens else _read(config, encoder, given, plan, notes, caveats)
    )
    if tokenizer is None and not plan.random_tokens:
        source += ", words hashed to ids"
        if given is not None or loaded.origin != "init":  # with random embeddings all ids are equivalent
            caveats.append(_HASHED)
    unknown = 0.0 if encoder.unknown is None else float((rows.ids == encoder.unknown)[rows.content].double().mean())
    if unknown > _MOSTLY_UNKNOWN:
        words = f"The tokenizer does not know {unknown:.0%} of the tokens of {'this' if given else 'the sample'} text"
        if given is None:
            rows, source = _random(config, encoder, plan)
            words += ": random tokens were used instead"
        caveats.append(f"{words}.")
    prepared = _batched(loaded, rows, encoder, source, plan, notes)
    return replace(prepared, caveats=tuple(caveats), tokenizer=tokenizer)


def _read(
    config: Any, encoder: TextEncoder, given: Any, plan: InputPlan, notes: list[str], caveats: list[str]
) -> tuple[TokenRows, str]:
    """Ids of the texts, the file or the sample; remarks are appended to ``notes`` and ``caveats``."""
    pad = special_ids(config).get("pad", (0,))[0]
    if given is None:
        rows, repeated = rows_from_cycle(sample_text(), encoder, plan.wanted, plan.tokens, pad)
        if repeated:
            notes.append("the sample text is too short for them: sequences overlap, each from another start")
        return rows, "built-in sample text"
    if isinstance(given, Path):
        rows, whole = rows_from_stream(read_text(given), encoder, plan.wanted, plan.tokens, pad)
        read = int(rows.content.sum()) - len(rows.ids) * (len(encoder.prefix) + len(encoder.suffix))
        if read < whole:
            caveats.append(f"Of {given.name} only the first {read:,} of {whole:,} tokens were read.")
        if plan.sequences is not None and len(rows.ids) < plan.sequences:
            notes.append(f"{given.name} fills {len(rows.ids)} sequences of {plan.tokens} tokens, not {plan.sequences}")
        return rows, f"text file {given.name}"
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise InputError("The list of texts is empty; pass at least one, or None for the built-in sample.")
    rows, longer = rows_from_texts(texts[: plan.sequences], encoder, plan.tokens, pad)
    count = len(rows.ids)
    if longer:
        caveats.append(f"{longer} of {count} texts {'was' if longer == 1 else 'were'} cut at {plan.tokens} tokens.")
    of = f" of {len(texts)}" if count < len(texts) else ""
    return rows, f"{count}{of} {'text' if len(texts) == 1 else 'texts'} given by the caller"


def _random(config: Any, encoder: TextEncoder, plan: InputPlan) -> tuple[TokenRows, str]:
    special = encoder.special.union(*special_ids(config).values())
    rows = random_rows(ordinary_ids(config, special), plan.wanted, plan.tokens, plan.seed)
    return rows, f"random tokens, seed {plan.seed}"


def _batched(
    loaded: LoadedModel, rows: TokenRows, encoder: TextEncoder, source: str, plan: InputPlan, notes: list[str]
) -> Prepared:
    refuse_ids_without_embedding(loaded.embeddings, rows.ids)
    keep = kept_tokens(rows, plan.policy, encoder.special)
    inputs: dict[str, Any] = {"input_ids": rows.ids}
    if not bool(rows.content.all()):
        if "attention_mask" in loaded.arguments:
            inputs["attention_mask"] = rows.content.long()
        else:
            notes.append("this model takes no attention mask: it reads the padding, which is not measured")
    parts = batches_from_mapping(completed(loaded, inputs), plan.batch)
    ends = [(part.first_sequence, part.first_sequence + part.sequences) for part in parts]
    kept = [replace(part, keep=all_or_some(keep[a:b])) for part, (a, b) in zip(parts, ends, strict=True)]
    lengths = tuple(int(length) for length in keep.sum(dim=1))
    return Prepared(on_device(kept, loaded.inputs_device), source, lengths, plan.policy, tuple(notes))
