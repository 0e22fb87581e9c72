"""Where things are: folders, and the pages of the site that are no notebook."""

import tomllib
from pathlib import Path

import conformance

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
SRC, SITE = DOCS / "_src", DOCS / "_site"
EXTRA = SRC / "extra"  # copied to the site's root as it is
MADE_STATIC = DOCS / "_static/made"  # scripts that are written by the build
LIB = "speculators_nb"
# file of the repository -> page, in the groups of the sidebar
STARTS = {  # why one comes -> pages, in the order of reading
    "Begin": ("installation", "from_chats"),
    "Know what holds": ("measured", "verifiers", "changelog"),
    "Find": ("notebooks", "glossary", "gallery", "papers"),
}
START = {
    "CHANGELOG.md" if page == "changelog" else f"docs/{page}.md": f"{page}.md"
    for pages in STARTS.values()
    for page in pages
}
GUIDES = {
    f"docs/{page}.md": f"{page}.md"
    for page in (
        "which_drafter",
        "first_run",
        "on_a_cluster",
        "llama_cpp",
        "how_much_data",
        "low_acceptance",
        "coming_from_speculators",
        "coming_from_specforge",
    )
}
INTERNALS = {
    "docs/architecture.md": "architecture.md",
    "docs/differences.md": "differences.md",
    "docs/conformance.md": "conformance.md",
    "docs/release.md": "release.md",
    "CONTRIBUTING.md": "contributing.md",
}
PAGES = START | GUIDES | INTERNALS
DRAFTERS = [  # their notebooks are a group of their own; all others of a package are below Internals
    "models/05_eagle.ipynb",
    "models/04_eagle3.ipynb",
    "models/08_peagle.ipynb",
    "models/10_dflash.ipynb",
    "models/11_dspark.ipynb",
    "models/12_dflash2.ipynb",
    "models/13_xpress.ipynb",
    "models/21_domino.ipynb",
    "models/22_lilicorr.ipynb",
    "models/16_mtp.ipynb",
    "models/15_query_only.ipynb",
    "models/18_mlp_speculator.ipynb",
    "models/19_medusa.ipynb",
    "decode/05_ngram.ipynb",
    "decode/07_suffix.ipynb",
    "decode/08_draft_model.ipynb",
]
MADE = {
    "docs/conformance.md": conformance.page,  # no file holds it
}
FILES = "files"  # on the site: files of the repository that pages link to
# empty: the project has no address yet
GIT_URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nbdev"]["git_url"]
