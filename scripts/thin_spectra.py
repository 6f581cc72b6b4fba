"""How often the intervals of estimated ranks contain the exact value.

Half of the matrices are real activations (SmolLM2-135M and MiniLM, from the cache of ``scripts/fetch_pretrained.py``,
on the text of this documentation), half are synthetic; in both, tokens are collapsed, shifted, rounded to bfloat16, or
given a huge token or channel at random. A case is one metric of one matrix. The
constants of ``rankscope.linalg.thin_spectrum`` were chosen on other matrices (those of its tests, and whole layers of
the same models), before this was run. Run it with::

    python scripts/thin_spectra.py --matrices 250 --out thin_spectra.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import DEFAULT_TOKEN_METRICS, METRICS, evaluate
from rankscope.models.pretrained import pretrained_folder

SPECS = [METRICS[name] for name in DEFAULT_TOKEN_METRICS if METRICS[name].estimate is not None]
CHANGES = ("none", "collapse", "offset", "token", "channel", "bfloat16")
SPECTRA = ("power", "exponential", "gaussian", "low rank", "clusters")
DOCS = Path(__file__).parents[1] / "docs"


def activations(name: str, tokens: int) -> Tensor:
    """Stream after every block, ``(layers, tokens, dim)``."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(pretrained_folder(name))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    length = min(tokens, 512 if name == "minilm" else 2048)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0][:tokens]
    with torch.no_grad():
        states = model(input_ids=ids.reshape(-1, length), output_hidden_states=True).hidden_states
    return torch.stack([state.flatten(0, 1) for state in states[1:]])


def uniform(low: float, high: float, generator: torch.Generator) -> float:
    """A random number of an interval."""
    return low + (high - low) * torch.rand((), generator=generator).item()


def one_of(words: tuple[str, ...], generator: torch.Generator) -> str:
    """A random word."""
    return words[int(torch.randint(len(words), (), generator=generator))]


def synthetic(generator: torch.Generator) -> tuple[str, Tensor]:
    """Tokens with a spectrum of a random family."""
    n, d = (int(uniform(140, 500, generator)) for _ in range(2))
    side = min(n, d)
    kind = one_of(SPECTRA, generator)
    left, right = torch.randn(n, side, generator=generator), torch.randn(side, d, generator=generator)
    number = torch.arange(1, side + 1)
    if kind == "power":
        return kind, (left * number ** -uniform(0.0, 3.0, generator)) @ right
    if kind == "exponential":
        return kind, (left * torch.exp(-number / uniform(2.0, side, generator))) @ right
    noise = 10 ** uniform(-6.0, 0.0, generator) * torch.randn(n, d, generator=generator)
    if kind == "low rank":
        rank = int(uniform(1, 50, generator))
        return kind, left[:, :rank] @ right[:rank] + noise
    if kind == "clusters":
        centres = torch.randn(int(uniform(2, 40, generator)), d, generator=generator)
        return kind, centres[torch.randint(len(centres), (n,), generator=generator)] + noise
    return kind, torch.randn(n, d, generator=generator)


def changed(x: Tensor, generator: torch.Generator) -> tuple[str, Tensor]:
    """Tokens after one random change."""
    kind = one_of(CHANGES, generator)
    if kind == "collapse":
        mean = x.mean(0) + x.std() * torch.randn(x.shape[1], generator=generator)
        x = mean + 10 ** uniform(-6.0, 0.0, generator) * (x - x.mean(0))
    elif kind == "offset":
        x = x + 10 ** uniform(-1.0, 4.0, generator) * x.std() * torch.randn(x.shape[1], generator=generator)
    elif kind == "token":
        x[int(uniform(0, len(x), generator))] *= 10 ** uniform(0.0, 4.0, generator)
    elif kind == "channel":
        x[:, int(uniform(0, x.shape[1], generator))] *= 10 ** uniform(0.0, 4.0, generator)
    return kind, x.bfloat16() if kind == "bfloat16" else x


def case(number: int, real: dict[str, Tensor]) -> tuple[str, Tensor]:
    """A name and tokens."""
    generator = torch.Generator().manual_seed(1_000_003 + number)
    if number % 2:
        kind, x = synthetic(generator)
    else:
        kind = one_of(tuple(real), generator)
        layers, most, dim = real[kind].shape
        x = real[kind][int(uniform(0, layers, generator))]
        size = int(uniform(140, min(most, 1200), generator))
        start = int(uniform(0, most - size, generator))
        x = x[start : start + size] if number % 4 < 2 else x[torch.randperm(most, generator=generator)[:size]]
        width = int(uniform(dim / 2, dim + 1, generator))
        x = x[:, torch.randperm(dim, generator=generator)[:width]].clone()
    change, x = changed(x, generator)
    return f"{kind}, {change}", x


Ratios = dict[str, list[tuple[str, float, float, float]]]


def summary(found: Ratios) -> dict[str, object]:
    """Coverage and error of each metric."""
    table: dict[str, object] = {}
    for metric, rows in found.items():
        ratios = torch.tensor([row[1:] for row in rows], dtype=torch.float64)
        outside = [row for row in rows if not row[2] <= 1.0 <= row[3]]
        table[metric] = {
            "cases": len(rows),
            "outside": [[row[0], *(round(end, 7) for end in row[1:])] for row in outside],
            "rms_error": ratios[:, 0].sub(1).square().mean().sqrt().item(),
            "median_interval": ratios[:, 1:].median(0).values.tolist(),
        }
    return table


def main() -> None:
    """Write the coverage, after every tenth matrix what is known so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrices", type=int, default=250)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    real = {name: activations(name, 4096) for name in ("minilm", "smollm2-135m")}
    found: Ratios = {spec.name: [] for spec in SPECS}
    for number in range(args.matrices):
        name, x = case(number, real)
        floor = float_floor(x.dtype)
        exact = evaluate(SPECS, Tokens(x), floor).values
        estimate = evaluate(SPECS, Tokens(x, spectra="estimated"), floor)
        assert estimate.interval is not None
        for row, spec in enumerate(SPECS):
            true = exact[row].item()
            if math.isfinite(true):
                ends = [estimate.values[row].item(), *(end[row].item() for end in estimate.interval)]
                found[spec.name].append((name, ends[0] / true, ends[1] / true, ends[2] / true))
        if number % 10 == 9 or number == args.matrices - 1:
            date = datetime.date.today().isoformat()
            facts = {"date": date, "torch": torch.__version__, "matrices": number + 1}
            args.out.write_text(json.dumps({**facts, "metrics": summary(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
