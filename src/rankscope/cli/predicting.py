"""``rankscope predict``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rankscope.cli import parameters
from rankscope.cli.showing import show_run, wants_progress
from rankscope.cli.words import split_names

Count = Annotated[int | None, typer.Option(min=1)]


def predict_command(
    spec: Annotated[str, typer.Argument(metavar="CONFIG", help="Preset (see `ls presets`), config.json, or folder.")],
    depth: Annotated[int | None, typer.Option("--depth", min=1, help="Blocks.")] = None,
    width: Annotated[int | None, typer.Option("--width", min=1, help="Width of the stream.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", min=1, help="Attention heads.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Context length, all of it sampled.")] = None,
    mask: Annotated[str | None, typer.Option("--mask", metavar="EXPRESSION", help="Mask, e.g. 'causal'.")] = None,
    norm: Annotated[str | None, typer.Option("--norm", help="layernorm, rmsnorm or none.")] = None,
    norm_place: Annotated[str | None, typer.Option("--norm-place", help="pre, post or none.")] = None,
    mlp: Annotated[str | None, typer.Option("--mlp", help="Activation, or none.")] = None,
    positions: Annotated[str | None, typer.Option("--positions", help="none, learned, rope or alibi.")] = None,
    skip: Annotated[
        float | None, typer.Option("--skip", metavar="GAIN", help="Gain on both skips; 0 cuts them.")
    ] = None,
    std: Annotated[float | None, typer.Option("--weight-std", help="Standard deviation of every matrix.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other part of the design.")
    ] = None,
    map_: Annotated[
        tuple[str, str] | None,
        typer.Option("--map", metavar="A B", help="Map over two parameters, e.g. --map skip_gain depth=1:64:16."),
    ] = None,
    remedies: Annotated[
        list[str] | None,
        typer.Option("--remedies", help="Also under remedies, with commas, each NAME or NAME=STRENGTH; or `all`."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Initialisations to sample.")] = 3,
    most_blocks: Annotated[
        int | None, typer.Option("--most-blocks", min=1, help="How far to follow tokens that do not agree.")
    ] = None,
    seed: parameters.Seed = 0,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    out: parameters.Out = None,
    quiet: parameters.Quiet = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """Will this design collapse at initialisation? Oracle curves, a sampled one, the depth at which tokens agree."""
    import rankscope

    named = {
        "depth": depth,
        "width": width,
        "heads": heads,
        "mask": mask,
        "norm": norm,
        "norm_place": norm_place,
        "mlp": mlp,
        "positions": positions,
        "skip_gain": skip,
        "weight_std": std,
    }
    changes: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    changes.update(_assignments(set_ or []))
    options: dict[str, Any] = {"seeds": seeds, "tokens": tokens, "most_blocks": most_blocks, "map": map_, "seed": seed}
    options["progress"] = wants_progress(quiet=quiet, no_progress=no_progress)
    if remedies is None:
        run = rankscope.predict(spec, changes, **options)
    else:
        asked = None if remedies == ["all"] else split_names(remedies)
        run = rankscope.predict_remedies(spec, asked, changes=changes, **options)
    show_run(run, as_json=as_json, quiet=quiet, out=out, figure=figure)


def _assignments(words: list[str]) -> dict[str, Any]:
    """``name=value`` pairs, numbers as numbers.

    Example:
        >>> _assignments(["kv_heads=4", "attention_scale=0.5", "mlp=relu"])
        {'kv_heads': 4, 'attention_scale': 0.5, 'mlp': 'relu'}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE", param_hint="--set")
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
