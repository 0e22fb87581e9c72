"""Sphinx settings; `docs/build.py` stages the pages that it reads."""

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
ROOT = Path(__file__).parents[1]
_project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
project, author = _project["name"], _project["authors"][0]["name"]
copyright = "2026, " + author
html_title = project

exclude_patterns = ["files/**"]  # downloads, not pages

extensions = ["myst_nb", "web.formulas", "sphinx_copybutton"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_js_files = ["scroll.js"]
html_copy_source = html_show_sourcelink = False
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


def add_widgets(app, pagename, templatename, context, doctree):
    "A page with a widget loads the modules that draw it"
    if 'class="snb-widget"' in context.get("body", ""):
        app.add_css_file("widgets/widget.css")
        app.add_js_file("widgets/mount.js", type="module")


def setup(app):
    app.connect("html-page-context", add_widgets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
