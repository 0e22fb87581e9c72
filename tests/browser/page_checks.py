"""What every page of the site must hold: its weight, its width in windows of a phone and of a desk, and what axe-core
says of it."""

from axe_playwright_python.sync_playwright import Axe

MAX_BYTES = 1_500_000  # a page and all that it loads
WIDTHS = (390, 1024, 1400)
DESK = 1024  # from this width on, no line of an output is cut off, and on a phone none of code
EXAMINED = (  # one of each kind, light and dark
    "index.html",
    "tutorials/06_one_distribution_four_rules.html",
    "models/05_eagle.html",
    "decode/02_acceptance_rules.html",
    "decode/11_generate.html",
    "doctor/01_doctor.html",
    "commands/train.html",
    "which_drafter.html",
    "conformance.html",
    "glossary.html",
    "genindex.html",
    "search.html?q=rejection+sampling",
)
# the page, the column of its text (which furo lets scroll on a phone), a widget, and code that is wider than its box
LAYOUT = """desk => {
  const excess = e => e.scrollWidth - e.clientWidth;
  const shown = [...document.querySelectorAll("pre")].filter(p => desk || !p.closest(".cell_output"));
  const code = shown.filter(p => p.offsetParent && excess(p) > 0);
  const boxes = [document.documentElement, ...document.querySelectorAll(".content, .snb-root")];
  const page = Math.max(...boxes.map(excess));
  return [page, code.map(p => p.innerText.split("\\n").reduce((a, b) => a.length < b.length ? b : a))];
}"""
BYTES = """performance.getEntries().reduce((n, e) => n + (e.encodedBodySize || 0), 0)"""


def weight(page, name):
    "What is too heavy on the loaded page, as a list of lines"
    n = page.evaluate(BYTES)
    return [f"{name} loads {n:,} bytes; {MAX_BYTES:,} are the most"] if n > MAX_BYTES else []


def layout(page, name):
    "What is wider than it may be on the loaded page, as a list of lines"
    problems = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        excess, code = page.evaluate(LAYOUT, width >= DESK)
        if excess > 0:
            problems.append(f"{name}: the page or a widget is {excess} px wider than fits a window of {width} px")
        problems += [f"{name}: a window of {width} px cuts off {line!r}" for line in code]
    return problems


def accessibility(browser, url):
    "Serious and critical findings of axe-core on the examined pages, as a list of lines"
    problems, axe = [], Axe()
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
        for name in EXAMINED:
            page.goto(f"{url}/{name}", wait_until="networkidle")
            for finding in axe.run(page).response["violations"]:
                if finding["impact"] in ("serious", "critical"):
                    nodes = finding["nodes"]
                    problems.append(
                        f"{name} ({scheme}): {finding['help']} ({finding['id']}): {len(nodes)} ×, such as "
                        f"{nodes[0]['html'][:150]}"
                    )
        page.close()
    return problems
