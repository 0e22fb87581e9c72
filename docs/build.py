#!/usr/bin/env python
"""Build the site: nbs/ -> docs/_src -> Sphinx (myst-nb, furo) -> docs/_site. Nothing is executed and nothing is
fetched.

A page is its notebook with the stored outputs; below a module's notebook stands its reference. The parts are in
docs/web.
"""

import os
import shutil
import subprocess
import sys

from web.finish import finish
from web.pages import stage
from web.places import DOCS, ROOT, SITE, SRC


def widgets():
    "The modules of the widgets and their style, which docs/conf.py puts on the pages that have a widget"
    shutil.copytree(ROOT / "speculators_nb/widgets/js", DOCS / "_static/widgets", dirs_exist_ok=True)


def main():
    widgets()
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-j",
        "auto",
        "-b",
        "html",
        "-c",
        DOCS,
        "-d",
        DOCS / "_src/.doctrees",
        SRC,
        SITE,
    ]
    done = subprocess.run(command, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    shutil.rmtree(DOCS / "jupyter_execute", ignore_errors=True)  # myst-nb's copies, which no page needs
    if done.returncode:
        sys.exit("docs: Sphinx found the problems above")
    finish(SITE)
    print(
        f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}: open "
        f"{(SITE / 'index.html').relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
