// What all widgets share: elements, controls, and a model that stands in for the kernel's.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value); // onclick: f
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

// An HTML element: h("button", { class: "go", onclick: f }, "Go")
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// An SVG element, in the same way
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// The element that a widget draws in; `label` is read out
export function root(el, name, label) {
  const place = h("div", { class: `snb-root snb-${name}`, role: "group", "aria-label": label });
  // else JupyterLab takes the arrow keys: its shortcuts match the focused element itself
  place.addEventListener("focusin", (e) => (e.target.dataset.lmSuppressShortcuts = "true"));
  el.replaceChildren(place);
  return place;
}

// Change one control; a kernel sees it, and so do listeners of "change:controls"
export function setControl(model, name, value) {
  model.set("controls", { ...model.get("controls"), [name]: value });
  model.save_changes();
}

// A labelled slider of one control: options { min, max, step, format }
export function slider(model, name, label, { min, max, step = 1, format = String }) {
  const value = () => model.get("controls")[name];
  const input = h("input", { type: "range", min, max, step, value: value(), "aria-label": label });
  const shown = h("output");
  const show = () => {
    input.value = value();
    shown.textContent = format(value());
    input.setAttribute("aria-valuetext", format(value()));
  };
  input.addEventListener("input", () => setControl(model, name, Number(input.value)));
  model.on("change:controls", show);
  show();
  return h("label", { class: "snb-control" }, h("span", {}, label), input, shown);
}

// A labelled menu of one control: choices [[value, text], ...]
export function menu(model, name, label, choices) {
  const options = choices.map(([value, text]) => h("option", { value }, text));
  const select = h("select", { "aria-label": label }, options);
  const show = () => (select.value = String(model.get("controls")[name]));
  select.addEventListener("change", () => {
    setControl(model, name, choices.find(([value]) => String(value) === select.value)[0]);
  });
  model.on("change:controls", show);
  show();
  return h("label", { class: "snb-control" }, h("span", {}, label), select);
}

// Grey out the choices of a menu that are not in the page, where no kernel can compute them
export function limit(model, label, isKnown) {
  const live = typeof model.send === "function"; // of anywidget's model, not of a frozen one
  [...label.querySelector("select").options].forEach((option, i) => {
    option.disabled = !live && !isKnown(i);
  });
}

// Numbers in columns: labels { name: text }, columns { title: { name: value } }; a test reads them
export function numberTable(labels, columns, format) {
  const cell = (value, name) => value === undefined ? h("td")
    : h("td", { "data-number": name, "data-value": value }, format(value, name));
  const titles = Object.keys(columns).map((title) => h("th", { scope: "col" }, title));
  const rows = Object.entries(labels).map(([name, label]) => h("tr", {},
    h("th", { scope: "row" }, label), Object.values(columns).map((values) => cell(values[name], name))));
  return h("table", {}, h("thead", {}, h("tr", {}, h("td"), titles)), h("tbody", {}, rows));
}

// Bits in base64, the first in the highest place of its byte -> an array of `size` zeros and ones
export function unpack(text, size) {
  const bytes = atob(text);
  return Uint8Array.from({ length: size }, (_, i) => (bytes.charCodeAt(i >> 3) >> (7 - (i & 7))) & 1);
}

// Something wide that scrolls by itself, by the keyboard too
export function wide(label, ...children) {
  return h("div", { class: "snb-wide", role: "group", tabindex: 0, "aria-label": label }, ...children);
}

// Draws anew. The element at the same place gets the focus back; a text that scrolls stays where it was, and moves to
// its step where another one was chosen
export function redraw(place, children) {
  const focusable = () => [...place.querySelectorAll("button, [tabindex]")];
  const texts = () => [...place.querySelectorAll(".snb-output")];
  const chosen = (text) => [...text.querySelectorAll(".snb-step")].findIndex((step) => step.ariaCurrent);
  const at = focusable().indexOf(document.activeElement);
  const before = texts().map((text) => [text.scrollTop, chosen(text)]);
  place.replaceChildren(...children);
  if (at >= 0) focusable()[at]?.focus({ preventScroll: true });
  texts().forEach((text, i) => {
    const [top, old] = before[i] ?? [0, -1];
    text.scrollTop = top;
    const step = text.querySelector("[aria-current]");
    if (!step || chosen(text) === old) return;
    const [box, own] = [text, step].map((element) => element.getBoundingClientRect());
    text.scrollTop += Math.min(0, own.top - box.top) || Math.max(0, own.bottom - box.bottom);
  });
}

// A model without a kernel, over the values that were frozen into the page
export function frozenModel(values) {
  const listeners = new Map();
  return {
    get: (name) => values[name],
    set(name, value) {
      values[name] = value;
      for (const f of listeners.get(`change:${name}`) ?? []) f();
    },
    save_changes() {}, // nobody to send them to; listeners were called by `set`, as with a kernel
    on(event, f) {
      listeners.set(event, [...(listeners.get(event) ?? []), f]);
    },
    off(event, f) {
      listeners.set(event, (listeners.get(event) ?? []).filter((other) => other !== f));
    },
  };
}

// Replace the fallback inside `place` (a .snb-widget) by the widget; an error leaves it there
export function mount(place, widget) {
  if (place.dataset.mounted) return;
  const values = JSON.parse(place.querySelector("script").textContent);
  const el = h("div");
  widget.render({ model: frozenModel(values), el });
  place.replaceChildren(el);
  place.dataset.mounted = "yes";
}
