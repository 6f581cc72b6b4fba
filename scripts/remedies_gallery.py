"""What every remedy does to tokens in random networks of 50 blocks, beside what its paper claims.

Writes docs/data/remedies.json and the table between the markers in docs/howto/remedy.md. Three hosts, all transformers
models with weights of variance 1/width, as the theory of initialisation has them: a post-norm BERT, the same with its
skips removed, and a pre-norm causal Llama. Run it from the repository: ``python scripts/remedies_gallery.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import rankscope
from rankscope.linalg.precision import float_floor
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.remedies import REMEDIES, applied
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed, view_of

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "remedies.json"
PAGE = ROOT / "docs" / "howto" / "remedy.md"
MARKS = ("<!-- table of scripts/remedies_gallery.py: begin -->", "<!-- table of scripts/remedies_gallery.py: end -->")
WIDTH, BLOCKS, TOKENS, SEQUENCES = 64, 50, 64, 2
SHARED = {
    "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 128, "initializer_range": WIDTH**-0.5,
}  # fmt: skip
BERT = {"model_type": "bert", **SHARED, "intermediate_size": 4 * WIDTH}
LLAMA = {"model_type": "llama", **SHARED, "intermediate_size": 4 * WIDTH, "num_key_value_heads": 4}
HOSTS: dict[str, tuple[dict[str, Any], str]] = {
    "post-norm": (BERT, "full"),
    "no skips": (BERT, "+norm+mlp"),
    "pre-norm": (LLAMA, "full"),
}
FLOOR = float_floor(torch.float64)
KEPT = ("residual_last", "correlation_last", "factor", "qk_over_v", "stable_rank_last", "parameters", "time_ratio")


GROWTH = ("layernorm_scaling", "peri_ln")
"""Remedies that claim something about the growth of the pre-norm stream."""


def measured(
    config: Mapping[str, Any], variant: str, seed: int, names: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    """These remedies, or all, on one random network."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        run = rankscope.remedy(
            rankscope.Model(f"init:{folder}", dtype="float64", seed=seed),
            rankscope.Inputs(sequences=SEQUENCES, tokens=TOKENS, random_tokens=True),
            remedies=names,
            variant=variant,
            repeats=3 if seed == 0 else 0,
        )
    return {entry["name"]: {key: entry[key] for key in KEPT} for entry in run.extra["remedies"]}


def growth(config: Mapping[str, Any], name: str | None, seed: int) -> float:
    """Root mean square of the stream after the last block over that before the first."""
    sizes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        (Path(folder) / "config.json").write_text(json.dumps(config))
        loaded = load(f"init:{folder}", seed=seed, dtype="float64")
        part = prepare_inputs(loaded, sequences=SEQUENCES, tokens=TOKENS, seed=seed, random_tokens=True)[0]
        view = view_of(loaded.model, part)

        def note(ref: Any, x: Any) -> None:
            sizes[ref.site] = float(x.square().mean().sqrt())

        sites = SiteSelection.parse(("block.in@0", f"block.out@{BLOCKS - 1}"))
        with undisturbed(loaded.model):
            if name is None:
                with trace(view, sites, note):
                    part.run(loaded.model)
            else:
                with applied(loaded.model, name, view=view), trace(view, sites, note):
                    part.run(loaded.model)
    return sizes["block.out"] / sizes["block.in"]


def gather(seeds: Sequence[int]) -> dict[str, Any]:
    """Every host and seed."""
    hosts: dict[str, Any] = {}
    for host, (config, variant) in HOSTS.items():
        hosts[host] = {"config": config, "variant": variant, "seeds": {}}
        for seed in seeds:
            hosts[host]["seeds"][str(seed)] = measured(config, variant, seed)
            print(f"{host}, seed {seed}", file=sys.stderr, flush=True)
    grown = {name or "none": [growth(LLAMA, name, seed) for seed in seeds] for name in (None, *GROWTH)}
    return {
        "setting": {
            "blocks": BLOCKS, "width": WIDTH, "tokens": TOKENS, "sequences": SEQUENCES, "dtype": "float64",
            "seeds": list(seeds), "torch": torch.__version__, "rankscope": rankscope.__version__,
        },
        "hosts": hosts,
        "growth of the pre-norm stream": grown,
    }  # fmt: skip


def add(names: Sequence[str]) -> None:
    """Add further remedies to the recorded numbers, network by network, on networks that must be the recorded ones."""
    data = json.loads(DATA.read_text())
    for seed in data["setting"]["seeds"]:
        for host, recorded in data["hosts"].items():
            wanted = [name for name in names if makes_sense(host, name)]
            found = measured(recorded["config"], recorded["variant"], seed, wanted)
            entries = recorded["seeds"][str(seed)]
            then, now = entries["none"]["residual_last"], found.pop("none")["residual_last"]
            # at the float floor a residual is rounding, which depends on the machine
            if abs(then - now) > 1e-3 * then and max(then, now) > FLOOR:
                raise SystemExit(f"{host}, seed {seed}: {now} without a remedy, recorded {then}. Remeasure all.")
            entries.update(found)
            print(f"{host}, seed {seed}", file=sys.stderr, flush=True)
        grown = data["growth of the pre-norm stream"]
        for name in set(names) & set(GROWTH):
            grown[name] = [*grown.get(name, [])[:seed], growth(LLAMA, name, seed)]
        DATA.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def values(data: Mapping[str, Any], host: str, name: str, key: str) -> list[float | None]:
    """One value per seed; empty where the host cannot undergo the remedy."""
    return [seed[name][key] for seed in data["hosts"][host]["seeds"].values() if name in seed]


def makes_sense(host: str, name: str) -> bool:
    """Whether a remedy of skips is tried on a network that has some."""
    return name == "none" or host != "no skips" or "skips" not in REMEDIES[name].needs


def cell(data: Mapping[str, Any], host: str, name: str) -> str:
    """Mean correlation with its range over seeds; its distance from 1 where that is all there is to see."""
    if not makes_sense(host, name):
        return "needs skips"
    found = values(data, host, name, "correlation_last")
    if not found:
        return "refused"
    known = [value for value in found if value is not None]
    mean, low, high = statistics.mean(known), min(known), max(known)
    if all(end is not None and end <= FLOOR for end in values(data, host, name, "residual_last")):
        return "1 (float floor)"
    return f"1 - {1 - mean:.0e}" if 1 - mean < 5e-4 else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def apart(data: Mapping[str, Any], host: str, name: str) -> tuple[int, int, int]:
    """Networks in which 1 - correlation is a tenth larger than without, a tenth smaller, and all; floors count as 0."""
    with_it, without = (distances(data, host, entry) for entry in (name, "none"))
    pairs = list(zip(with_it, without, strict=False))
    return sum(w > 0 and w >= 1.1 * n for w, n in pairs), sum(n > 0 and w < n / 1.1 for w, n in pairs), len(pairs)


def distances(data: Mapping[str, Any], host: str, name: str) -> list[float]:
    """1 - correlation of each network, 0 where the float format cannot tell it from 0."""
    ends = zip(values(data, host, name, "correlation_last"), values(data, host, name, "residual_last"), strict=True)
    return [0.0 if rho is None or end is None or end <= FLOOR else 1 - rho for rho, end in ends]


def verdict(data: Mapping[str, Any], name: str) -> str:
    """What was seen, host by host, and beside which claim."""
    parts = []
    for host in data["hosts"]:
        higher, lower, networks = apart(data, host, name)
        if networks and makes_sense(host, name):
            closer = f", closer in {lower}" if lower else ""
            parts.append(f"{host}: {higher} of {networks}{closer}")
    seen = "further apart in " + "; ".join(parts)
    if name in GROWTH:
        plain, scaled = (statistics.mean(data["growth of the pre-norm stream"][key]) for key in ("none", name))
        return f"the stream grows {plain:.0f}-fold without and {scaled:.0f}-fold with it; tokens {seen}"
    return seen if REMEDIES[name].claims_tokens else f"(no claim about tokens) {seen}"


def table(data: Mapping[str, Any]) -> list[str]:
    """The lines of the table in the documentation."""
    hosts = list(data["hosts"])
    lines = ["| remedy | " + " | ".join(hosts) + " | the paper's claim | here |", "|---" * (len(hosts) + 3) + "|"]
    for name in ("none", *REMEDIES):
        cells = [cell(data, host, name) for host in hosts]
        known = REMEDIES[name] if name != "none" else None
        cites = "" if known is None else " ".join(f"{{cite}}`{cite.key}`" for cite in known.cites)
        label = "none" if known is None else f"`{name}` {known.strength:g}"
        ends = ["", ""] if known is None else [f"{known.claim} {cites}", verdict(data, name)]
        lines.append("| " + " | ".join([label, *cells, *ends]) + " |")
    return lines


def main() -> None:
    """Measure, or take the numbers that are there, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="random networks per host")
    parser.add_argument("--only", metavar="NAMES", help="measure these remedies and keep the numbers of the others")
    parser.add_argument("--table-only", action="store_true", help="write the table from the numbers that are there")
    options = parser.parse_args()
    if options.only:
        add(options.only.split(","))
    elif not options.table_only:
        DATA.write_text(json.dumps(gather(range(options.seeds)), indent=1, allow_nan=False) + "\n")
    page = PAGE.read_text()
    before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
    lines = "\n".join(table(json.loads(DATA.read_text())))
    PAGE.write_text(f"{before}{MARKS[0]}\n{lines}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
