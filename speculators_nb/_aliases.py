"""Import paths that the public documentation of speculators names, and this package's layout does not have.

Written by hand, as `__init__.py` is. The type checker's view of these paths is in the `.pyi` files.
"""

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

PACKAGE = __name__.rpartition(".")[0]

# documented path -> the module that has its names
DOCUMENTED = {
    "config": "core.config",
    "convert": "models.convert",
    "data_generation": "data.prepare",
    "model": "models.base",
    "models.base_components": "nn.layers",
    "models.dflash.config": "models.dflash",
    "models.dflash.core": "models.dflash",
    "models.eagle3.config": "models.eagle3",
    "models.eagle3.core": "models.eagle3",
    "models.mlp": "models.mlp_speculator",
    "models.mtp.core": "models.mtp",
    "models.peagle.core": "models.peagle",
    "proposals": "core.registry",
    "proposals.greedy": "core.registry",
    "utils": "core.registry",
}

# paths below which there are documented ones; `models` is a folder
PARENTS = {path.rpartition(".")[0] for path in DOCUMENTED if "." in path} - {"models"}


class _Alias(Loader):
    "Loads a documented path: the module that has its names takes its place."

    def __init__(self, path: str) -> None:
        self.path = path

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        target = import_module(f"{PACKAGE}.{DOCUMENTED[self.path]}")
        if self.path in PARENTS:  # a module of its own: a path below it becomes a name in it
            names = {name: value for name, value in vars(target).items() if not name.startswith("_")}
            vars(module).update(names, __path__=[])
        else:
            sys.modules[module.__name__] = target


class _Parent(SourceFileLoader):
    "Loads a module of ours that has documented paths below it."

    def exec_module(self, module):
        super().exec_module(module)
        module.__path__ = []  # as of a package: imports look for paths below it


class _Finder:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        name = fullname.removeprefix(f"{PACKAGE}.")
        if name in DOCUMENTED:
            return ModuleSpec(fullname, _Alias(name))
        if name in PARENTS:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.origin is not None:
                spec.loader = _Parent(fullname, spec.origin)
            return spec
        return None


def install():
    "Let imports find the documented paths. Done once, by the package's `__init__`."
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
