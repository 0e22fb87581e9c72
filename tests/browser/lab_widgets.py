#!/usr/bin/env python
"""Use every widget in JupyterLab with a living kernel: moving a control changes a number that Python computes, and the
widget shows the same number.

    python tests/browser/lab_widgets.py [folder for screenshots]

A notebook is made for it: below each widget a label shows what Python makes of its controls and its state.
"""

import json
import sys
import tempfile
from pathlib import Path

from chromium import browser, watch
from lab_smoke import ERROR, copy_repository, free_port, start_lab

IMPORTS = """
import ipywidgets
from transformers import AutoTokenizer

from speculators_nb.decode.acceptance_rules import Rule, flip, walk
from speculators_nb.decode.generate import generate
from speculators_nb.lab.experiment import heldout_setting
from speculators_nb.lab.shipped import shipped_data
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.widgets.debugger import debug
from speculators_nb.widgets.mask_explorer import explore_mask
from speculators_nb.widgets.playground import playground, surface
from speculators_nb.widgets.prompt_lookup import look_up
from speculators_nb.widgets.rule_lab import RuleLab
from speculators_nb.widgets.tree_growth import grow


def beside(widget, number):
    "A widget, and below it what Python makes of its controls."
    label = ipywidgets.Label().add_class("of-python")
    def show(*change):
        label.value = repr(number(widget))
    widget.observe(show, ["controls", "state"])
    show()
    return ipywidgets.VBox([widget, label])
"""
SETTING = """
data = shipped_data()
drafter = SpeculatorModel.from_pretrained(data / "tiny-drafter", verifier=data / "tiny-verifier").drafter()
verifier, prompts, _, stop = heldout_setting({"eagle3": drafter}, 8)
tokenizer = AutoTokenizer.from_pretrained(data / "tiny-verifier")
"""
MASK = """
def allowed(widget):
    view = "|".join(str(widget.controls[menu["name"]]) for menu in widget.state["menus"])
    mask = widget.state["views"].get(view)
    return widget.state["masks"][mask]["longer"]["allowed"] if mask else 0

beside(explore_mask("eagle3"), allowed)
"""
PLAYGROUND = """
beside(playground(), lambda w: min(min(row) for row in surface(w.drafting(), w.machine()).values()))
"""
TREE = """
beside(grow(drafter, verifier, prompts[7], tokenizer), lambda w: w.counts()["tree"]["accepted"] + w.controls["budget"])
"""
DEBUGGER = """
generation = generate(verifier, drafter, prompts[0], k=4, max_new_tokens=24, eos_token_ids=stop, record=5)

def first_p(widget):
    "p of the first draft token in the step that wrote the token at the slider."
    written = 1
    for step, record in zip(generation.steps, generation.records):
        written += len(step.tokens)
        if widget.controls["position"] < written:
            return record.p[0]

beside(debug(generation, tokenizer), first_p)
"""
RULES = """
def at_least_half(p, children, tree, generator):
    for node in children:
        if flip(p[tree.tokens[node]].clamp(min=0.5), generator):
            return node, p
    return None, p

own = Rule(lambda tree, target, generator=None: walk(at_least_half, tree, target, generator), False, "my own")
beside(RuleLab(own={"at least half": own}), lambda w: w.state["values"]["at least half"]["accepted"])
"""
LOOKUP = """
beside(look_up(), lambda w: sum(len(step.draft) for step in w.steps()))
"""


def press(widget, label, key, times):
    slider = widget.get_by_label(label, exact=True)
    slider.focus()
    for _ in range(times):
        slider.press(key)


def smallest(widget):
    "Of a table's numbers."
    return min(float(x) for x in widget.locator("td[data-value]").evaluate_all("all => all.map(c => c.dataset.value)"))


def number(widget, selector, attribute):
    return float(widget.locator(selector).first.get_attribute(attribute))


# name -> source, how a control is moved, how the number in the widget is read
LIVE = {
    "mask_explorer": (
        MASK,
        lambda w: w.get_by_label("steps, depths or slots", exact=True).select_option("6"),  # not in a page: Python's
        lambda w: float(w.locator("[data-number=allowed]").nth(1).get_attribute("data-value")),
    ),
    "playground": (
        PLAYGROUND,
        lambda w: press(w, "tokens until computing is slower than reading", "ArrowLeft", 10),
        smallest,
    ),
    "tree_growth": (
        TREE,
        lambda w: press(w, "budget", "ArrowLeft", 4),
        lambda w: number(w, "[data-number=accepted]", "data-value") + float(w.get_by_label("budget").input_value()),
    ),
    "debugger": (
        DEBUGGER,
        lambda w: [w.locator("input[type=range]").focus(), *(w.page.keyboard.press("ArrowRight") for _ in range(19))],
        lambda w: float(w.locator("tbody tr td").first.inner_text().split()[0]),
    ),
    "rule_lab": (
        RULES,
        lambda w: press(w, "draft tokens", "ArrowLeft", 1),
        lambda w: number(w, "[data-rule='at least half']", "data-accepted"),
    ),
    "prompt_lookup": (
        LOOKUP,
        lambda w: press(w, "draft tokens", "ArrowRight", 3),
        lambda w: sum(w.locator(".snb-step").evaluate_all("all => all.map(e => JSON.parse(e.dataset.draft).length)")),
    ),
}


def notebook():
    "The notebook as JSON: one cell for each widget."
    sources = [IMPORTS, SETTING, *(source for source, *_ in LIVE.values())]
    cells = [
        dict(cell_type="code", id=f"cell{i}", metadata={}, outputs=[], execution_count=None, source=source.strip())
        for i, source in enumerate(sources)
    ]
    kernel = dict(display_name="Python 3 (ipykernel)", language="python", name="python3")
    return json.dumps(dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5))


def check(page, name, box):
    "Move a control: Python's number changes, and the widget shows it."
    _, move, read = LIVE[name]
    widget, label = box.locator(".snb-root"), box.locator(".of-python")
    before = label.inner_text()
    assert abs(read(widget) - float(before)) < 1e-4, f"{name}: {read(widget)}, Python has {before}"
    move(widget)
    for _ in range(300):
        after = label.inner_text()
        if after != "0" and abs(float(after) - float(before)) > 1e-3 and abs(read(widget) - float(after)) < 1e-4:
            return f"{name} {float(before):.3f} -> {float(after):.3f}"
        page.wait_for_timeout(100)
    raise AssertionError(f"{name}: {read(widget)} in the widget; Python had {before} and has {label.inner_text()}")


def main(shots=None):
    with tempfile.TemporaryDirectory() as folder, browser() as b:
        home, problems, port = Path(folder), [], free_port()
        (home / "work").mkdir()
        copy_repository(home, "widgets/01_widget.ipynb")
        (home / "work/nbs/widgets/live.ipynb").write_text(notebook())
        server = start_lab(home, port)
        try:
            page = b.new_page(viewport={"width": 1400, "height": 1000})
            watch(page, problems)
            page.goto(f"http://127.0.0.1:{port}/lab/tree/widgets/live.ipynb?token=smoke&reset")
            page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            boxes = page.locator(".jp-OutputArea-output .widget-vbox:has(.of-python)")
            for _ in range(180):
                if boxes.count() == len(LIVE) or page.locator(ERROR).count():
                    break
                page.wait_for_timeout(1000)
            assert boxes.count() == len(LIVE), page.locator(ERROR).all_inner_texts()
            for i, name in enumerate(LIVE):
                print("Lab:", check(page, name, boxes.nth(i)), flush=True)
                if shots:
                    boxes.nth(i).screenshot(path=Path(shots) / f"lab-{name}.png")
            page.unroute_all(behavior="ignoreErrors")
            page.close()
        finally:
            server.terminate()
            server.wait(30)
    assert not [p for p in problems if "widget" in p.lower()], "\n".join(problems)


if __name__ == "__main__":
    main(*sys.argv[1:])
