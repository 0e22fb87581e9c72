#!/usr/bin/env python
"""Write tests/fixtures/upstream_names.json: the public names of speculators 0.9.0 and what one call of each answers.

benchmarks/.venv-upstream/bin/python tests/parity/record_names.py
"""

import ast
import json
import sys
import warnings
from importlib import import_module
from pathlib import Path

import speculators
from speculators.losses import eager

sys.path.insert(0, str(Path(__file__).parent))
import named_calls

FIXTURE = Path(__file__).parents[1] / "fixtures/upstream_names.json"
HOME = Path(speculators.__file__).parent
PARTS = ("config", "model", "models", "proposals", "losses", "convert")


def public(file):
    "Names that a module lists in `__all__`, or else defines without an underscore."
    defined, listed = [], None
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "__all__":
                listed = ast.literal_eval(node.value)
            defined.append(node.targets[0].id)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.append(node.target.id)
    found = defined if listed is None else listed
    return sorted({name for name in found if not name.startswith("_") and name != "logger"}), listed is not None


def options():
    "The options of its training command: what its schema says."
    from speculators.train.config.schema import CONFIG_DESTS

    return sorted(f"--{name.replace('_', '-')}" for name in CONFIG_DESTS)


def presets():
    "The data sets that its commands know by a word: id, subset, split."
    from speculators.data_generation.configs import DATASET_CONFIGS

    return {word: [found.hf_path, found.subset, found.split] for word, found in DATASET_CONFIGS.items()}


def main():
    warnings.simplefilter("ignore")
    named_calls.LOSS["loss_fn"] = eager.kl_div_loss
    modules, answers = {}, {}
    for file in sorted(HOME.rglob("*.py")):
        module = ".".join(file.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__")
        if module.split(".")[0] in PARTS and module != "losses.fused":
            names, listed = public(file)
            modules[module] = dict(names=names, listed=listed)
    for name in named_calls.CALLS:
        module, _, attribute = name.rpartition(".")
        answers[name] = named_calls.call(name, getattr(import_module(f"speculators.{module}"), attribute))
    record = dict(version="0.9.0", modules={m: v for m, v in modules.items() if v["names"]}, answers=answers)
    record |= dict(options=options(), presets=presets())
    FIXTURE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(f"{sum(len(v['names']) for v in modules.values())} names, {len(answers)} calls")


if __name__ == "__main__":
    main()
