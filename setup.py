"""What the wheel leaves out: the makers of the shipped data. Their commands (`python -m speculators_nb.lab.corpus`,
`python -m speculators_nb.lab.tiny_verifier`) are run from a clone, whose data/ they write."""

from setuptools import setup
from setuptools.command.build_py import build_py

MAKERS = "corpus", "tiny_model", "tiny_verifier"
CLONE_ONLY = {("speculators_nb.lab", maker) for maker in MAKERS}


class WithoutMakers(build_py):
    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] not in CLONE_ONLY]


setup(cmdclass={"build_py": WithoutMakers})
