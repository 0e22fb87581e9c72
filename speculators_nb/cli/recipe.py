"""Recipe files (YAML or JSON) with the arguments of commands: shared values at the top, a section for each command.
The command line goes before the file, the file before the defaults. `--import` names a module or a file that registers
drafters: it is imported before options are checked, so that its drafters are words of `--algorithm` like ours."""

import importlib.util
import inspect
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import yaml

from ..core.files import write_text
from ..core.options import NoEffect, check_options, near, rule_of, shown
from ..core.provenance import NOT_SECRET, SECRET_NAME, without_secrets


class _Strict(yaml.SafeLoader):
    "Plain data only, and each key once."

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)

    def _number(self, node):
        "A number; not one that YAML 1.1 reads in base 8 or 60, which few people mean."
        read = {"int": self.construct_yaml_int, "float": self.construct_yaml_float}
        number = read[node.tag.rpartition(":")[2]](node)
        if ":" in node.value or re.fullmatch(r"[-+]?0[0-7_]+", node.value):
            base = 60 if ":" in node.value else 8
            raise yaml.MarkedYAMLError(
                problem=f"{node.value} is {number} in YAML, which reads it in base {base}; "
                f"write that, or '{node.value}' where it is text",
                problem_mark=node.start_mark,
            )
        return number


for _kind in ("int", "float"):
    _Strict.add_constructor(f"tag:yaml.org,2002:{_kind}", _Strict._number)
# 1e-3 and 2.5e11, which are text in YAML 1.1
_Strict.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _once(pairs):
    "An object of JSON, each key once."
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return found


def with_home(value: Any) -> Any:  # the same
    """A text that begins with ~, or name=~, becomes a path below the home folder, as in a shell; nothing after this
    expands a path. Errors: ValueError for one that begins with a variable."""
    if isinstance(value, dict):
        return {key: with_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_home(inner) for inner in value]
    if not isinstance(value, (str, Path)):
        return value
    name, path = re.findall(r"(?s)^((?:[A-Za-z_][\w-]*=)?)(.*)$", str(value))[0]
    if re.match(r"\$(\w+|\{\w+\})(/|$)", path):
        raise ValueError(
            f"{shown(str(value))}: variables are not filled in; write the path, or ~/… for one below your home folder"
        )
    return type(value)(name + os.path.expanduser(path)) if path.startswith("~") else value


MOST_TEXT, MOST_VALUES, DEEPEST = 2**20, 10_000, 8  # characters, values, levels of a recipe


def _count(content, depth=0, seen=0) -> int:
    "Values in the file, repeated ones as often as they are repeated. Errors: ValueError for too many, or too deep."
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} levels deep")
    inner = content.values() if isinstance(content, dict) else content
    for value in inner if isinstance(content, (dict, list)) else ():
        seen = _count(value, depth + 1, seen + 1)
    if seen > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    return seen


def read_plain(path: Path, what: str, holds: str) -> dict:
    "The mapping in a file as plain data; messages say what it is, and what it holds. FileNotFoundError, ValueError."
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such {what}; it is a YAML or JSON file with {holds}")
    kind = "JSON" if path.suffix == ".json" else "YAML"
    if (size := path.stat().st_size) > MOST_TEXT:
        raise ValueError(f"{path}: has {size:,} bytes, a recipe at most {MOST_TEXT:,}; is this the file?")
    try:
        text = path.read_text(encoding="utf-8")
        if kind == "YAML" and text.count("[") + text.count("{") > 1000:  # PyYAML takes minutes for some thousands
            raise ValueError("more than 1,000 brackets")
        if kind == "JSON":
            content = json.loads(text, object_pairs_hook=_once)
        else:
            content = yaml.load(text, _Strict)
        _count(content)
        content = with_home(content)
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not text in UTF-8 (byte {e.start}); is this a recipe?") from None
    except RecursionError:
        raise ValueError(f"{path}: more than {DEEPEST} levels deep; a recipe has sections and values") from None
    except yaml.YAMLError as e:
        line = f", line {mark.line + 1}" if (mark := getattr(e, "problem_mark", None)) else ""
        raise ValueError(
            f"{path}{line}: not YAML ({getattr(e, 'problem', None) or ' '.join(str(e).split())})"
        ) from None
    except ValueError as e:
        raise ValueError(f"{path}: not {kind} of a recipe ({e})") from None
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ValueError(f"{path}: {found}, expected a mapping with {holds}")
    return content


def spelt(mapping: Mapping, where: str) -> dict[str, Any]:
    "Field names with underscores. ValueError, naming `where`, for one that is given in both spellings."
    fields = {}
    for key, value in mapping.items():
        name = str(key).replace("-", "_")
        if name in fields:
            raise ValueError(
                f"{where}{name}={shown(value)}: is given twice, also as {shown(fields[name])} "
                f"({name} and {name.replace('_', '-')} are one field); leave one out"
            )
        fields[name] = value
    return fields


def _load(path: Path) -> dict:
    "The file as a dictionary; field names with underscores."
    content = read_plain(path, "recipe", "shared values, and a section for each command")
    fields = {}
    for name, value in spelt(content, f"{path}: ").items():
        if isinstance(value, dict):  # a section, named like its command
            section = name.replace("_", "-")
            fields[section] = spelt(value, f"{path}: {section}.")
        else:
            fields[name] = value
    return fields


def sections_of(path: str | os.PathLike) -> list[str]:  # names of commands
    "The sections of a recipe, in their order."
    return [name for name, value in _load(Path(path)).items() if isinstance(value, dict)]


# a command that takes one of these loads a drafter, or passes modules on to those that do
LOADS = {"algorithm", "drafter", "checkpoint", "folder", "format", "import_"}


def loads_drafters(function: Callable) -> bool:
    "Whether a command has the option `--import`."
    return bool(LOADS & set(inspect.signature(function).parameters))


def import_drafters(names: Iterable[str]) -> None:
    """Import what registers drafters. Errors: FileNotFoundError, ModuleNotFoundError or
    ValueError naming a file or a module that is missing, or whose import fails."""
    for given in names:
        is_file = given.endswith(".py") or re.search(r"[\\/]", given)
        try:
            if is_file:
                _import_file(given)
            else:
                importlib.import_module(given)
        except (Exception, SystemExit) as e:
            if str(e).startswith("import="):
                raise
            missing = e.name if isinstance(e, ModuleNotFoundError) and e.name else "."
            is_name = re.fullmatch(r"\w+(\.\w+)*", given)
            if not is_file and (not is_name or f"{given}.".startswith(f"{missing}.")):
                raise ModuleNotFoundError(
                    f"import={given!r}: no such module; install it, put its folder into PYTHONPATH, or "
                    "name its file: --import my_drafters.py"
                ) from None
            what = f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
            raise ValueError(
                f"import={given!r}: cannot be imported ({what}); mend it, and try it with "
                "python; --traceback shows the place"
            ) from e


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


def fields_of(function: Callable) -> dict[str, object]:  # field -> type
    "The fields that a recipe may set, from the function's signature."
    parameters = inspect.signature(function).parameters.values()
    fields: dict[str, object] = {p.name: p.annotation for p in parameters if p.name != "import_"}
    return fields | ({"import": list[str]} if loads_drafters(function) else {})


def _alternatives(kind) -> set:
    "The types of a union, or the one type."
    return set(get_args(kind)) if isinstance(kind, types.UnionType) else {kind}


def _fitted(value, kind):
    """A value of a file in the type of its parameter: a path, a list of one, a list of name=value texts. What it may be
    is for the option's rule to say."""
    kinds = _alternatives(kind)
    if isinstance(value, dict) and list[str] in kinds:
        return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in value.items()]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if float in kinds:
            return float(str(value))  # infinite where it is too large
        if kinds & {str, Path} and int not in kinds:
            value = str(value)  # a folder may be called 2026
    return Path(value) if Path in kinds and isinstance(value, str) and value else value


def _section(values: dict, kinds: Mapping, command: str, where: str) -> dict:
    "The values of one command, each in its type and by its rule."
    fitted = {}
    for field, given in values.items():
        rule, value = rule_of(field, command) or rule_of(f"{field}_"), _fitted(given, kinds[field])
        if rule and rule.kind == "list" and rule.alone and isinstance(value, (str, int, float)):
            value = [value]
        # a file gives no objects of Python
        if rule and (problem := replace(rule, objects=False).problem(value)):
            raise ValueError(f"{where}{field}={shown(given)}: {problem}")
        fitted[field] = value
    return fitted


def command_of(section: str) -> str:
    "The command that a section is for: `evaluate`, also of `evaluate.vllm`."
    return section.partition(".")[0]


def import_first(path: Path, content: dict):
    """Import what registers drafters, which are words of options then. A file that `import` of a recipe or of a section
    names is looked for beside the recipe, then in the working folder. Errors name the recipe."""
    sections = [(f"{n}.", v) for n, v in content.items() if isinstance(v, dict)]
    for where, values in [("", content), *sections]:
        names = values.get("import", [])
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path}: {where}import={shown(names)}: must be a list of modules and .py files")
        files = [path.parent / name for name in names]
        names = [str(f) if f.suffix == ".py" and f.is_file() else name for f, name in zip(files, names)]
        try:
            import_drafters(names)
        except (ValueError, OSError, ImportError) as e:
            raise type(e)(f"{path}: {where}{e}") from e
        if names:
            values["import"] = names


def _parts(path: Path, known: Mapping) -> tuple[dict, dict]:
    "Shared values, and sections in their order: names, types and rules checked."
    content = _load(path)
    import_first(path, content)
    shared, sections = {}, {}
    every = {field for fields in known.values() for field in fields}
    for name, value in content.items():
        section = name.replace("_", "-")
        command = command_of(section)
        if isinstance(value, dict) or (value is None and section in known):
            if command not in known or section.endswith("."):
                raise ValueError(f"{path}: section {section!r}: there is no such command. {near(command, known)}")
            for field, given in (value or {}).items():
                if field not in known[command]:
                    raise ValueError(
                        f"{path}: {section}.{field}={shown(given)}: the command {command} has no such "
                        f"field. {near(field, known[command])}"
                    )
            where = f"{path}: {section}."
            sections[section] = _section(value or {}, known[command], command, where)
            check_options(sections[section], command, before=where)
        elif name in every:
            shared[name] = value
        else:
            raise ValueError(f"{path}: {name}={shown(value)}: no command has such a field. {near(name, every)}")
    return shared, sections


def _shared_by(path, name, commands, known, shared, sections, flags) -> tuple[dict, set]:
    "The shared values that the command of a section takes; those without effect beside its own values and the flags."
    command, section = command_of(name), sections.get(name, {})
    mine = {field: value for field, value in shared.items() if field in known[command]}
    mine = _section(mine, known[command], command, f"{path}: ")
    idle: set[str] = set()
    while True:
        left = {field: value for field, value in mine.items() if field not in idle}
        try:
            check_options(resolve(commands[command], flags, left | section), command)
        except NoEffect as e:
            if e.name in left.keys() - section.keys() - flags.keys():
                idle.add(e.name)
                continue
        except ValueError:
            pass  # is refused where the rest is known
        return mine, idle


def _with_shared(path, name, commands, known, shared, sections, flags) -> dict:
    """A section's values over those shared values that its command takes; one that has no effect here and has one in
    another section is left out."""
    mine, idle = _shared_by(path, name, commands, known, shared, sections, flags)
    read: set[str] = set()
    for other in sections if idle else ():
        if other != name:
            theirs, idle_there = _shared_by(path, other, commands, known, shared, sections, {})
            read |= theirs.keys() - idle_there
    return {field: value for field, value in mine.items() if field not in idle & read} | sections.get(name, {})


def read_recipe(
    path: str | os.PathLike, command: str, commands: Mapping[str, Callable], flags: Mapping | None = None
) -> dict:
    """The values that a recipe has for a command beside its flags: its section over the shared values. ValueError: a
    section, a field, a type or a value that no command takes, with the nearest one that exists."""
    known = {name: fields_of(function) for name, function in commands.items()}
    shared, sections = _parts(Path(path), known)
    return _with_shared(path, command, commands, known, shared, sections, flags or {})


def without_default(function) -> tuple[list[str], list[str]]:  # all; those that may be left out
    "The arguments of a command that have no default; one that may be None may be left out."
    parameters, kinds = inspect.signature(function).parameters.values(), fields_of(function)
    needed = [p.name for p in parameters if p.default is p.empty]
    return needed, [name for name in needed if type(None) in _alternatives(kinds[name])]


def resolve(function: Callable, flags: Mapping, recipe: Mapping | None = None) -> dict:
    """Flag before file before default. An argument that may be None is left out where the next
    one is missing: `evaluate [DRAFTER] DATA`. `import` is there if either names modules.
    ValueError names the argument that none gives."""
    recipe = recipe or {}
    given = {**recipe, **flags}
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    needed, optional = without_default(function)
    for name, following in pairwise(needed):
        if name in optional and name in flags and following not in given:
            given[following] = given.pop(name)
    for name in needed:
        if name not in given and name not in optional:
            raise ValueError(
                f"{name} is missing: give it on the command line, or as {name}: in a recipe (--recipe FILE)"
            )
    defaults |= dict.fromkeys(optional)
    values = {name: given.get(name, default) for name, default in defaults.items()}
    modules = list(dict.fromkeys([*recipe.get("import", ()), *flags.get("import", ())]))
    return values | ({"import": modules} if modules else {})


def read_sections(path: str | os.PathLike, commands: Mapping[str, Callable]) -> dict[str, dict]:
    """All sections of a recipe, in its order, each with the shared values and the defaults.
    Errors: ValueError as of `read_recipe`, and for a section that lacks an argument."""
    path = Path(path)
    known = {name: fields_of(f) for name, f in commands.items()}
    shared, sections = _parts(path, known)
    for name in sections:
        command = command_of(name)
        mine = _with_shared(path, name, commands, known, shared, sections, {})
        needed, optional = without_default(commands[command])
        for field in needed:
            if field not in mine and field not in optional:
                raise ValueError(f"{path}: section {name}: {field} is missing; write {field}: … in it")
        sections[name] = resolve(commands[command], mine)
        check_options(sections[name], command, before=f"{path}: section {name}: ")
    return sections


def recipe_path(output: str | os.PathLike, command: str) -> Path:  # folder/command.recipe.yaml, or file.recipe.yaml
    "Where the recipe of an output is stored. A folder may hold those of several commands."
    output = Path(output)
    return output.with_name(f"{output.name}.recipe.yaml") if output.is_file() else output / f"{command}.recipe.yaml"


# what is done with an output that exists, and which share of it here: no part of how it is made
DECIDED_ANEW = "overwrite", "resume", "rank", "world_size"


def recipe_section(values: Mapping) -> dict:  # as YAML gives it back
    "The arguments as a recipe stores them: no secrets, and nothing that is decided anew."
    kept = {k: v for k, v in values.items() if k in NOT_SECRET or not SECRET_NAME.search(k)}
    return {k: without_secrets(v, k) for k, v in kept.items() if k not in DECIDED_ANEW}


def write_recipe(output: str | os.PathLike, command: str, values: Mapping) -> Path:  # the file that was written
    "Write the resolved recipe beside an output, for `speculators-nb COMMAND --recipe`."
    path = recipe_path(output, command)
    section = {command: recipe_section(values)}
    text = yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=120)
    write_text(path, f"# to repeat it: speculators-nb {command} --recipe {path.name}\n{text}")
    return path
