"""The finished pages: what the theme leaves out of their HTML and a reader with a screen reader needs."""

# HTML as Sphinx and furo write it -> as WAI-ARIA has it
MENDS = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    "\n\n<dl>\n<dd>": '\n\n<dl role="presentation">\n<dd>',  # parameters of a long signature: no terms
}


def finish(site):
    "Mend every page of the built site, in place"
    for path in site.rglob("*.html"):
        text = mended = path.read_text()
        for written, meant in MENDS.items():
            mended = mended.replace(written, meant)
        if mended != text:
            path.write_text(mended)
