"""Sphinx settings; `docs/build.py` stages the pages that it reads."""

import html
import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from web.address import site_address

ROOT = Path(__file__).parents[1]
_project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
project, author = _project["name"], _project["authors"][0]["name"]
release = re.search(r'__version__ = "(.+)"', (ROOT / "speculators_nb/__init__.py").read_text())[1]
copyright = "2026, " + author
html_title = project
html_logo = html_favicon = "_static/logo.svg"
html_extra_path = ["_src/extra"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "version.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

exclude_patterns = ["files/**", "extra/**"]  # downloads and what is copied as it is: not pages

extensions = ["myst_nb", "web.formulas", "sphinx_copybutton"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["custom.css", "site.css"]
html_js_files = ["scroll.js", ("site.js", {"defer": "defer"})]
html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # it fetches the page of every result; `search_words` has a sentence of each
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "github-dark"

# the notebooks carry their outputs: nothing runs here
nb_execution_mode = "off"
nb_output_stderr = "remove"
nb_merge_streams = True
nb_ipywidgets_js = {}  # else every page asks two CDNs for requirejs and widgets
html_math_renderer = "mathml"

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
myst_url_schemes = ["http", "https", "mailto"]
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
copybutton_exclude = ".linenos, .gp, .go"


def page_context(app, page, template, context, doctree):
    "What a page's head says to sites that link to it; the first page leads to the first tutorial"
    up, titles = site_address() or "../" * page.count("/"), app.env.titles
    title = titles[page].astext() if page in titles else project
    context["metatags"] = context.get("metatags", "") + (
        f'<meta property="og:title" content="{html.escape(title)}">\n'
        f'<meta property="og:description" content="{_project["description"]}">\n'
        f'<meta property="og:image" content="{up}card.png">\n<meta name="twitter:card" content="summary_large_image">\n'
    )
    if page == "search":
        app.add_js_file("made/search_words.js", loading_method="defer")
        app.add_js_file("search.js", loading_method="defer")
    if page == "index":
        first = min(name for name in app.env.found_docs if name.startswith("tutorials/"))
        context["next"] = {"link": f"{first}.html", "title": titles[first].astext()}


def add_widgets(app, pagename, templatename, context, doctree):
    "A page with a widget loads the modules that draw it"
    if 'class="snb-widget"' in context.get("body", ""):
        app.add_css_file("widgets/widget.css")
        app.add_js_file("widgets/mount.js", type="module")


def setup(app):
    app.connect("html-page-context", page_context)
    app.connect("html-page-context", add_widgets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
