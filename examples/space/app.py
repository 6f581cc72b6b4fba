"""Watch tokens collapse: build a small transformer and follow its tokens, block by block.

A Gradio page on the public API of rankscope. Run it on your own machine with ``python app.py``, or copy this folder
to a public space. It stores nothing; every value a visitor sends is checked on the server, two simulations run at a
time, and at most 64 requests wait.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import rankscope as rs
from rankscope.masks import parse_mask
from rankscope.remedies import REMEDIES

NO_REMEDY = "none"
RANGES: dict[str, tuple[float, float]] = {
    "depth": (1, 48),
    "tokens": (2, 128),
    "skip_gain": (-1.0, 2.0),
    "weight_scale": (0.1, 3.0),
    "seed": (0, 2**31 - 1),
}
"""Smallest and largest value of each number."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "width": (16, 32, 64, 96, 128),
    "heads": (1, 2, 4, 8, 16),
    "mlp": ("none", "gelu", "relu"),
    "norm": ("layernorm", "rmsnorm", "none"),
    "norm_place": ("pre", "post"),
    "mask": ("complete", "causal", "window(4)", "causal_window(4)"),
    "remedy": (NO_REMEDY, *REMEDIES),
}
"""What can be picked from a list."""
WHOLE = ("depth", "tokens", "width", "heads", "seed")
MOST_SCORES = 3_200_000
"""Most attention scores of one run (blocks x heads x tokens x tokens): determines the time of an answer."""
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOORS = {name: 4 * torch.finfo(dtype).eps for name, dtype in FORMATS.items()}
COLOURS = {"exact": "#0072b2", "remedy": "#009e73", "float32": "#d55e00", "bfloat16": "#e69f00"}
FAR_BELOW = -40.0
"""log10 below which the exponent itself is drawn on a logarithmic scale."""
RESIDUAL = "log10_relative_residual"
AT_ONCE, WAITING = 2, 64


@dataclass(frozen=True)
class Choices:
    """One network; everything is checked when it is made.

    Raises:
        ValueError: a value is outside its range or list, or the network is too large; the message says what is allowed.
    """

    skip_gain: float = 1.0
    mlp: str = "gelu"
    mask: str = "complete"
    norm: str = "layernorm"
    norm_place: str = "post"
    remedy: str = NO_REMEDY
    depth: int = 12
    tokens: int = 32
    width: int = 64
    heads: int = 4
    weight_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ValueError(f"{name} has to be a number from {low:g} to {high:g}.")
        for name, options in OPTIONS.items():
            if getattr(self, name) not in options:
                raise ValueError(f"{name} has to be one of {', '.join(map(str, options))}.")
        for name in WHOLE:
            if getattr(self, name) != int(getattr(self, name)):
                raise ValueError(f"{name} has to be a whole number.")
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.width % self.heads:
            raise ValueError("The width has to be a multiple of the number of heads.")
        if self.depth * self.heads * self.tokens**2 > MOST_SCORES:
            raise ValueError(f"Too large: blocks x heads x tokens x tokens may be at most {MOST_SCORES:,}.")


SCENES = {
    "Attention alone": Choices(skip_gain=0.0, mlp="none", norm="none"),
    "Attention alone, causal": Choices(skip_gain=0.0, mlp="none", norm="none", mask="causal"),
    "Attention and skips": Choices(mlp="none", norm="none"),
    "No skips": Choices(skip_gain=0.0),
    "Post-norm (BERT)": Choices(),
    "Pre-norm (GPT)": Choices(norm_place="pre", mask="causal"),
    "Rescued by a remedy": Choices(skip_gain=0.0, remedy="value_skipinit"),
}
NAMES = tuple(field.name for field in fields(Choices))


class Attention(nn.Module):
    """Softmax attention under a mask."""

    def __init__(self, chosen: Choices) -> None:
        super().__init__()
        self.heads = chosen.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(chosen.width, chosen.width, bias=False) for _ in range(4)
        )
        self.register_buffer("visible", parse_mask(chosen.mask).dense(chosen.tokens), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~self.visible, -torch.inf).softmax(dim=-1)
        return self.out((weights @ value).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and, unless there is none, an MLP, each with its skip and its norm."""

    def __init__(self, chosen: Choices) -> None:
        super().__init__()
        width, self.pre = chosen.width, chosen.norm_place == "pre"
        norms = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
        make = norms.get(chosen.norm)
        self.norm1, self.norm2 = (
            nn.Identity() if make is None else make(width, elementwise_affine=False) for _ in range(2)
        )
        self.attention = Attention(chosen)
        self.mlp = None
        if chosen.mlp != "none":
            between = nn.GELU() if chosen.mlp == "gelu" else nn.ReLU()
            up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            self.mlp = nn.Sequential(up, between, down)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block. The skips are plain; their gain is applied as surgery."""
        if self.pre:
            x = x + self.attention(self.norm1(x))
            return x if self.mlp is None else x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return x if self.mlp is None else self.norm2(x + self.mlp(x))


class Transformer(nn.Module):
    """A stack of blocks whose inputs are vectors; weights have variance scale^2 / inputs."""

    def __init__(self, chosen: Choices) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(chosen) for _ in range(chosen.depth))
        self.double().requires_grad_(False)
        generator = torch.Generator().manual_seed(chosen.seed)
        for weight in self.parameters():
            weight.normal_(std=chosen.weight_scale * weight.shape[1] ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Picture:
    """What is shown for one network.

    Attributes:
        chosen: the network.
        exact: log10 of the relative residual after each block, in exact arithmetic.
        order: of each block: 3 cubes a small difference between tokens, 1 multiplies it, 0 keeps it away from zero.
        floats: log10 of the relative residual as float formats show it, by format.
        remedied: the same in float64, under the remedy; None without one.
        states: tokens before the first block and after each, in float64: (blocks + 1, tokens, width).
        words: the verdict, and why a remedy was refused.
    """

    chosen: Choices
    exact: np.ndarray
    order: np.ndarray
    floats: dict[str, np.ndarray]
    remedied: np.ndarray | None
    states: np.ndarray
    words: tuple[str, ...]


def given(tokens: Tensor) -> rs.Inputs:
    """The tokens as inputs of a verb."""
    return rs.Inputs(tokens, padding="none", axes="batch tokens")


def logarithms(values: np.ndarray) -> np.ndarray:
    """Decimal logarithms; minus infinity where tokens are equal."""
    with np.errstate(divide="ignore"):
        return np.log10(values)


def exactly(model: nn.Module, tokens: Tensor) -> tuple[np.ndarray, np.ndarray, str]:
    """log10 of the relative residual and order of every block in exact arithmetic, and the verdict."""
    run = rs.exact(model, given(tokens), plain=False)
    residual, order = (
        np.array(run.select(metric=name, site="block.out", arithmetic="exact")["value"].to_pylist(), dtype=float)
        for name in (RESIDUAL, "order")
    )
    return residual, order, run.verdict


@lru_cache(maxsize=128)
def simulate(chosen: Choices) -> Picture:
    """Follow the tokens of a network in exact arithmetic, in float formats, and under a remedy."""
    model = Transformer(chosen)
    generator = torch.Generator().manual_seed(chosen.seed + 1)
    tokens = torch.randn(1, chosen.tokens, chosen.width, dtype=torch.float64, generator=generator)
    words, remedied = [], None
    with rs.operate(model, {"skip": chosen.skip_gain}, inputs=given(tokens)):
        exact, order, verdict = exactly(model, tokens)
        words.append(verdict)
        states = [tokens]
        handles = [block.register_forward_hook(lambda module, args, out: states.append(out)) for block in model.blocks]
        model(tokens)
        for handle in handles:
            handle.remove()
    if chosen.remedy != NO_REMEDY:
        try:
            run = rs.remedy(model, given(tokens), {"skip": chosen.skip_gain}, remedies=[chosen.remedy], gradients=False)
            remedied = logarithms(run.curve("relative_residual", remedy=chosen.remedy).mean)
        except rs.RankscopeError as error:
            words.append(f"{chosen.remedy}: {error}")
    floats = {}
    for name, dtype in FORMATS.items():
        low = tokens.to(dtype)
        with rs.operate(model.to(dtype), {"skip": chosen.skip_gain}, inputs=given(low)):
            run = rs.measure(model, given(low), metrics=["relative_residual"], sites=["block.out"])
        floats[name] = logarithms(run.curve("relative_residual").mean)
    return Picture(chosen, exact, order, floats, remedied, torch.cat(states).numpy(), tuple(words))


def drawn(picture: Picture) -> Figure:
    """Above: tokens as directions around their mean, at five depths. Below: how far they differ, over depth."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 5, height_ratios=(1, 1.5))
    depths = np.unique(np.linspace(0, picture.chosen.depth, 5).round().astype(int))
    for column, depth in enumerate(depths):
        draw_tokens(figure.add_subplot(grid[0, column]), picture.states[depth], int(depth))
    draw_curves(figure.add_subplot(grid[1, :]), picture)
    return figure


def draw_tokens(axes: Any, state: np.ndarray, depth: int) -> None:
    """Tokens of unit length, their two principal directions around the mean; the circle is the unit sphere."""
    sizes = np.linalg.norm(state, axis=1, keepdims=True)
    rows = state / np.where(sizes > 0, sizes, 1.0)
    centred = rows - rows.mean(axis=0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:2]
    points = rows @ directions.T if len(directions) == 2 else np.zeros((len(rows), 2))
    axes.add_artist(matplotlib.patches.Circle((0, 0), 1, fill=False, color="#bbbbbb"))
    axes.scatter(*points.T, s=14, c=np.arange(len(rows)), cmap="viridis")
    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", xticks=[], yticks=[])
    axes.set_title("first tokens" if depth == 0 else f"after block {depth - 1}", fontsize=9)


def draw_curves(axes: Any, picture: Picture) -> None:
    """log10 of the relative residual after each block; far below, minus the exponent on a logarithmic scale."""
    lines = {"exact": picture.exact, **picture.floats}
    if picture.remedied is not None:
        lines["remedy"] = picture.remedied
    labels = {"exact": "exact arithmetic", "remedy": f"float64, under {picture.chosen.remedy}"}
    for name, values in lines.items():
        known = np.isfinite(values)
        axes.plot(
            np.flatnonzero(known), values[known], color=COLOURS[name], label=labels.get(name, f"what {name} shows"),
            linestyle="--" if name in FORMATS else "-", marker="o", markersize=3,
        )  # fmt: skip
    for name, floor in FLOORS.items():
        axes.axhline(math.log10(floor), color=COLOURS[name], linewidth=0.7, linestyle=":")
    finite = picture.exact[np.isfinite(picture.exact)]
    if finite.size and finite.min() < FAR_BELOW:
        axes.set_yscale("symlog", linthresh=10.0)
    axes.set(xlabel="block", ylabel="log10 of the relative residual")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def answer(*values: Any) -> tuple[str, Figure | None]:
    """Text and figure for values in the order of the fields of ``Choices``; the values are not trusted."""
    try:
        picture = simulate(Choices(**dict(zip(NAMES, values, strict=True))))
    except (ValueError, TypeError, rs.RankscopeError) as error:
        return f"**Not possible:** {escaped(str(error))}", None
    last = picture.order[-1]
    order = f"{last:.2f}" if math.isfinite(last) else "not measurable: the tokens are equal, or too close"
    return "\n\n".join([f"**Order of the last block:** {order}", *map(escaped, picture.words)]), drawn(picture)


def escaped(words: str) -> str:
    """Words that Markdown and HTML leave alone."""
    return "".join(f"&#{ord(letter)};" if letter in "<>&`*_[]#" else letter for letter in words)


def build() -> Any:
    """The page as ``gradio.Blocks``, not yet served."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    start = Choices()
    options = {"concurrency_limit": AT_ONCE, "concurrency_id": "simulate", "api_visibility": "private"}
    with gradio.Blocks(title="Watch tokens collapse", analytics_enabled=False) as page:
        gradio.Markdown("# Watch tokens collapse\nBuild a small transformer and follow its tokens, block by block.")
        with gradio.Row():
            buttons = {name: gradio.Button(name, size="sm") for name in SCENES}
        with gradio.Row():
            with gradio.Column(scale=3):
                text, figure = answer(*asdict(start).values())
                shown = [gradio.Markdown(text), gradio.Plot(figure, show_label=False)]
            with gradio.Column(scale=1, min_width=260):
                controls = [control(gradio, name, getattr(start, name)) for name in NAMES]
        gradio.on([one.input for one in controls], answer, controls, shown, trigger_mode="always_last", **options)
        for name, button in buttons.items():
            values = list(asdict(SCENES[name]).values())
            button.click(lambda values=values: [*values, *answer(*values)], None, [*controls, *shown], **options)
    return page.queue(max_size=WAITING, api_open=False)


def control(gradio: Any, name: str, value: Any) -> Any:
    """The control of one choice."""
    label = name.replace("_", " ")
    if name == "seed":
        return gradio.Number(value, precision=0, minimum=0, maximum=RANGES[name][1], label=label)
    if name in RANGES:
        low, high = RANGES[name]
        return gradio.Slider(low, high, value, step=1 if name in WHOLE else 0.05, label=label)
    return gradio.Dropdown(list(OPTIONS[name]), value=value, filterable=False, label=label)


def main() -> None:
    """Serve the page on this machine, or where a space asks for it."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // AT_ONCE))
    host = os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    build().launch(
        server_name=host,
        server_port=int(os.environ.get("GRADIO_SERVER_PORT", "7860")),
        share=False,
        show_error=False,
        max_file_size=1,
    )


if __name__ == "__main__":
    main()
