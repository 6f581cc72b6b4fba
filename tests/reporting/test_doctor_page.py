"""The page of a doctor's report: the answer on top, then the two curves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rankscope.examination import Finding
from rankscope.reporting.pages import report
from rankscope.verbs.doctor.checks import Check, DoctorReport

FAULT = Finding(
    "no_skips",
    "6 of 6 blocks have no skip connection <script>.",
    "return x + f(x)",
    measured="how much tokens differ after the last block",
    before=0.001,
    after=0.9,
    tried=True,
    intervention="with skips added",
    curves=((0.5, 0.03, 0.001), (0.9, 0.9, 0.9)),
)
HARMLESS = Finding("mean_offset", "All tokens share a vector.", kind="harmless")


def page(tmp_path: Path, *findings: Finding) -> str:
    asked = DoctorReport("init:mine", "Mine", (), (Check("parity", "pass", "bit for bit"),), findings=findings)
    return report(asked, tmp_path / "page.html").read_text(encoding="utf-8")


def charts(html: str) -> list[dict[str, Any]]:
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)
    assert found is not None
    read: list[dict[str, Any]] = json.loads(found[1])
    return read


def test_the_answer_comes_first_and_both_curves_are_drawn(tmp_path: Path) -> None:
    html = page(tmp_path, FAULT, HARMLESS)
    words = (
        "have no skip connection &lt;script&gt;",
        "Change: return x + f(x)",
        "0.001 as it is, 0.9 with skips added",
        "The same weights and inputs.",
        "All tokens share a vector.",
    )
    places = [html.index(one) for one in words]
    assert places == sorted(places)
    (chart,) = charts(html)
    drawn = {line["name"]: line["y"] for line in chart["views"][0]["series"]}
    assert drawn == {"as it is": [0.5, 0.03, 0.001], "changed": [0.9, 0.9, 0.9]}


def test_a_model_with_nothing_wrong_has_no_picture(tmp_path: Path) -> None:
    html = page(tmp_path)
    assert "Nothing wrong was found." in html
    assert "As it is, and with the change" not in html
