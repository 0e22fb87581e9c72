"""What a page links to at the project's address, and when its file was last changed. The address is `git_url` of
pyproject.toml; while it is empty, pages have none of these links."""

import subprocess
from functools import cache
from urllib.parse import quote, urlsplit

from web import places

BRANCH = "main"


def repository():
    "OWNER/NAME of the project's address; empty: it has none"
    return urlsplit(places.GIT_URL).path.strip("/")


def site_address():
    "Where GitHub Pages shows the site, ending in a slash; empty: there is no address"
    owner, _, name = repository().partition("/")
    return f"https://{owner.lower()}.github.io/{name}/" if owner else ""


def notebook_links(here):
    "Links that open a notebook of the repository somewhere else"
    if not places.GIT_URL:
        return []
    colab = f"https://colab.research.google.com/github/{repository()}/blob/{BRANCH}/{here}"
    binder = f"https://mybinder.org/v2/gh/{repository()}/{BRANCH}?labpath={quote(here, safe='')}"
    return [f"[open in Colab]({colab})", f"[open in Binder]({binder})"]


def file_links(here):
    "Links to edit a file of the repository, and to report a problem with its page"
    if not places.GIT_URL or not (places.ROOT / here).is_file():
        return []
    edit = f"{places.GIT_URL}/edit/{BRANCH}/{here}"
    report = f"{places.GIT_URL}/issues/new?title={quote(here, safe='')}"
    return [f"[edit]({edit})", f"[report a problem]({report})"]


@cache
def changes():
    "file -> day of the last commit that changed it; empty without git, or without its history"
    git = ["git", "-C", places.ROOT]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        return {}
    command = [*git, "log", "--format=//%cs", "--name-only", "--no-renames", "-m", "--first-parent"]
    days, day = {}, ""
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("//"):
            day = line[2:]
        elif line:
            days.setdefault(line, day)
    return days


def last_changed(here):
    "When, in words, as a list; empty: git does not say"
    day = changes().get(here)
    return [f"last changed on {day}"] if day else []
