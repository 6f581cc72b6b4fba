"""The playground as a visitor meets it: served on this machine, driven in a real browser."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from scripts.fetch_axe import axe_file

from rankscope.ext.playground.choices import Choices
from rankscope.ext.playground.simulating import simulate
from rankscope.ext.playground.writing import write_picture
from tests.browser import Opened, launched, opened, serious_findings

ROOT = Path(__file__).resolve().parents[3]
FIRST = ("depth=8", "tokens=16", "width=16", "heads=2")
PATIENCE = 120_000
"""Milliseconds; a loaded machine may need them, a free one answers at once."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("Gradio is not installed: pip install 'rankscope[play]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "rankscope", "play", "--port", str(port), "--quiet"]
    words += [word for choice in FIRST for word in ("--set", choice)]
    server = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended before it answered"
        try:
            urllib.request.urlopen(url, timeout=30).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return
    pytest.fail("the server did not answer")


@contextmanager
def visiting(browser: Any, address: str, *, width: int = 1280, scheme: str = "light") -> Iterator[Opened]:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    seen = Opened(page)
    page.on("console", lambda message: seen.said.append(message.text))
    page.on("pageerror", lambda error: seen.said.append(str(error)))
    page.on("request", lambda request: seen.asked.append(request.url))
    try:
        page.goto(address)
        page.locator(".play .token").first.wait_for(state="attached")
        yield seen
    finally:
        context.close()


def order_shown(page: Any, order: int) -> None:
    page.locator(f".play[data-order='{order}']").wait_for()
    assert page.locator(".badge").inner_text() == f"order {order}"


def set_number(page: Any, name: str, value: str) -> None:
    box = page.locator(f"#choose-{name} input[type=number]")
    box.fill(value)
    box.press("Enter")
    box.blur()


@pytest.mark.slow
def test_skip_gain_zero_shows_order_three(browser: Any, address: str) -> None:
    with visiting(browser, address) as seen:
        page = seen.page
        order_shown(page, 1)
        line = page.locator("svg.curve.wide path.exact")
        before = line.get_attribute("d")
        set_number(page, "skip_gain", "0")
        order_shown(page, 3)
        assert line.get_attribute("d") != before
        picture = simulate(Choices(depth=8, tokens=16, width=16, heads=2, skip_gain=0.0))
        assert page.locator("svg.curve.wide circle.law").count() == 8
        blind = page.locator(".answer div", has_text="fp32 goes blind").locator("dd").inner_text()
        assert blind == f"at block {picture.sights['float32'].block}"
        set_number(page, "skip_gain", "1")
        order_shown(page, 1)
        assert seen.said == []


@pytest.mark.slow
def test_the_slider_moves_tokens_and_the_play_button_runs(browser: Any, address: str) -> None:
    with visiting(browser, address) as seen:
        page = seen.page
        token = page.locator(".sphere .token").first
        slider = page.get_by_role("slider", name="block", exact=True)
        slider.fill("0")
        assert page.locator(".where").inner_text() == "first tokens"
        place = (token.get_attribute("cx"), token.get_attribute("cy"))
        slider.fill("8")
        assert page.locator(".where").inner_text() == "after block 7"
        assert (token.get_attribute("cx"), token.get_attribute("cy")) != place
        chart = page.locator("svg.curve.wide")
        assert chart.locator(".cursor").get_attribute("x1") == chart.get_attribute("data-right").removesuffix(".0")
        page.get_by_role("button", name="Play", exact=True).click()
        page.get_by_role("button", name="Pause", exact=True).wait_for()
        page.get_by_role("button", name="Play", exact=True).wait_for()
        assert page.locator(".where").inner_text() == "after block 7"


@pytest.mark.slow
def test_a_remedy_draws_a_second_curve(browser: Any, address: str) -> None:
    with visiting(browser, address) as seen:
        page = seen.page
        assert page.locator("path.treated").count() == 0
        page.locator("#choose-remedy input").click()
        page.get_by_role("option", name="stronger_skip", exact=True).click()
        page.locator("svg.curve.wide path.treated").wait_for(state="attached")
        assert "stronger_skip" in page.locator(".legend").inner_text()


@pytest.mark.slow
def test_a_scene_sets_the_controls(browser: Any, address: str) -> None:
    with visiting(browser, address) as seen:
        page = seen.page
        page.get_by_role("button", name="Attention alone", exact=True).click()
        order_shown(page, 3)
        page.wait_for_function("document.querySelector('#choose-skip_gain input[type=number]').value === '0'")
        assert page.locator("#choose-mlp input").input_value() == "none"


@pytest.mark.slow
def test_nothing_leaves_the_machine_and_it_fits_a_phone(browser: Any, address: str) -> None:
    for width in (1280, 390):
        with visiting(browser, address, width=width) as seen:
            assert {url for url in seen.asked if not url.startswith((address, "data:", "blob:"))} == set()
            assert seen.said == []
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            kinds = {"wide": width > 600, "narrow": width <= 600}
            for name, visible in kinds.items():
                assert seen.page.locator(f"svg.curve.{name}").is_visible() is visible


def test_it_listens_on_this_machine_only(address: str) -> None:
    port = int(address.rsplit(":", 1)[1])
    # a server on every address answers on the whole loopback network, one on 127.0.0.1 only there
    with socket.socket() as other:
        other.settimeout(5)
        assert other.connect_ex(("127.0.0.2", port)) != 0


def post(url: str, body: bytes, kind: str) -> int:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(address: str) -> None:
    words = [sys.executable, "-m", "rankscope", "play", "--port", address.rsplit(":", 1)[1], "--set", "depth=1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "cannot listen on port" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_are_turned_away(address: str) -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
        + b"a" * 5000
        + b"\r\n--x--\r\n"
    )
    assert post(f"{address}/gradio_api/upload", body, "multipart/form-data; boundary=x") >= 400


def test_a_request_made_by_hand_does_no_harm(browser: Any, address: str) -> None:
    hostile = ["<script>", 1e308, [], None, {"path": "README.md"}, -1, "a" * 100_000, 7, 8, 9, 10, 11, 12]
    for data in (hostile, [], [10**9] * 13):
        body = json.dumps({"data": data, "fn_index": 0, "session_hash": "by-hand"}).encode()
        post(f"{address}/gradio_api/queue/join", body, "application/json")
    with visiting(browser, address) as seen:
        set_number(seen.page, "skip_gain", "0")
        order_shown(seen.page, 3)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_accessible(browser: Any, address: str, scheme: str) -> None:
    if not axe_file().is_file():
        pytest.skip("axe-core is not in the cache: run ./dev axe")
    with visiting(browser, address, scheme=scheme) as seen:
        seen.page.locator(".play details summary").click()
        seen.page.wait_for_timeout(300)
        assert serious_findings(seen.page, axe_file(), only=("color-contrast",) if scheme == "dark" else ()) == []


def test_a_written_picture_opens_without_a_request(browser: Any, tmp_path: Path) -> None:
    chosen = Choices(depth=4, tokens=8, width=16, heads=2, skip_gain=0.0)
    file = write_picture(simulate(chosen), tmp_path / "picture.html")
    for width in (1280, 390):
        with opened(browser, file, width=width, scheme="dark") as seen:
            assert seen.asked == [file.as_uri()]
            assert seen.said == []
            assert seen.page.locator(".badge").inner_text() == "order 3"
            assert seen.page.locator(".sphere .token").count() == 8
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_refuses_a_rebound_name_and_another_origin(address: str) -> None:
    import httpx

    assert httpx.get(f"{address}/config", timeout=60).status_code == 200
    for headers in ({"Host": "evil.example:7860"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        found = httpx.get(f"{address}/config", headers=headers, timeout=60)
        assert (found.status_code, "--allow-host" in found.text) == (403, True)
        assert httpx.post(f"{address}/gradio_api/queue/join", headers=headers, json={}, timeout=60).status_code == 403


@pytest.mark.slow
def test_fifty_visitors_at_once_are_all_answered(address: str) -> None:
    import httpx

    first = httpx.get(f"{address}/config", timeout=60).json()["dependencies"][0]["id"]
    small = Choices(depth=2, tokens=4, width=16, heads=1)

    def visit(number: int) -> tuple[bool, str]:
        given = {"data": list(astuple(replace(small, seed=number))), "fn_index": first, "session_hash": f"v{number}"}
        httpx.post(f"{address}/gradio_api/queue/join", json=given, timeout=60).raise_for_status()
        with httpx.stream("GET", f"{address}/gradio_api/queue/data?session_hash=v{number}", timeout=120) as events:
            for line in events.iter_lines():
                told = json.loads(line[5:]) if line.startswith("data:") else {}
                if told.get("msg") == "process_completed":
                    return told["success"], str(told["output"])
        return False, ""

    with ThreadPoolExecutor(50) as visitors:
        found = list(visitors.map(visit, range(50)))
    assert all(success for success, _ in found)
    assert len({text for _, text in found}) == 50, "each sees its own picture"
