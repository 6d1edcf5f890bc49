"""The explorer as a page, ``ddplab explore``: who gets at it, how it ends, what a slider does."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from browser_support import axe_violations, open_page
from command_line import ROOT, ddplab, error_line
from interruptible import start_interruptible

from common.explore.server import HOST, port_to_use, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DATA = """([panel, trace]) => {
    const figure = document.querySelector(`.ddplab-${panel} .js-plotly-plot`);
    const found = figure.data.find((one) => one.name === trace);
    return JSON.stringify({x: Array.from(found.x), y: Array.from(found.y)});
}"""

pytestmark = pytest.mark.xdist_group("explore")


def answer(port: int, path: str) -> tuple[int, str, str]:
    """Asks the server; returns the status, where it points to, and the page."""
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.headers.get("Location", ""), response.read().decode()


def test_a_port_in_use_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port {port}: in use" in error_line(ddplab("explore", "--port", port))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--token", ""], "--token ''"),
        (["--token", "two words"], "--token 'two words'"),
        (["--seq-len", "512"], "--seq-len has an effect with --model only"),
        (["--model", "llama-9"], "unknown model 'llama-9'"),
        (["nowhere"], "nowhere: no such run directory"),
        (["data/clusters"], "data/clusters: no complete run with"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in error_line(ddplab("explore", *arguments))


@pytest.mark.slow
def test_the_page_is_behind_its_token_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    # What is broken in the user's own Jupyter and IPython is not read.
    for place in (".jupyter/voila.py", ".ipython/profile_default/startup/0.py"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("raise SystemExit('broken')\n")
    variables = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    variables |= {"JUPYTER_CONFIG_DIR": str(tmp_path / ".jupyter"), "PYTHONUNBUFFERED": "1"}
    port = port_to_use(0)
    process = start_interruptible(
        [sys.executable, "-m", "common.cli.main", "explore", "--no-browser", "--port", str(port)],
        env=variables,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().strip()
        found = re.fullmatch(rf"http://127\.0\.0\.1:{port}/\?token=([\w-]{{20,}})", url)
        assert found, process.communicate(timeout=20)
        for wrong in ("/", "/?token=wrong"):
            status, where, text = answer(port, wrong)
            assert (status, where.split("?")[0]) == (302, "/login")
            assert "Slider" not in text
        for closed in ("/api/kernels/12345678-1234-1234-1234-123456789012", "/voila/files/a.png"):
            assert answer(port, closed)[0] in (302, 403)
        assert not psutil.Process(process.pid).children()[0].children(), "a kernel was started"
        status, _, text = answer(port, f"/?token={found[1]}")
        assert status == 200
        assert "application/vnd.jupyter.widget-view+json" in text
        assert "jupyter-config-data" in text
        # Nothing that the page asks for is elsewhere.
        assert not re.findall(r"(?:src|href)=\"(?:https?:)?//[^\"]*", text)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2, "the server and a kernel"
        listening = [one for one in children[0].net_connections("tcp") if one.status == "LISTEN"]
        assert {one.laddr.ip for one in listening} == {HOST}
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert errors == ""
    assert "has ended" in output
    _, left = psutil.wait_procs(children, timeout=5)
    assert not left
    with socket.socket() as trial:
        assert trial.connect_ex((HOST, port)) != 0


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[tuple]:
    """Opens the page in a browser; yields it and what went wrong in it."""
    with (
        serving() as served,
        open_page(chromium, served.url, width=1366, height=768) as (opened, wrong),
    ):
        opened.set_default_timeout(60_000)
        opened.on(
            "request",
            lambda asked: (
                wrong.append(f"asked for {asked.url}")
                if not re.match(rf"(http://{HOST}[:/]|data:|blob:)", asked.url)
                else None
            ),
        )
        opened.wait_for_function("document.querySelectorAll('.js-plotly-plot').length === 8")
        # T(b) is the second trace. The first may be a level line, which has no height to be seen.
        opened.wait_for_selector(".ddplab-caps .js-plotly-plot .trace:nth-child(2) .js-line")
        yield opened, wrong


def shown(page, panel: str, trace: str) -> str:
    """Returns the x and y of a trace, as Plotly has them in the page, as JSON."""
    return page.evaluate(DATA, [panel, trace])


def await_other(page, panel: str, trace: str, old: str, *, same: bool = False) -> str:
    """Waits until a trace shows other data than ``old``, or the same; returns them."""
    page.wait_for_function(
        f"([where, old, same]) => ((({DATA})(where)) === old) === same",
        arg=[[panel, trace], old, same],
    )
    return shown(page, panel, trace)


@pytest.mark.slow
def test_a_slider_moves_the_figures_data(page: tuple) -> None:
    from playwright.sync_api import expect

    opened, wrong = page
    curve, chosen, at_cap = "T(b), predicted", "this cap", "at this cap"
    at_first = {name: shown(opened, "caps", name) for name in (curve, chosen)}
    efficiency = shown(opened, "efficiency", at_cap)
    # The tag stays on the element if it is not drawn anew.
    opened.evaluate("document.querySelector('.ddplab-caps .js-plotly-plot').tagged = true")
    opened.get_by_role("slider", name="bucket cap b").focus()
    opened.keyboard.press("ArrowRight")
    [cap] = json.loads(await_other(opened, "caps", chosen, at_first[chosen]))["x"]
    assert cap > json.loads(at_first[chosen])["x"][0]
    assert shown(opened, "caps", curve) == at_first[curve]
    command = opened.get_by_role("textbox", name="as a command")
    expect(command).to_have_value(re.compile(rf"--bucket-cap-mb {cap:g}\b"))
    moved = await_other(opened, "efficiency", at_cap, efficiency)
    opened.get_by_role("slider", name="latency α").focus()
    opened.keyboard.press("End")
    other = json.loads(await_other(opened, "efficiency", at_cap, moved))
    assert min(other["y"]) < min(json.loads(moved)["y"])
    await_other(opened, "caps", curve, at_first[curve])
    expect(opened.locator(".ddplab-command span").first).to_contain_text("α")
    opened.get_by_role("button", name="Back to the system").click()
    await_other(opened, "efficiency", at_cap, efficiency, same=True)
    assert await_other(opened, "caps", chosen, at_first[chosen], same=True)
    assert opened.evaluate("document.querySelector('.ddplab-caps .js-plotly-plot').tagged")
    assert wrong == []


@pytest.mark.slow
def test_the_other_tab_and_another_system_are_shown(page: tuple) -> None:
    from playwright.sync_api import expect

    opened, wrong = page
    opened.get_by_label("Start from").select_option(label="computed: gpt2-large on h100-ib")
    opened.wait_for_selector("text=computed, not measured")
    command = opened.get_by_role("textbox", name="as a command")
    expect(command).to_have_value(re.compile("--cluster h100-ib"))
    opened.get_by_role("tab", name="Micro-batches").click()
    opened.get_by_label("Plan").select_option(label="optimum (task A3.1)")
    opened.wait_for_function(
        """() => Array.from(document.querySelectorAll("h2"), (one) => one.innerText)
            .some((text) => text.includes("of static's") && !text.includes("100%"))"""
    )
    wide = opened.locator(".ddplab-timeline .js-plotly-plot").nth(1).bounding_box()
    assert wide["width"] > 600, "a figure of a tab that was closed has taken its place"
    assert letters_too_small(opened) == []
    opened.get_by_role("tab", name="Clusters").click()
    at_first = shown(opened, "memory", "optimizer states")
    opened.get_by_label("Model").first.select_option(label="llama-3.1-8b")
    fits = json.loads(await_other(opened, "memory", "optimizer states", at_first))
    opened.get_by_label("Strategy").first.select_option(label="DDP")
    opened.wait_for_selector("text=does not fit")
    whole = json.loads(shown(opened, "memory", "optimizer states"))
    # 64 GPUs share the states of FULL_SHARD, which the page starts with.
    assert max(whole["y"]) == pytest.approx(64 * max(fits["y"]))
    assert letters_too_small(opened) == []
    assert wrong == []


def letters_too_small(opened) -> list[str]:
    """Returns what of the page cannot be read from the last row."""
    return opened.evaluate(
        """() => Array.from(document.querySelectorAll('.ddplab-explore *'))
            .filter((one) => one.offsetParent && one.childNodes.length
                && Array.from(one.childNodes).some((n) => n.nodeType === 3 && n.data.trim())
                && parseFloat(getComputedStyle(one).fontSize) < 18)
            .map((one) => one.outerHTML.slice(0, 80))"""
    )


@pytest.mark.slow
def test_axe_finds_nothing_in_it(page: tuple) -> None:
    opened, _ = page
    assert axe_violations(opened) == []
