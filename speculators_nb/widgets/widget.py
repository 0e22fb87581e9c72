"""Base class of the widgets: pictures that answer to the mouse and the keyboard.
They do in JupyterLab with a kernel, on a page without one, and are a static figure where nothing runs."""

import json
import re
from importlib.resources import files
from typing import Any

import anywidget
import traitlets


JS = files("speculators_nb") / "widgets" / "js"
MOST_FROZEN = 100_000  # bytes of state in a page or a notebook


def module_text(name: str) -> str:
    "The ES module of a widget, js/NAME.js, with what it imports of `common.js`: one that imports nothing."
    common = re.sub(r"^export ", "", (JS / "common.js").read_text("utf-8"), flags=re.M)
    own = (JS / f"{name}.js").read_text("utf-8")
    own = re.sub(r'^import [^;]* from "\./common\.js";\n', "", own, flags=re.M)
    return f"{common}\n{own}"


def style_text() -> str:
    "The CSS of all widgets. Its colours follow the light or dark setting of the page."
    return (JS / "widget.css").read_text("utf-8")


def frozen_json(values: dict[str, Any]) -> str:
    """Values (numbers, text, lists and dicts of these) as a page has them: JSON that is safe inside a script element.
    Errors: ValueError for NaN and infinity."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


class Widget(anywidget.AnyWidget):
    "A picture with controls, drawn by js/NAME.js over `state`."

    name = ""  # of its ES module; a subclass has its own
    state: Any = traitlets.Dict().tag(sync=True)  # all that is drawn without a kernel
    controls: Any = traitlets.Dict().tag(sync=True)  # values of sliders and menus

    def __init_subclass__(cls, **kwargs):
        if "name" in vars(cls):  # not in the class that traitlets makes of it for each widget
            cls._esm, cls._css = module_text(cls.name), style_text()
        super().__init_subclass__(**kwargs)

    def fallback(self) -> str:
        "HTML that is readable where no JavaScript runs: a table, or a figure inside the page."
        raise NotImplementedError(f"{type(self).__name__}.fallback")

    def html(self, most: int | None = MOST_FROZEN) -> str:
        """State and fallback as an element; `mount.js` or `embed` puts the widget in its place. Where the state has
        more bytes than `most` (None: any number), it is the fallback alone."""
        frozen = frozen_json({"state": self.state, "controls": self.controls})
        if most is not None and len(frozen.encode()) > most:
            return f'<div class="snb-widget">{self.fallback()}</div>'
        data = f'<script type="application/json">{frozen}</script>'
        return f'<div class="snb-widget" data-widget="{self.name}">{data}{self.fallback()}</div>'

    def _repr_mimebundle_(self, **kwargs):
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return data | {"text/html": self.html()}, metadata

    def __repr__(self):
        return f"{type(self).__name__}: a widget"


def embed(*parts: Widget | str) -> str:
    "Widgets, and HTML between them, for a page of one file, in order; style and each module are written once."
    widgets = [part for part in parts if isinstance(part, Widget)]
    written = [part if isinstance(part, str) else part.html(most=None) for part in parts]
    written.append(f"<style>{style_text()}</style>" if widgets else "")
    for name in dict.fromkeys(widget.name for widget in widgets):
        module = module_text(name).replace("export default", "const widget =")
        selector = f'.snb-widget[data-widget="{name}"]'
        mounted = f"for (const p of document.querySelectorAll('{selector}')) mount(p, widget);"
        written.append(f'<script type="module">\n{module}\n{mounted}\n</script>')
    return "\n".join(written)
