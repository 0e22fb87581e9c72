#!/usr/bin/env python
"""Every internal link of the built site leads somewhere: pages, anchors, pictures, scripts. No other site is
fetched.

python tests/browser/links.py docs/_site
"""

import html
import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINK = re.compile(r'\s(?:href|src)="([^"]*)"')
ANCHOR = re.compile(r'\s(?:id|name)="([^"]*)"')
SCRIPT = re.compile(r"(<script\b[^>]*>).*?</script>", flags=re.S)


def read(page):
    "Links and anchors of a page"
    text = SCRIPT.sub(r"\1", page.read_text())
    return [html.unescape(t) for t in LINK.findall(text)], {html.unescape(t) for t in ANCHOR.findall(text)}


def faults(site):
    "What is wrong, one line for each link"
    site = Path(site).resolve()
    pages = {page: read(page) for page in sorted(site.rglob("*.html"))}
    for page, (links, _) in pages.items():
        for link in dict.fromkeys(links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            target = site / path.lstrip("/") if path.startswith("/") else page.parent / path if path else page
            target = target.resolve()
            if not target.is_file():
                yield f"{page.relative_to(site)}: {link}: no such file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target][1]:
                yield f"{page.relative_to(site)}: {link}: no such anchor"


def main(site):
    found = list(faults(site))
    pages = {page: read(page)[0] for page in Path(site).rglob("*.html")}
    assert len(pages) > 5, f"{site} holds {len(pages)} pages: run `make docs` first"
    assert not found, "\n".join(found)
    print(f"links: {sum(len(set(links)) for links in pages.values())} links of {len(pages)} pages lead somewhere")


if __name__ == "__main__":
    main(*sys.argv[1:])
