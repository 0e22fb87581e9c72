"""`--import` names a module or a file that registers drafters.
It is imported before the options are checked, so that its drafters are words of `--algorithm` like ours."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

# a command that takes one of these loads a drafter, or passes modules on to those that do
LOADS = {"algorithm", "drafter", "checkpoint", "folder", "format", "import_"}


def loads_drafters(function: Callable) -> bool:
    "Whether a command has the option `--import`."
    return bool(LOADS & set(inspect.signature(function).parameters))


def _import_file(given: str):
    "Import a file as a module of its name. Errors: FileNotFoundError, ValueError."
    file = Path(given).expanduser().absolute()
    if not file.is_file() or file.suffix != ".py":
        what = "no such file" if not file.exists() else "is no .py file"
        raise FileNotFoundError(f"import={given!r}: {what}; name a .py file, or a module")
    name, there = file.stem, sys.modules.get(file.stem)
    if there is not None and getattr(there, "__file__", None) == str(file):
        return
    if there is not None or not name.isidentifier():
        why = "is imported already" if there is not None else "is no name in Python"
        raise ValueError(f"import={given!r}: a module {name!r} {why}; rename the file")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # as of any file that ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _import_module(given: str):
    "Import a module by its name. Errors: ModuleNotFoundError where Python finds none."
    try:
        found = all(map(str.isidentifier, given.split("."))) and importlib.util.find_spec(given)
    except ModuleNotFoundError:  # of the package that holds it
        found = None
    if not found:
        raise ModuleNotFoundError(
            f"import={given!r}: no such module; install it, put its folder into PYTHONPATH, or "
            "name its file: --import my_drafters.py"
        )
    importlib.import_module(given)


def import_drafters(names: Iterable[str]) -> None:
    """Import what registers drafters. Errors: FileNotFoundError, ModuleNotFoundError or
    ValueError naming a file or a module that is missing, or whose import fails."""
    for given in names:
        is_file = given.endswith(".py") or re.search(r"[\\/]", given)
        try:
            (_import_file if is_file else _import_module)(given)
        except (Exception, SystemExit) as e:
            if str(e).startswith("import="):
                raise
            what = f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
            raise ValueError(
                f"import={given!r}: cannot be imported ({what}); mend it, and try it with "
                "python; --traceback shows the place"
            ) from e
