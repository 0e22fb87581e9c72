#!/usr/bin/env python
"""The report of the demo, and the page of an experiment's runs, as a colleague opens them: one file, no server, no
network, on a phone and a desk, light and dark.

    python tests/browser/report.py [folder for screenshots]
"""

import itertools
import sys
import tempfile
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from chromium import browser, watch
from page_checks import MAX_BYTES
from widgets import READY, SCHEMES, WIDTHS, press

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_report import small_report, small_runs_page


def step_of(widget):
    "The number of the step that the debugger shows"
    return int(widget.locator(".snb-run .snb-muted").first.inner_text().split()[1])


def check_debugger(widget, answer):
    "A click on a step shows it, the slider and the button move on, and the probabilities are those of the record"
    widget.get_by_role("button", name="step 3", exact=True).click()
    assert step_of(widget) == 3
    p, q = (widget.locator(f"tbody td:nth-child({i})").first.inner_text() for i in (2, 3))
    assert (float(p), float(q)) == tuple(round(x[0], 4) for x in (answer.records[2].p, answer.records[2].q))
    widget.get_by_role("button", name="step ▶").click()
    assert step_of(widget) == 4
    press(widget.locator("input[type=range]"), "End")
    assert step_of(widget) == len(answer.steps)


def check_mask(widget):
    "Without the clause that keeps conversations apart entries leak"
    leaks = widget.locator("td[data-number=leak]")
    assert leaks.get_attribute("data-value") == "0"
    widget.get_by_label("same document", exact=True).uncheck()
    assert int(leaks.get_attribute("data-value")) > 0
    widget.get_by_label("same document", exact=True).check()


def opened(path, widgets, problems, shots=None):
    "The page in each width and scheme, when its widgets are there; what is wrong with its looks goes to `problems`"
    if (size := path.stat().st_size) > MAX_BYTES:
        problems.append(f"{path.stem} has {size:,} bytes; {MAX_BYTES:,} are the most")
    with browser() as b:
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            page = b.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            watch(page, problems)
            page.goto(path.as_uri())
            page.wait_for_function(f"document.querySelectorAll({READY!r}).length == {widgets}")
            excess = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            if excess > 0:
                problems.append(f"{excess} px wider than a window of {width} px")
            for found in Axe().run(page).response["violations"]:
                if found["impact"] in ("serious", "critical"):
                    problems.append(f"{scheme}: {found['help']}: {found['nodes'][0]['html'][:150]}")
            if shots:
                page.screenshot(path=Path(shots) / f"{path.stem}-{width}-{scheme}.png", full_page=True)
            yield page
            page.close()


def check(path, answers, shots=None):
    "What is wrong with the report, as a list of lines"
    problems = []
    for page in opened(path, len(answers) + 1, problems, shots):
        widgets = page.locator(READY)
        for i, answer in enumerate(answers):
            if i:
                page.locator("summary").nth(i).press("Enter")
            check_debugger(widgets.nth(i), answer)
        check_mask(widgets.last)
    return problems


def check_runs(path, shots=None):
    "What is wrong with the page of runs: the table sorts, a row draws its curve, a line is selected, steps are shown"
    problems = []
    for page in opened(path, 1, problems, shots):
        table, curves = page.locator("table").nth(1), page.locator("svg polyline")
        names = table.locator("tbody td:first-child")
        table.locator("th").first.click()
        assert names.all_inner_texts() == ["shipped", "untrained"]
        table.locator("th").first.press("Enter")
        assert names.all_inner_texts() == ["untrained", "shipped"]
        assert curves.count() == 2
        names.first.click()
        assert curves.count() == 1
        table.locator("tbody td:last-child").first.click()
        line = page.evaluate("getSelection().toString()").strip()
        assert line == f'debug_runs("{path.parent / "untrained"}")' and curves.count() == 1
        both = page.locator(READY).locator(".snb-run")
        assert both.locator(".snb-name").all_inner_texts() == ["shipped, seed 0", "untrained, seed 0"]
        short, long = (int(text.split()[3].strip(";")) for text in both.locator("p:nth-child(2)").all_inner_texts())
        assert short < long
        assert page.locator("pre").inner_text().endswith(", prompt=0)")
    return problems


def main(shots=None):
    with tempfile.TemporaryDirectory() as folder:
        html, answers = small_report(Path(folder))
        path = Path(folder) / "report.html"
        path.write_text(html)
        problems = check(path, answers, shots) + check_runs(small_runs_page(Path(folder)), shots)
        assert not problems, "\n".join(problems)
    print(f"report: {len(html):,} bytes, {len(answers)} answers to step through, a mask to touch")


if __name__ == "__main__":
    main(*sys.argv[1:])
