"""Write what the report says about metrics and sources: from the metrics' declarations and docs/references.bib."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from rankscope.metrics import METRICS, MetricSpec

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "src/rankscope/reporting/page/facts.json"
BIBLIOGRAPHY = ROOT / "docs/references.bib"
ACCENTS = {r"{\`e}": "è", r"{\"\i}": "ï", r"{\L}": "Ł", r"{\'e}": "é", r"{\"o}": "ö", r"{\"u}": "ü", "--": "–"}


def main() -> int:
    """Write the file."""
    TARGET.write_text(written(), encoding="utf-8")
    print(f"{TARGET.relative_to(ROOT)}: {len(METRICS)} metrics")
    return 0


def written() -> str:
    """The content that the file should have."""
    content = {"metrics": {name: declared(spec) for name, spec in METRICS.items()}, "references": references()}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def declared(spec: MetricSpec) -> dict[str, Any]:
    """The facts of one metric."""
    low, high = (f"{end:g}".replace("inf", "∞") for end in spec.range)
    return {
        "side": spec.side,
        "symbol": spec.symbol,
        "summary": spec.summary,
        "says": explained(inspect.cleandoc(spec.function.__doc__ or "")),
        "range": f"{low} to {high}",
        "at_collapse": spec.at_collapse,
        "cites": [str(cite) for cite in spec.cites],
    }


def explained(text: str) -> str:
    """The paragraph after the first line; a displayed formula is kept with the paragraph it belongs to."""
    kept: list[str] = []
    for paragraph in text.split("\n\n")[1:]:
        words = " ".join(paragraph.split())
        if words.startswith("Example:"):
            break
        displayed = words.startswith(".. math:: ")
        kept.append(f":math:`{words[len('.. math:: ') :]}`" if displayed else words)
        if not displayed:
            break
    return " ".join(kept)


def references() -> dict[str, str]:
    """Every entry of the bibliography as one line."""
    text = BIBLIOGRAPHY.read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{([^,\s]+),(.*?)^\}", text, flags=re.MULTILINE | re.DOTALL)
    return {
        key: in_words(dict(re.findall(r"^\s*(\w+)\s*=\s*\{(.*)\},?\s*$", body, re.MULTILINE))) for key, body in entries
    }


def in_words(fields: dict[str, str]) -> str:
    """Authors, year, title, place, arXiv number."""
    names = [name.partition(",")[0].strip() for name in plain(fields.get("author", "")).split(" and ")]
    who = names[0] if len(names) == 1 else f"{names[0]} and {names[1]}" if len(names) == 2 else f"{names[0]} et al."
    place = plain(fields.get("booktitle") or fields.get("journal") or fields.get("publisher") or "")
    number = re.search(r"arXiv:\d{4}\.\d{4,5}", fields.get("note", ""))
    where = [place, number.group() if number and number.group() not in place else ""]
    return (
        f"{who} ({fields.get('year', 'no year')}). {plain(fields.get('title', ''))}. "
        + ", ".join(filter(None, where))
        + "."
    )


def plain(text: str) -> str:
    """TeX accents as letters, without braces."""
    for tex, letter in ACCENTS.items():
        text = text.replace(tex, letter)
    return re.sub(r"[{}]", "", text)


if __name__ == "__main__":
    raise SystemExit(main())
