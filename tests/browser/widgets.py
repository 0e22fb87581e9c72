#!/usr/bin/env python
"""Use every widget as a reader would: on the built site without a kernel, in a file that no server serves, and in
JupyterLab with one. Each number that JavaScript computes is compared with Python's.

    python tests/browser/widgets.py docs/_site [folder for screenshots]

CHECKS has one function for each widget, by its name: (the widget on the page, its state) -> None.
"""

import functools
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from chromium import browser, serve, watch
from lab_smoke import copy_repository, free_port, start_lab

WIDTHS, SCHEMES = (390, 1400), ("light", "dark")
READY = ".snb-widget[data-mounted]"


def press(slider, key, times=1):
    "Move a slider by the keyboard"
    slider.focus()
    for _ in range(times):
        slider.press(key)


def check_example(widget, state):
    "The curve's last value for three acceptance rates; dots only where Python has simulated"
    k, slider = state["depth"], widget.locator("input[type=range]")
    for a in (0.6, 0.65, 0.7):
        length = (1 - a ** (k + 1)) / (1 - a)
        assert widget.locator(".snb-number").inner_text() == f"{length:.4f}", a
        assert widget.locator("circle").count() == (k + 1 if a == state["simulated"]["a"] else 0), a
        press(slider, "ArrowRight")


LAB_SETTINGS = (  # weights of p and of q, temperature, draft tokens, proposal
    ((0.42, 0.23, 0.15, 0.12, 0.08), (0.18, 0.4, 0.2, 0.08, 0.14), 1.0, 2, "drawn"),
    ((0.9, 0.1, 0.3, 0.3, 0.05), (0.2, 0.7, 0, 0.35, 0.6), 0.6, 1, "drawn"),
    ((0.5, 0, 1, 0.25, 0.7), (0.6, 0.1, 0.8, 0.05, 0.4), 1.4, 2, "argmax"),
    ((0.3, 0.6, 0.55, 0.2, 0.1), (0.5, 0.6, 0.1, 0.9, 0.3), 0.0, 3, "drawn"),
)


@functools.cache
def lab_values(*setting):
    "What Python finds at a setting of the rule lab, by enumeration"
    from speculators_nb.widgets import rule_lab

    return rule_lab.lab_values(dict(zip(("p", "q", "temperature", "length", "proposal"), setting)))


def check_rule_lab(widget, state):
    "Every rule's acceptance, output and distance, at several settings"
    first = lab_values(*LAB_SETTINGS[0])
    assert {name: value["accepted"] for name, value in state["values"].items()} == {
        name: value.accepted for name, value in first.items()
    }
    for p, q, *others in LAB_SETTINGS:
        sliders = widget.locator(".snb-weights input")
        for i, weight in enumerate((*p, *q)):
            sliders.nth(i).fill(str(weight))
        for i, value in enumerate(others[:2]):
            widget.locator(".snb-row input").nth(i).fill(str(value))
        widget.locator(".snb-row select").select_option(others[2])
        read = "all => all.map(e => [e.dataset.rule, e.dataset.accepted, e.dataset.distance, e.dataset.output])"
        found = widget.locator(".snb-rule").evaluate_all(read)
        expected = lab_values(p, q, *others)
        assert [name for name, *_ in found] == list(expected)
        for name, accepted, distance, output in found:
            here, want = map(float, (accepted, distance, *output.split(","))), expected[name]
            for a, b in zip(here, (want.accepted, want.distance, *want.output), strict=True):
                assert abs(a - b) < 1e-9, f"{name} at {p}, {q}, {others}: {a}, Python has {b}"


CHECKS = {"example": check_example, "rule_lab": check_rule_lab}


def frozen(html):
    "[(name, state)] of the widgets in the text of a page"
    found = re.findall(
        r'<div class="snb-widget" data-widget="(\w+)"><script type="application/json">(.*?)</script>', html, flags=re.S
    )
    return [(name, json.loads(text)["state"]) for name, text in found]


def check_page(page, html, problems, shots=None):
    "Every widget of the open page is drawn, fits, is accessible, and computes what Python computes"
    here = frozen(html)
    page.wait_for_function(f"document.querySelectorAll({READY!r}).length == {len(here)}", timeout=15000)
    excess = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if excess > 0:
        problems.append(f"{page.url} is {excess} px too wide at {page.viewport_size['width']} px")
    for found in Axe().run(page, context=".snb-widget").response["violations"]:
        nodes = "; ".join(node["html"][:120] for node in found["nodes"][:3])
        problems.append(f"{page.url}: {found['id']}: {found['help']}: {nodes}")
    for i, (name, state) in enumerate(here):
        widget = page.locator(READY).nth(i)
        if shots:
            widget.screenshot(path=f"{shots}-{name}-{i}.png")
        CHECKS[name](widget, state)
    return [name for name, _ in here]


def on_site(site, shots=None):
    "Widgets of the site at two widths, light and dark; their names"
    pages = {p: p.read_text() for p in sorted(site.rglob("*.html"))}
    pages = {p: text for p, text in pages.items() if frozen(text)}
    problems, used = [], set()
    with serve(site) as url, browser() as b:
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            page = b.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            watch(page, problems)
            for path, html in pages.items():
                page.goto(f"{url}/{path.relative_to(site)}")
                shot = shots and Path(shots) / f"{path.stem}-{width}-{scheme}"
                used |= {*check_page(page, html, problems, shot)}
            page.close()
    assert not problems, "\n".join(problems)
    return used


def from_a_file(html, shots=None):
    "A page of one file, opened without a server"
    problems = []
    with tempfile.TemporaryDirectory() as folder, browser() as b:
        path = Path(folder) / "page.html"
        path.write_text(html)
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            page = b.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            watch(page, problems)
            page.goto(path.as_uri())
            check_page(page, html, problems, shots and Path(shots) / f"file-{width}-{scheme}")
            page.close()
    assert not problems, "\n".join(problems)


def in_lab(notebook="widgets/01_widget.ipynb", shots=None):
    "With a living kernel a slider changes a number that Python computes"
    with tempfile.TemporaryDirectory() as folder:
        home, problems = Path(folder), []
        (home / "work").mkdir()
        copy_repository(home, notebook)
        port = free_port()
        server = start_lab(home, port)
        try:
            with browser() as b:
                page = b.new_page(viewport={"width": 1400, "height": 1000})
                watch(page, problems)
                page.goto(f"http://127.0.0.1:{port}/lab/tree/{notebook}?token=smoke&reset")
                page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)
                page.get_by_role("menuitem", name="Run", exact=True).click()
                page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
                widget = page.locator(".snb-root").first
                widget.wait_for(timeout=90_000)
                before = widget.locator(".snb-simulated").inner_text()
                press(widget.locator("input[type=range]"), "ArrowRight")
                page.wait_for_function(
                    "old => /\\d/.test(document.querySelector('.snb-simulated').innerText)"
                    " && document.querySelector('.snb-simulated').innerText != old",
                    arg=before,
                    timeout=30_000,
                )
                if shots:
                    page.screenshot(path=Path(shots) / "lab.png")
                page.unroute_all(behavior="ignoreErrors")
        finally:
            server.terminate()
            server.wait(30)
    assert not [p for p in problems if "widget" in p.lower()], "\n".join(problems)


def main(site, shots=None):
    site = Path(site)
    used = on_site(site, shots)
    modules = {p.stem for p in (site / "_static/widgets").glob("*.js")} - {"common", "mount"}
    assert used == modules == set(CHECKS), f"on the site {used}, modules {modules}, checked {set(CHECKS)}"
    in_lab(shots=shots)
    print(f"widgets: {', '.join(sorted(used))} on the site, in a file and in JupyterLab")


if __name__ == "__main__":
    main(*sys.argv[1:])
