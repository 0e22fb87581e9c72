"""Where things are: folders, and the pages of the site that are no notebook."""

import tomllib
from pathlib import Path

import conformance
import migration

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
SRC, SITE = DOCS / "_src", DOCS / "_site"
LIB = "speculators_nb"
PAGES = {
    "docs/glossary.md": "glossary.md",
    "docs/architecture.md": "architecture.md",
    "docs/verifiers.md": "verifiers.md",
    "docs/differences.md": "differences.md",
    "docs/conformance.md": "conformance.md",
    "docs/release.md": "release.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}  # beside the notebooks
GUIDES = {
    f"docs/{page}.md": f"{page}.md"
    for page in (
        "which_drafter",
        "first_run",
        "how_much_data",
        "low_acceptance",
        "coming_from_speculators",
        "coming_from_specforge",
    )
}  # a group of the sidebar, after Start
MADE = {
    "docs/conformance.md": conformance.page,  # no file holds it
    "docs/coming_from_speculators.md": migration.page,  # numbers are filled in
}
FILES = "files"  # on the site: files of the repository that pages link to
# empty: the project has no address yet
GIT_URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nbdev"]["git_url"]
