#!/usr/bin/env python
"""Write tests/fixtures/upstream_names.json: the public names of speculators 0.9.0, the options of its training command
and the data sets that it knows by a word.

HF_HUB_OFFLINE=1 benchmarks/.venv-upstream/bin/python tests/parity/record_names.py
"""

import ast
import json
from pathlib import Path

import speculators

FIXTURE = Path(__file__).parents[1] / "fixtures/upstream_names.json"
HOME = Path(speculators.__file__).parent
PARTS = ["config", "convert", "data_generation", "losses", "model", "models", "proposals", "train", "utils"]


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
    return sorted({name for name in found if not name.startswith("_") and name != "logger"})


def options():
    "The options of its training command: what its schema says."
    from speculators.train.config.schema import CONFIG_DESTS

    return sorted(f"--{name.replace('_', '-')}" for name in CONFIG_DESTS)


def presets():
    "The data sets that its commands know by a word: id, subset, split."
    from speculators.data_generation.configs import DATASET_CONFIGS

    return {word: [found.hf_path, found.subset, found.split] for word, found in DATASET_CONFIGS.items()}


def written(record):
    "As JSON, an entry of each table on a line."
    lines = []
    for key, value in sorted(record.items()):
        text = json.dumps(value, sort_keys=True)
        if isinstance(value, dict):
            entries = (f"  {json.dumps(name)}: {json.dumps(value[name], sort_keys=True)}" for name in sorted(value))
            text = "{\n" + ",\n".join(entries) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def main():
    names = {}
    for file in sorted(HOME.rglob("*.py")):
        module = ".".join(file.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__")
        if module.split(".")[0] in PARTS and module != "losses.fused" and (found := public(file)):
            names[module] = found
    record = dict(version="0.9.0", names=names, options=options(), presets=presets())
    FIXTURE.write_text(written(record) + "\n")
    print(f"{sum(map(len, names.values()))} names")


if __name__ == "__main__":
    main()
