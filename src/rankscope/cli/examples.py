"""Examples shown below the help of each command. Every line runs as printed in the tests, offline, within seconds."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "measure": (
        "measure init:tiny-bert",
        "measure init:tiny-gpt2 --sequences 4 --tokens 32 --tokens-policy no-first --out run",
        "measure init:tiny-bert --metrics relative_residual,stable_rank --sites block.out,attention.out --json",
        "measure init:tiny-llama --random-tokens --tokens 512 --sequences 1 --attention blockwise",
    ),
    "ablate": (
        "ablate init:tiny-bert --sequences 4 --tokens 32",
        "ablate init:tiny-bert --masks 'own,causal,window(1)' --variants pure,+norm,full --quiet",
    ),
    "decompose": (
        "decompose init:tiny-gpt2 --sequences 2 --tokens 16",
        "decompose init:tiny-bert --through heads --sequences 2 --tokens 16 --out paths",
    ),
    "exact": (
        "exact init:tiny-bert --skip 0 --sequences 1 --tokens 32",
        "exact init:tiny-bert --skip 0 --mlp drop --norm identity --mask causal --sequences 1 --tokens 16",
    ),
    "bound": (
        "bound init:tiny-bert --sequences 1 --tokens 16",
        "bound init:tiny-bert --theorems dong_2021_multi_head --sequences 1 --tokens 16 --quiet",
    ),
    "masks": (
        "masks causal 'causal_window(4) | sink(1)' --tokens 32",
        "masks 'window(3)' --tokens 64 --json",
    ),
    "remedy": ("remedy init:tiny-bert --remedies stronger_skip,pre_norm --sequences 1 --tokens 16 --repeats 0",),
    "predict": (
        "predict tiny-bert --tokens 16 --seeds 1 --most-blocks 4",
        "predict tiny-bert --skip 0 --tokens 16 --seeds 1 --most-blocks 4 --quiet",
    ),
    "reproduce": (
        "reproduce --list",
        "reproduce dong2021-path-census --small --out census",
        "reproduce mechanisms --small --only fourier",
    ),
    "rerun": (
        "measure init:tiny-bert --sequences 2 --tokens 16 --quiet --out run",
        "rerun run",
    ),
    "report": (
        "measure init:tiny-bert --sequences 2 --tokens 16 --quiet --out run",
        "report run -o report.html",
    ),
    "compare": (
        "measure init:tiny-bert --sequences 4 --tokens 16 --seed 0 --quiet --out run_a",
        "measure init:tiny-bert --sequences 4 --tokens 16 --seed 1 --quiet --out run_b",
        "compare run_a run_b --metrics relative_residual",
    ),
    "play": ("play --set skip_gain=0 --set depth=6 --set tokens=16 --write picture.html",),
    "sweep": (
        "sweep example --out plan.yaml",
        "sweep plan.yaml --serial",
        "sweep status plan",
        "sweep atlas plan --out atlas.html",
    ),
    "query": (
        "sweep example --out plan.yaml",
        "sweep plan.yaml --serial --quiet",
        "query plan 'SELECT model, variant, avg(value) AS residual FROM rows GROUP BY ALL ORDER BY ALL'",
    ),
    "doctor": ("doctor init:tiny-bert", "doctor init:tiny-llama --quiet"),
    "ls": ("ls metrics", "ls presets --json"),
    "env": ("env",),
    "selftest": ("selftest",),
}
"""By command, without the name of the program; where one needs a saved run, the line that saves it comes first."""

UNDER_TORCHRUN: Mapping[str, str] = {
    "measure": "torchrun --nproc-per-node 2 -m rankscope measure init:tiny-llama --tokens 16 --batch 2",
    "ablate": "torchrun --nproc-per-node 2 -m rankscope ablate init:tiny-llama --tokens 16 --batch 2",
}
"""Commands that several processes share, as one starts them."""


def epilog(command: str) -> str | None:
    """The examples of a command as the end of its help; the first mark keeps click from joining the lines.

    Example:
        >>> (epilog("env") or "").splitlines()[1:]
        ['Examples:', '  rankscope env']
    """
    lines = EXAMPLES.get(command)
    if lines is None:
        return None
    launched = [f"  {UNDER_TORCHRUN[command]}"] if command in UNDER_TORCHRUN else []
    return "\n".join(["\b", "Examples:", *(f"  rankscope {line}" for line in lines), *launched])


def question(text: str | None) -> str | None:
    """The first sentence of a command's help, which fits the list of commands.

    Example:
        >>> question("Is the paper right? A published figure measured again.")
        'Is the paper right?'
    """
    if not text:
        return None
    ends = [text.index(mark) + 1 for mark in ("? ", ". ") if mark in text]
    return text[: min(ends)] if ends else text
