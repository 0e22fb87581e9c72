#!/usr/bin/env python
"""Test what changed, within a time. `make quick` ends with this.

    python tests/changed.py                  what the working tree has changed since HEAD
    python tests/changed.py --base main      what this branch and the working tree have changed since they left main
    python tests/changed.py --list           says what would run

A changed test file runs. A changed notebook `nbs/X/NN_name.ipynb` runs, as do the tests that import its module
`speculators_nb/X/name.py` directly, and those that read the changed file or its folder by name. What ran longest the
last time (more than half of all the time) comes last; what the time does not reach is left out and named.
"""

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / ".pytest_cache/changed.json"  # how long each took the last time


# ---- what changed


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def changed_files(base=None):
    "Paths that differ from where this branch left `base` (None: from HEAD), new files included"
    since = git("merge-base", base, "HEAD").strip() if base else "HEAD"
    listed = git("diff", "--name-only", "--no-renames", "-z", since)
    return sorted({*listed.split("\0"), *git("ls-files", "--others", "--exclude-standard", "-z").split("\0")} - {""})


# ---- what belongs to it


def module_of(path):
    "The name by which Python imports the file, or its notebook's module; None where there is neither"
    if match := re.fullmatch(r"nbs/(\w+)/\d\d_(\w+)\.ipynb", path):
        return f"speculators_nb.{match[1]}.{match[2]}"
    if not path.endswith(".py"):
        return None
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def names_of(path):
    "All names by which a test may import the file: those of tests/ and docs/ are imported by their file's name too"
    module = module_of(path)
    if module is None:
        return set()
    first, *rest = module.split(".")
    return {module, *(".".join(rest[i:]) for i in range(len(rest)))} if first in ("tests", "docs") else {module}


def notebooks_of(path, notebooks):
    "The notebook that is changed, or that a changed module is exported from"
    module = module_of(path) if path.endswith(".py") else None
    return [n for n in notebooks if n == path or (module and module_of(n) == module)]


def imports(source):
    "Every module that the source imports, anywhere in it; `from a import b` counts as a and as a.b"
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def strings(source):
    "Every string of the source"
    return {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def reads(source, path):
    "Does the source name this file, or a folder that holds it?"
    return any(path == text or path.startswith(text.rstrip("/") + "/") for text in strings(source) if text.strip("./"))


def chosen(changed, sources, notebooks):
    """What to run for these changed paths, the nearest first: changed tests, notebooks, the tests that import a changed
    module, the tests that read a changed file. `sources`: test file -> its text; `notebooks`: all of them."""
    tests = [path for path in changed if path in sources]
    cells = [n for path in changed for n in notebooks_of(path, notebooks)]
    used = {name for path in changed if path not in sources for name in names_of(path)}
    users = [test for test, source in sources.items() if used & imports(source)]
    files = [path for path in changed if not path.startswith(("tests/", "speculators_nb/"))]
    readers = [test for test, source in sources.items() if any(reads(source, path) for path in files)]
    return list(dict.fromkeys([*tests, *cells, *users, *readers]))


def ordered(tasks, times, seconds):
    "What took more than half of the time goes last, the shortest of it first; the rest stays as it is"
    return sorted(tasks, key=lambda task: times.get(task, 0) if times.get(task, 0) > seconds / 2 else 0)


# ---- running it


def command(task):
    if task.endswith(".ipynb"):
        return [sys.executable, "tests/notebooks.py", "--workers", "1", task]
    return [sys.executable, "-m", "pytest", "-q", task]


def stop(process):
    "End a process and all that it has started"
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(tasks, seconds, workers, command=command):
    "Run as many as the time allows. Returns task -> (exit status or None where it was stopped, seconds, output)"
    began, waiting, running, results = time.monotonic(), list(tasks), {}, {}
    folder = tempfile.TemporaryDirectory()

    def start(task):
        log = Path(folder.name) / f"{len(results) + len(running)}.txt"
        with open(log, "wb") as out:
            options = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            running[task] = subprocess.Popen(command(task), cwd=ROOT, **options), time.monotonic(), log

    def finish(task, status):
        _, since, log = running.pop(task)
        results[task] = status, time.monotonic() - since, log.read_text(errors="replace")
        verdict = {None: "stopped", 0: "passed", 5: "passed"}.get(status, "FAILED")  # 5: pytest found no test
        print(f"{verdict}  {results[task][1]:6.1f} s  {task}", flush=True)
        if verdict == "FAILED":
            print("    " + "\n    ".join(results[task][2].splitlines()[-60:]), flush=True)

    try:
        while waiting or running:
            late = time.monotonic() - began >= seconds
            while waiting and len(running) < workers and not late:
                start(waiting.pop(0))
            for task, (process, *_) in list(running.items()):
                if process.poll() is not None:
                    finish(task, process.returncode)
                elif late:
                    stop(process)
                    finish(task, None)
            if late:
                break
            time.sleep(0.05)
    finally:  # Ctrl-C too
        for process, *_ in running.values():
            stop(process)
        folder.cleanup()
    return results


def remembered():
    try:
        return {str(task): float(taken) for task, taken in json.loads(TIMES.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def remember(results):
    "Write down how long each took; what was stopped took at least so long"
    before = remembered()
    taken = {task: t if status is not None else max(t, before.get(task, 0)) for task, (status, t, _) in results.items()}
    TIMES.parent.mkdir(exist_ok=True)
    TIMES.write_text(json.dumps(before | taken, indent=1))


def report(tasks, results, seconds):
    "(the last lines, is everything that ran right?)"
    failed = [task for task in tasks if task in results and results[task][0] not in (0, 5, None)]
    left = [task for task in tasks if results.get(task, (None,))[0] is None]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all passed"
    lines = [f"{len(tasks) - len(left)} of {len(tasks)} ran: {verdict}"]
    if left:
        lines.append(f"left out, since {seconds:.0f} s were not enough: {' '.join(left)}")
        lines.append("`make test` runs everything")
    return lines, not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base", help="a commit or branch; HEAD and the working tree alone by default")
    parser.add_argument("--seconds", type=float, default=150, help="time for all of it (150)")
    parser.add_argument("--workers", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--without", default="", help="test files that have run already, with spaces between them")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    args = parser.parse_args()
    sources = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "tests").glob("test_*.py"))}
    found = (p for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts)
    notebooks = [str(p.relative_to(ROOT)) for p in found]
    changed = changed_files(args.base)
    wanted = [task for task in chosen(changed, sources, notebooks) if task not in args.without.split()]
    tasks = ordered(wanted, remembered(), args.seconds)
    print(f"{len(changed)} files differ from {args.base or 'HEAD'}: {len(tasks)} to run", flush=True)
    if args.list:
        print(*tasks, sep="\n")
        return 0
    results = run(tasks, args.seconds, args.workers)
    remember(results)
    lines, fine = report(tasks, results, args.seconds)
    print(*lines, sep="\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
