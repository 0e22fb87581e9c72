#!/usr/bin/env python
"""Read the built site as a reader would: every page, no request that leaves this machine, formulas, weight, width,
accessibility, search, links, dark mode.

python tests/browser/site_smoke.py docs/_site [folder for screenshots]
"""

import sys
from pathlib import Path

from chromium import browser, serve, watch
from page_checks import accessibility, layout, weight

SYMBOL = "Eagle3DraftModel"  # what the search must find
TERMS = {  # words of the field -> a page that explains them, which the search must find
    "rejection sampling": "acceptance_rules",
    "residual distribution": "acceptance_rules",
    "target model": "tapped_model",
    "tree attention": "verification",
    "KV cache": "generate",
    "proposer": "glossary",
    "tau": "evaluate/01_acceptance",
    "prompt lookup": "ngram",
    "speculative sampling": "acceptance_rules",
    "draft head": "glossary",
    "2211.17192": "acceptance_rules",
    "write my own loss": "tutorials/20_your_own_loss",
    "write my own drafter": "tutorials/04_write_your_own_drafter",
}
FIRST = {  # words -> the page that is found first
    "verifier": "glossary",
    "tau": "glossary",
    "2211.17192": "papers",
    "write my own loss": "tutorials/20_your_own_loss",
    "write my own drafter": "tutorials/04_write_your_own_drafter",
}
MARKED = "token", "data/02_chat_encoding.html"  # a word, and a page that has "tokenizer" too
WHOLE = "learning rate"  # pages with the words stand before pages with `separate`
PROSE_LINK = "a.reference.internal code.py-obj"  # a `name` in prose that became a link


def main(site, shots=None):
    site, problems, n_math, n_links = Path(site), [], 0, 0
    pages = sorted(str(p.relative_to(site)) for p in site.rglob("*.html"))
    assert len(pages) > 5, f"{site} holds {len(pages)} pages: run `make docs` first"
    with serve(site) as url, browser() as b:
        page = b.new_page(viewport={"width": 1280, "height": 900})
        watch(page, problems)
        for name in pages:
            page.goto(f"{url}/{name}")
            formulas, names = page.locator("math").count(), page.locator(PROSE_LINK).count()
            assert page.locator("h1").count() == 1 or name in ("search.html", "genindex.html", "py-modindex.html"), (
                f"{name} has no single title"
            )
            broken = page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
            assert not broken, f"{name}: broken pictures {broken}"
            problems += weight(page, name) + layout(page, name)
            n_math, n_links = n_math + formulas, n_links + names
        assert n_math and n_links, f"{n_math} formulas, {n_links} linked names in prose: the staging lost them"

        page.set_viewport_size({"width": 1280, "height": 900})
        problems += accessibility(b, url)
        page.goto(f"{url}/search.html?q={SYMBOL}", wait_until="networkidle")
        hit = page.locator("#search-results li a").first
        hit.wait_for(timeout=15000)
        hit.click()
        page.wait_for_load_state("networkidle")
        assert SYMBOL in page.content(), f"the first search result does not speak of {SYMBOL}"

        for words, explained in TERMS.items():
            page.goto(f"{url}/search.html?q={words.replace(' ', '+')}", wait_until="networkidle")
            page.locator("#search-results li a").first.wait_for(timeout=15000)
            page.wait_for_function(
                "document.querySelector('#search-results p.search-summary')?.innerText.includes('found')"
            )
            links = page.locator("#search-results li > a").evaluate_all("links => links.map(link => link.href)")
            assert any(explained in link for link in links), (
                f"a search for {words!r} does not find {explained}: {links}"
            )
            assert FIRST.get(words, "") in links[0], f"a search for {words!r} finds {links[0]} first"
            problems += weight(page, f"a search for {words!r}")
        word, name = MARKED
        page.goto(f"{url}/search.html?q={word}", wait_until="networkidle")
        page.goto(f"{url}/{name}", wait_until="networkidle")
        marked = {text.lower() for text in page.locator("span.highlighted").all_inner_texts()}
        assert word in marked <= {word, f"{word}s", f"{word}es"}, f"a search for {word!r} marks {marked} on {name}"
        page.goto(f"{url}/search.html?q={WHOLE.replace(' ', '+')}", wait_until="networkidle")
        page.locator("#search-results li a").first.wait_for(timeout=15000)
        first = page.locator("#search-results li > a").first.inner_text()
        assert "separate" not in first.lower(), f"a search for {WHOLE!r} finds {first!r} first"

        page.goto(f"{url}/genindex.html", wait_until="networkidle")
        page.get_by_role("link", name=SYMBOL, exact=False).first.click()
        page.wait_for_load_state("networkidle")
        anchor = page.url.split("#")[1]
        assert page.evaluate("a => !!document.getElementById(a)", anchor), (
            f"the index points to a missing anchor {anchor}"
        )

        page.goto(f"{url}/index.html", wait_until="networkidle")
        groups = page.locator(".sidebar-tree > ul > li.has-children > a").all_inner_texts()
        assert groups == ["Start", "Tutorials", "Guides", "Commands", "Drafters", "Internals"], groups
        assert page.locator("a.next-page").get_attribute("href").startswith("tutorials/01")
        colours = {}
        toggle = page.locator("button.theme-toggle:visible").first
        for _ in range(3):
            theme = page.evaluate("document.body.dataset.theme")
            colours[theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            toggle.click()
        assert colours["light"] != colours["dark"], f"the theme toggle changes nothing: {colours}"
        page.goto(f"{url}/models/04_eagle3.html", wait_until="networkidle")
        drawn = {}
        for theme in ("light", "dark"):
            page.evaluate("theme => document.body.dataset.theme = theme", theme)
            drawn[theme] = page.locator(".cell_output img").first.evaluate("e => getComputedStyle(e).filter")
        assert drawn["light"] == "none" and "invert" in drawn["dark"], f"figures are white in the dark: {drawn}"
        page.emulate_media(media="print")
        left = page.locator(".skip-to-content:visible, .sidebar-drawer:visible, .copybtn:visible").count()
        assert not left, f"{left} parts of the frame are printed"
        page.emulate_media(media="screen")

        if shots:
            for scheme in ("light", "dark"):
                for width in (1280, 400):
                    p = b.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                    watch(p, problems)
                    for name in pages:
                        p.goto(f"{url}/{name}", wait_until="networkidle")
                        p.screenshot(
                            path=Path(shots)
                            / f"{Path(name).with_suffix('').as_posix().replace('/', '-')}-{scheme}-{width}.png",
                            full_page=True,
                        )
                    p.close()
    assert not problems, "\n".join(problems)
    print(
        f"site: {len(pages)} pages, {n_math} formulas, {n_links} linked names, search, index and dark mode work; "
        "nothing left this machine"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
