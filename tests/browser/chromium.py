"""A headless Chromium whose every request, error and missing file is written down."""

import contextlib
import functools
import http.server
import os
import shutil
import threading
from urllib.parse import urlparse

from playwright.sync_api import sync_playwright


def executable():
    "The browser that the system has; playwright downloads none"
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise SystemExit("no Chromium found: install the package 'chromium' (make browser-test does it as root on Debian)")


@contextlib.contextmanager
def browser():
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=executable(), args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield b
        b.close()


@contextlib.contextmanager
def serve(folder):
    "The folder on a free port of localhost"

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def is_local(url):
    return urlparse(url).scheme in ("data", "blob", "about", "file") or urlparse(url).hostname in (
        "127.0.0.1",
        "localhost",
    )


def watch(page, problems):
    "Append whatever goes wrong on `page` to `problems`; a request that would leave this machine is refused"

    def route(r):
        if is_local(r.request.url):
            return r.continue_()
        problems.append(f"{page.url}: asks {r.request.url}")
        r.abort()

    page.route("**/*", route)
    page.on("pageerror", lambda e: problems.append(f"{page.url}: {e}"))
    page.on("console", lambda m: problems.append(f"{page.url}: {m.text}") if m.type == "error" else None)
    page.on("response", lambda r: problems.append(f"{page.url}: {r.status} {r.url}") if r.status >= 400 else None)
