#!/usr/bin/env python
"""Use every widget as a reader without a kernel would: on the built site, and in a file that no server serves. Each
number that JavaScript computes is compared with Python's. lab_widgets.py uses them in JupyterLab.

    python tests/browser/widgets.py docs/_site [folder for screenshots]

CHECKS has one function for each widget, by its name: (the widget on the page, its state) -> None.
"""

import base64
import bisect
import functools
import itertools
import json
import math
import operator
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from axe_playwright_python.sync_playwright import Axe
from chromium import browser, serve, watch

from speculators_nb.evaluate.speedup import best_gamma, draft_schedule
from speculators_nb.nn.attention import Mask
from speculators_nb.widgets.mask_explorer import PACKINGS, drafter_mask, entry_counts, reasons, without
from speculators_nb.widgets.mask_explorer import clauses as clauses_of
from speculators_nb.widgets.playground import Drafting, Machine, surface
from speculators_nb.widgets.prompt_lookup import PromptLookup, words
from speculators_nb.widgets.tree_growth import MOST_NODES, accepted_path, kept_nodes, tree_counts
from speculators_nb.widgets.widget import Widget, embed

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
    assert list(state["values"]) == list(first)
    for name, value in state["values"].items():  # stored on another processor: its sums may end in another bit
        assert abs(value["accepted"] - first[name].accepted) < 1e-9, (name, value["accepted"], first[name].accepted)
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


def check_scroll(place):
    "A long text stays where it is while draft tokens are looked at, and the step that is chosen can be seen"
    texts = place.locator(".snb-output")
    text, steps = texts.last, texts.last.locator(".snb-step")
    seen = "e => [e.scrollHeight > e.clientHeight, e.scrollTop]"
    if not text.evaluate(seen)[0]:
        return  # a short text
    steps.last.click()
    down = place.locator(".snb-output").last.evaluate(seen)[1]
    assert down > 0, "the text has gone back to its beginning"
    inside = "e => { const o = e.closest('.snb-output').getBoundingClientRect(), b = e.getBoundingClientRect();"
    inside += " return b.top >= o.top - 1 && b.bottom <= o.bottom + 1; }"
    assert place.locator(".snb-output").last.locator("[aria-current]").evaluate(inside), "the chosen step is hidden"
    for token in place.locator("tbody button").all()[:2]:
        token.hover()
        assert place.locator(".snb-output").last.evaluate(seen)[1] == down, "the text has moved"
    place.get_by_label("output token").press("Home")
    assert place.locator(".snb-output").last.locator("[aria-current]").evaluate(inside), "the first step is hidden"


def check_debugger(widget, state):
    "At every third output token, for each run: mean length, p, q, min(p, q), the fate of each draft token; the list"
    slider = widget.locator("input[type=range]")
    for position in range(1, int(slider.get_attribute("max")) + 1):
        if position % 3 == 1:
            for i, run in enumerate(state["runs"]):
                check_run(widget.locator(".snb-run").nth(i), run, position)
        press(slider, "ArrowRight")
    for row in widget.locator("tbody tr").all()[:1]:
        row.hover()  # a pointer that rests over the table changes nothing
    for i, row in enumerate(state["worst"][:3]):
        widget.locator("select").select_option(str(i))
        step = state["runs"][row["run"]]["steps"][row["step"]]
        chosen = widget.locator(".snb-run").nth(row["run"]).locator("tr:has([aria-pressed=true])")
        p, q = step["p"][row["node"]], step["q"][row["node"]]
        assert chosen.locator("td").all_inner_texts()[:3] == [f"{x:.4f}" for x in (p, q, min(p, q))], row
        assert chosen.locator("td").last.inner_text() == "rejected", row
    check_scroll(widget)


def check_run(run, state, position):
    "One run of the debugger, at the step that wrote this output token"
    ends = list(itertools.accumulate((len(step["tokens"]) for step in state["steps"]), initial=1))
    step = state["steps"][min(bisect.bisect_right(ends, position) - 1, len(state["steps"]) - 1)]
    assert run.locator(".snb-mean").inner_text() == f"{(ends[-1] - 1) / len(state['steps']):.4f}"
    rows = [row.split() for row in run.locator("tbody tr td").all_inner_texts()]
    shown = [sum(rows[i : i + 5], []) for i in range(0, len(rows), 5)]
    numbers = [
        [f"{x:.4f}" for x in (p, q, min(p, q), chance)] for p, q, chance in zip(step["p"], step["q"], step["chance"])
    ]
    assert [row[:4] for row in shown] == numbers, (position, shown)
    assert [node for node, row in enumerate(shown) if row[4] == "accepted"] == sorted(step["path"])


def choose(widget, label, value):
    "Take a choice of a menu"
    widget.get_by_label(label, exact=True).select_option(str(value))


def numbers(widget, column):
    "name -> value of a column of the widget's table"
    cells = widget.locator(f"tbody tr td:nth-child({column + 2})[data-number]")
    return dict(cells.evaluate_all("all => all.map(c => [c.dataset.number, Number(c.dataset.value)])"))


def frozen_mask_of(node, clauses, queries, keys):
    "The mask that a tree of clauses describes, from their bits"
    if "join" in node:
        parts = [frozen_mask_of(part, clauses, queries, keys) for part in node["parts"]]
        if node["join"] == "not":
            return ~parts[0]
        return functools.reduce(operator.and_ if node["join"] == "and" else operator.or_, parts)
    clause = clauses[node["clause"]]
    bits = np.unpackbits(np.frombuffer(base64.b64decode(clause["bits"]), np.uint8))
    dense = torch.from_numpy(bits[: queries * keys].reshape(queries, keys).astype(bool))
    return Mask(lambda b, h, q, kv: dense[q, kv], None, clause["name"])


def check_mask(widget, mask, queries, keys, side):
    "The numbers of the mask, without each clause in turn, and what three entries are said to be"
    figure, full = widget.locator("svg.snb-mask"), mask.dense(queries, keys)
    box = figure.bounding_box()
    unit = box["width"] / (keys * 10 + 4)
    for q, k in ((0, 0), (queries - 1, 0), (queries // 2, keys - 1)):
        figure.hover(position={"x": (k * 10 + 7) * unit, "y": (q * 10 + 7) * unit})
        verb, holds = ("attends to", "true") if full[q, k] else ("does not attend to", "false")
        text = widget.locator(".snb-reading").inner_text()
        assert text.startswith(f"Query {q} {verb} key {k}"), text
        assert text.endswith(f"{holds}: {', '.join(reasons(mask, q, k))}."), text
    for clause in [None, *clauses_of(mask)]:
        box = widget.get_by_label(clause, exact=True) if clause else None
        if box:
            box.uncheck()
        left = without(mask, queries, keys, [clause])
        counts = entry_counts(Mask(lambda b, h, q, kv, left=left: left[q, kv]), queries, keys, side)._asdict()
        counts |= {"leak": int((left & ~full).sum()), "lost": int((full & ~left).sum())}
        found = numbers(widget, 0)
        assert set(found) == set(counts)
        for name, value in counts.items():
            assert abs(found[name] - value) < 1e-9, (clause, name, found[name], value)
        if box:
            box.check()


def check_mask_explorer(widget, state):
    "Some settings (the browser's values against the library's functions) and sides of a block"
    settings = list(state["views"])
    for side, setting in zip((8, 4, 16), [settings[0], settings[len(settings) // 3], settings[-1]]):
        for menu, value in zip(state["menus"], setting.split("|")):
            choose(widget, menu["label"], value)
        choose(widget, "side of a block", side)
        frozen = state["masks"][state["views"][setting]]
        size = frozen["queries"], frozen["keys"]
        mask = frozen_mask_of(frozen["tree"], state["clauses"], *size)
        if setting:
            drafter, packing, window, depth, anchors = setting.split("|")
            documents = torch.tensor(PACKINGS[packing])
            true = drafter_mask(drafter, documents, int(depth), int(window) or None, int(anchors))
            assert size == true[1:] and torch.equal(mask.dense(*size), true.mask.dense(*size)), setting
            assert numbers(widget, 1)["allowed"] == frozen["longer"]["allowed"]
        check_mask(widget, mask, *size, side)


def check_playground(widget, state):
    "The surface and vLLM's fields: as it begins, with experts, after a bar was moved, measured"
    name, known = next(iter(state["drafters"].items()))
    rates, machine = list(known["rates"]), Machine()
    cost = widget.locator("label", has_text="drafting costs").locator("output").inner_text()
    assert cost == f"{known['cost']:.2f} passes a {'block' if known['parallel'] else 'token'}"

    def compare(costs):
        speeds = surface(Drafting(rates, known["cost"], known["parallel"]), costs)
        shown = widget.locator("td[data-value]").evaluate_all("all => all.map(c => Number(c.dataset.value))")
        assert np.allclose(shown, [x for row in speeds.values() for x in row], rtol=1e-9, atol=0), name
        fields = draft_schedule({batch: best_gamma(row) for batch, row in speeds.items()})
        assert json.loads(widget.locator(".snb-fields").inner_text()) == fields

    if state["verify"]:
        compare(state["verify"])
        assert not widget.get_by_label("batch size", exact=True).is_visible()  # measured at 1
    choose(widget, "verification", "computed")
    compare(machine)
    press(widget.get_by_label("experts' share of what one token reads"), "ArrowRight", 10)
    press(widget.get_by_label("tokens until computing is slower than reading"), "ArrowLeft", 10)
    compare(machine._replace(expert_share=0.5, ridge=200))
    press(widget.locator("[data-bar='1']"), "PageDown")
    moved = max(round(rates[1] - 0.1, 3), 0)
    rates = [rates[0], moved, *(min(rate, moved) for rate in rates[2:])]
    compare(machine._replace(expert_share=0.5, ridge=200))
    bar, low = widget.locator("[data-bar='0'] .snb-catch"), widget.locator("svg").first
    bar.scroll_into_view_if_needed()
    box, page = bar.bounding_box(), widget.page
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.up()
    shown = [float(x) for x in low.locator("[data-bar]").evaluate_all("b => b.map(x => x.ariaValueNow)")]
    assert abs(shown[0] - 0.5) < 0.02 and shown == sorted(shown, reverse=True), shown
    rates = shown
    compare(machine._replace(expert_share=0.5, ridge=200))


def check_tree_growth(widget, state):
    "Tree and chain of two positions at three depths and budgets; what a node says"
    first = list(state["places"].items())
    for (position, place), top_k in ((first[0], 3), (first[-1], 2)):
        choose(widget, "tokens of the answer so far", position)
        choose(widget, "top_k", top_k)
        tree = place["trees"][str(top_k)]
        for _ in range(3):
            press(widget.get_by_label("depth", exact=True), "ArrowLeft")
            press(widget.get_by_label("budget", exact=True), "ArrowRight", 2)
            depth, budget = (int(widget.get_by_label(x, exact=True).input_value()) for x in ("depth", "budget"))
            kept = kept_nodes(tree, depth, budget)
            straight = kept_nodes(place["chain"], MOST_NODES, budget)
            for column, (nodes, chosen) in enumerate(((tree, kept), (place["chain"], straight))):
                counts, found = tree_counts(nodes, chosen, place["truth"]), numbers(widget, column)
                assert set(counts) == set(found)
                assert all(abs(counts[name] - found[name]) < 1e-9 for name in counts), (position, counts, found)
            accepted = len(accepted_path(tree, kept, place["truth"])) + 1  # and the text so far
            assert widget.locator("svg").first.locator(".snb-node.snb-accepted").count() == accepted
        widget.locator(".snb-node[tabindex]").first.focus()
        assert f"path {math.exp(tree['scores'][kept[0]]):.3f}" in widget.locator(".snb-reading").inner_text()


def check_prompt_lookup(widget, state):
    "Every step of both drafters, as the texts and sliders are changed"
    controls = dict(prompt="a b a b c a", answer="a b a b a b c, a b a", drafter="n-gram", max_n=5, k=4)
    for change in (
        {},
        dict(drafter="suffix"),
        dict(answer="b c a b c a b c d a"),
        dict(drafter="n-gram", k=8, max_n=1),
    ):
        controls |= change
        widget.get_by_label("prompt", exact=True).fill(controls["prompt"])
        widget.get_by_label("answer of the verifier").fill(controls["answer"])
        choose(widget, "drafter", controls["drafter"])
        for name, label in dict(max_n="longest n-gram", k="draft tokens").items():
            widget.get_by_label(label, exact=True).fill(str(controls[name]))
        found = widget.locator(".snb-step").evaluate_all(
            "all => all.map(e => [JSON.parse(e.dataset.draft), Number(e.dataset.accepted)])"
        )
        steps = PromptLookup(state=state, controls=controls).steps()
        assert found == [list(step) for step in steps], (controls, found, steps)
        tokens = len(words(controls["answer"])) - 1
        assert widget.locator(".snb-number").inner_text() == f"{tokens / len(steps):.4f}", controls


CHECKS = {
    "example": check_example,
    "debugger": check_debugger,
    "mask_explorer": check_mask_explorer,
    "playground": check_playground,
    "tree_growth": check_tree_growth,
    "rule_lab": check_rule_lab,
    "prompt_lookup": check_prompt_lookup,
}


# Both views of one model, and what their controls show; a menu that is a command ("jump to…") is no control
TWO_VIEWS = """async ([name, values]) => {
  const { frozenModel } = await import("/_static/widgets/common.js");
  const widget = (await import(`/_static/widgets/${name}.js`)).default;
  const model = frozenModel(values);
  const place = document.body.appendChild(document.createElement("div"));
  const views = [0, 1].map(() => place.appendChild(document.createElement("div")));
  for (const el of views) widget.render({ model, el });
  const spoken = [...views[0].querySelectorAll("input[type=range] + output")].map((e) => e.previousElementSibling);
  const quiet = spoken.filter((e) => !e.ariaValueText).map((e) => e.ariaLabel);
  const all = (el) => [...el.querySelectorAll("input, select, textarea, output")];
  const controls = (el) => all(el).filter((e) => e.options?.[0].value !== "");
  const shown = (el) => controls(el).map((e) => [e.ariaLabel, e.type === "checkbox" ? e.checked : e.value]);
  const found = [];
  for (let i = 0; i < controls(views[0]).length; i++) {
    const control = controls(views[0])[i];
    if (control.type === "checkbox") control.click();
    else if (control.type === "range") control.value = control.value === control.max ? control.min : control.max;
    else if (control.type === "textarea") control.value += " b";
    else if (control.options) control.value = [...control.options].findLast((option) => !option.disabled).value;
    else continue; // an output
    for (const event of ["input", "change"]) control.dispatchEvent(new Event(event));
    const [here, there] = views.map(shown);
    if (JSON.stringify(here) !== JSON.stringify(there)) found.push([control.ariaLabel, here, there]);
  }
  place.remove();
  return { found, quiet };
}"""


def check_views(page, name, values):
    "Two views of one model show the same controls, whichever is used; a slider's value is said as it is shown"
    answer = page.evaluate(TWO_VIEWS, [name, values])
    assert not answer["found"], f"{name}: {answer['found'][0]}"
    assert not answer["quiet"], f"{name}: no aria-valuetext on {answer['quiet']}"


def frozen_values(html):
    "[(name, state and controls)] of the widgets in the text of a page"
    found = re.findall(
        r'<div class="snb-widget" data-widget="(\w+)"><script type="application/json">(.*?)</script>', html, flags=re.S
    )
    return [(name, json.loads(text)) for name, text in found]


def frozen(html):
    "[(name, state)] of the widgets in the text of a page"
    return [(name, values["state"]) for name, values in frozen_values(html)]


def check_page(page, html, problems, shots=None, used=True):
    "Every widget of the open page is drawn, fits, is accessible; used, it computes what Python computes"
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
        if used:
            CHECKS[name](widget, state)
    return [name for name, _ in here]


def on_site(site, shots=None):
    "Widgets of the site at two widths, light and dark, used on a phone's; their names"
    pages = {p: p.read_text() for p in sorted(site.rglob("*.html"))}
    pages = {p: text for p, text in pages.items() if frozen(text)}
    problems, names = [], set()
    with serve(site) as url, browser() as b:
        for i, (width, scheme) in enumerate(itertools.product(WIDTHS, SCHEMES)):
            page = b.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            watch(page, problems)
            for path, html in pages.items():
                page.goto(f"{url}/{path.relative_to(site)}")
                for name, values in frozen_values(html) if i == 0 else ():
                    check_views(page, name, values)
                shot = shots and Path(shots) / f"{path.stem}-{width}-{scheme}"
                names |= {*check_page(page, html, problems, shot, used=i == 0)}
            page.close()
    assert not problems, "\n".join(problems)
    return names


def from_a_file(html, shots=None):
    "A page of one file, opened without a server"
    problems = []
    with tempfile.TemporaryDirectory() as folder, browser() as b:
        path = Path(folder) / "page.html"
        path.write_text(html)
        for i, (width, scheme) in enumerate(itertools.product(WIDTHS, SCHEMES)):
            page = b.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            watch(page, problems)
            page.goto(path.as_uri())
            check_page(page, html, problems, shots and Path(shots) / f"file-{width}-{scheme}", used=i == 0)
            page.close()
    assert not problems, "\n".join(problems)


def one_file(site):
    "A page of one file with the widgets of a page of the site"

    class Debugger(Widget):
        name = "debugger"

        def fallback(self):
            return "<p>no JavaScript</p>"

    (state,) = (s for name, s in frozen((site / "widgets/05_debugger.html").read_text()) if name == "debugger")
    widgets = (Debugger(state=state, controls=dict(position=1, run=0, node=0)) for _ in range(2))
    return (
        f'<!doctype html><html lang="en"><title>debugger</title><main><h1>Debugger</h1>{embed(*widgets)}</main></html>'
    )


def main(site, shots=None):
    site = Path(site)
    used = on_site(site, shots)
    from_a_file(one_file(site), shots)
    modules = {p.stem for p in (site / "_static/widgets").glob("*.js")} - {"common", "mount"}
    assert used == modules == set(CHECKS), f"on the site {used}, modules {modules}, checked {set(CHECKS)}"
    print(f"widgets: {', '.join(sorted(used))} on the site and in a file")


if __name__ == "__main__":
    main(*sys.argv[1:])
