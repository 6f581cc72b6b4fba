"""How much shared text makes two prompts the same float vector?

    python examples/same_vector.py
    python examples/same_vector.py gpt2 cat dog --most 1024

Each prompt is put before the same n tokens, and the two last tokens after the last block are compared bit by bit: once
they are equal, the model cannot answer the prompts differently. n is doubled until they are, and then bisected. Lengths
that were not tried may break the pattern, because rounding is not monotone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.models import prepare_inputs
from rankscope.stream import SiteSelection, trace, undisturbed, view_of


def last_token(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """The last token of a sequence after the last block."""
    (batch,) = prepare_inputs(rs.load(model).loaded, {"input_ids": torch.tensor([list(ids)])})
    found: list[Tensor] = []
    with undisturbed(model):
        view = view_of(model, batch)
        site = SiteSelection.parse([f"block.out@{view.depth - 1}"])
        with trace(view, site, lambda ref, x: found.append(x[0, -1].detach().clone())):
            batch.run(model)
    return found[0]


def shortest_same(vectors_at: Callable[[int], tuple[Tensor, Tensor]], most: int) -> tuple[int | None, dict[int, float]]:
    """The smallest tried n at which two vectors are equal bit by bit, and their relative distance at every tried n."""
    tried: dict[int, float] = {}

    def same(n: int) -> bool:
        one, other = vectors_at(n)
        tried[n] = float((one.double() - other.double()).norm() / one.double().norm())
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    low, high = 0, 1
    while not same(high):
        if high == most:
            return None, tried
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if same(middle) else (middle, high)
    return high, tried


def same_from(
    model: nn.Module, first: Sequence[int], second: Sequence[int], shared: Sequence[int]
) -> tuple[int | None, dict[int, float]]:
    """:func:`shortest_same` for two prompts followed by the same ids."""
    return shortest_same(
        lambda n: (last_token(model, [*first, *shared[:n]]), last_token(model, [*second, *shared[:n]])), len(shared)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="init:tiny-gpt2", help="init:NAME, a hub name or a local folder")
    parser.add_argument("first", nargs="?", default="cat")
    parser.add_argument("second", nargs="?", default="dog")
    parser.add_argument("--text", default="one ", help="shared text, repeated as often as needed")
    parser.add_argument("--most", type=int, default=48, help="largest number of shared tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="folder for the distances, as same_vector.csv")
    arguments = parser.parse_args()
    loaded = rs.load(arguments.model, dtype=arguments.dtype).loaded

    def ids_of(text: str) -> list[int]:
        """Ids of the tokenizer; a network with fresh weights has none, and takes one id per letter."""
        if loaded.tokenizer is None:
            return [ord(letter) % 64 for letter in text]
        return list(loaded.tokenizer.encode(text, add_special_tokens=False))

    first, second, text = (ids_of(word) for word in (arguments.first, arguments.second, arguments.text))
    shared = (text * (arguments.most // len(text) + 1))[: arguments.most]
    found, tried = same_from(loaded.model, first, second, shared)
    for n in sorted(tried):
        print(f"{n:6d} shared tokens: relative distance {tried[n]:.3g}")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        rows = [f"{n},{tried[n]}" for n in sorted(tried)]
        (arguments.out / "same_vector.csv").write_text("\n".join(["shared_tokens,relative_distance", *rows]) + "\n")
    print(f"the same vector from {found} shared tokens on" if found else f"apart up to {arguments.most} shared tokens")


if __name__ == "__main__":
    main()
