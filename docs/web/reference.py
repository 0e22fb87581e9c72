"""The reference of a module: real Python objects for links and search, read from the exported source by `ast`, so that
annotations and defaults appear as they were written."""

import ast
import io
import json
import tokenize

from web.places import LIB, ROOT


def comments(source):
    "line number -> the comment that ends it"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        t.start[0]: t.string.lstrip("# ").strip()
        for t in tokens
        if t.type == tokenize.COMMENT and t.line.strip()[0] != "#"
    }


def decorators(node):
    return {ast.unparse(d).split("(")[0] for d in node.decorator_list}


def parameters(fn, notes, drop=()):
    "[(name as shown, name, annotation, default, comment)] of a function, in order"
    a, rows = fn.args, []
    plain = a.posonlyargs + a.args
    defaults = [None] * (len(plain) - len(a.defaults)) + a.defaults
    for arg, default in zip(plain, defaults):
        rows.append((arg.arg, arg, default))
    if a.vararg:
        rows.append(("*" + a.vararg.arg, a.vararg, None))
    elif a.kwonlyargs:
        rows.append(("*", None, None))
    rows += [(arg.arg, arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    if a.kwarg:
        rows.append(("**" + a.kwarg.arg, a.kwarg, None))
    # a comment belongs to its line's only parameter
    ends = [n.end_lineno for _, arg, d in rows if arg for n in [d or arg]]
    return [
        (
            shown,
            arg,
            default,
            notes.get((default or arg).end_lineno) if arg and ends.count((default or arg).end_lineno) == 1 else None,
        )
        for shown, arg, default in rows
        if shown not in drop
    ]


def shown_type(node):
    "An annotation without the quotes of a forward reference"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def signature(rows, returns=None):
    def one(shown, arg, default):
        text = shown + (f": {shown_type(arg.annotation)}" if arg is not None and arg.annotation else "")
        return text + (f" = {ast.unparse(default)}" if default is not None else "")

    return "(" + ", ".join(one(*r[:3]) for r in rows) + ")" + (f" -> {shown_type(returns)}" if returns else "")


def fields(rows, returned=None):
    out = [f":param {shown.replace('*', chr(92) + '*')}: {note}" for shown, _, _, note in rows if note]
    return out + ([f":returns: {returned}"] if returned else [])


def directive(kind, head, body, options=(), fence="```"):
    head = head.replace("`", "")  # the line that opens a fence must not hold one
    return "\n".join([f"{fence}{{py:{kind}}} {head}", *options, "", *body, fence, ""])


def docstring(node):
    return [ast.get_docstring(node) or "", ""]


def function(node, notes, kind="function", fence="```"):
    deco = decorators(node)
    drop = ("self",) if kind == "method" and "staticmethod" not in deco else ()
    rows = parameters(node, notes, drop + (("cls",) if "classmethod" in deco else ()))
    if kind == "method" and deco & {"property", "cached_property"}:
        options = [f":type: {shown_type(node.returns)}"] if node.returns else []
        return directive("property", node.name, docstring(node), options, fence)
    # the comment after `) -> Type:` describes what is returned
    end = max(
        [node.lineno]
        + [n.end_lineno for n in ast.walk(node.args) if hasattr(n, "end_lineno")]
        + ([node.returns.end_lineno] if node.returns else [])
    )
    returned = (
        notes.get(end)
        if node.returns and node.returns.end_lineno == end and not any(n == notes.get(end) for *_, n in rows)
        else None
    )
    options = [f":{d[:-6]}method:" for d in ("classmethod", "staticmethod") if d in deco and kind == "method"]
    head = node.name + signature(rows, node.returns)
    return directive(kind, head, [*docstring(node), *fields(rows, returned)], options, fence)


def klass(node, notes, patched):
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)] + patched
    init = next((m for m in methods if m.name == "__init__"), None)
    annotated = [
        n
        for n in node.body
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and n.target.id[0] != "_"
        and "ClassVar" not in ast.unparse(n.annotation)
    ]
    if init:
        rows = parameters(init, notes, ("self",))
    else:  # dataclass, NamedTuple, pydantic
        rows = [(n.target.id, n, n.value, notes.get(n.end_lineno)) for n in annotated]
    inner = [function(m, notes, "method") for m in methods if m.name[0] != "_" or m.name == "__call__"]
    return directive("class", node.name + signature(rows), [*docstring(node), *fields(rows), "", *inner], fence="`````")


def reference(module):
    "The reference of one module as MyST text, and its public names: `__all__`, or what has no underscore before it"
    source = (ROOT / LIB / f"{module.replace('.', '/')}.py").read_text()
    tree, notes = ast.parse(source), comments(source)
    public = next(
        (
            ast.literal_eval(n.value)
            for n in tree.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        ),
        None,
    )
    if public is None:
        public = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name[0] != "_"]
        named = (t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name))
        public += [name for name in named if name.isupper() and name[0] != "_"]
    patches = {}
    for n in tree.body:
        if isinstance(n, ast.FunctionDef) and "patch" in decorators(n):
            patches.setdefault(ast.unparse(n.args.args[0].annotation), []).append(n)
    out, names = [], []
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name in public:
            names.append(n.name)
            if isinstance(n, ast.ClassDef):
                names += [f"{n.name}.{m.name}" for m in n.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_"]
            out.append(klass(n, notes, patches.get(n.name, [])) if isinstance(n, ast.ClassDef) else function(n, notes))
        elif isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and n.targets[0].id in public:
            names.append(n.targets[0].id)
            value = ast.unparse(n.value)
            options = [f":value: {json.dumps(value, ensure_ascii=False)}"] if len(value) < 70 else []
            out.append(directive("data", names[-1], [notes.get(n.end_lineno, "")], options))
    head = f"## Reference\n\nWhat `{LIB}.{module}` exports.\n\n```{{py:module}} {LIB}.{module}\n```\n"
    return "\n".join([head, *out]) if out else "", names
