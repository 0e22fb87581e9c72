// An attention mask: which clause allows an entry, what a query attends to, what leaks without one.
import { h, limit, menu, numberTable, root, setControl, svg, unpack, wide } from "./common.js";

const CELL = 10; // units of the drawing
const SIDES = [4, 8, 16, 32, 64, 128];
const LABELS = {
  allowed: "allowed entries", leak: "of these leaks", lost: "lost entries", full: "full blocks",
  partial: "partial blocks", empty: "empty blocks", useful: "useful share", flops: "FLOPs, one head",
  block_flops: "FLOPs in blocks",
};
const KEY = "Blue: allowed; ochre: to the chosen query; red: leaks; dashed: lost; tinted: blocks that are computed, blue in full; lines: borders of documents and passes.";
const count = (n) => n.toLocaleString("en-US");

// The view that the controls choose, its clauses unpacked; undefined where it is not in the state
function chosen(model) {
  const { menus, views, masks, clauses } = model.get("state");
  const controls = model.get("controls");
  const mask = masks[views[menus.map(({ name }) => controls[name]).join("|")]];
  if (!mask) return undefined;
  const size = mask.queries * mask.keys;
  const read = (node) => node.join
    ? { join: node.join, parts: node.parts.map(read) }
    : { name: clauses[node.clause].name, cells: unpack(clauses[node.clause].bits, size) };
  return { ...mask, size, tree: read(mask.tree) };
}

const names = (node) => [...new Set(node.join ? node.parts.flatMap(names) : [node.name])];

// Entries without the removed clauses: true in an "and", false in an "or"; null: nothing is left
function evaluate(node, size, removed) {
  if (!node.join) return removed.includes(node.name) ? null : node.cells;
  const parts = node.parts.map((part) => evaluate(part, size, removed)).filter((part) => part);
  if (node.join === "not") return parts.length ? parts[0].map((x) => 1 - x) : null;
  const all = node.join === "and";
  const join = (i) => (all ? parts.every((part) => part[i]) : parts.some((part) => part[i]));
  return Uint8Array.from({ length: size }, (_, i) => Number(join(i)));
}

const entries = ({ tree, size }, removed) => evaluate(tree, size, removed) ?? new Uint8Array(size).fill(1);

// The clauses that decide an entry: those that hold where it is allowed, else those that fail
function reasons(node, i) {
  if (!node.join) return [node.name];
  const value = (part) => evaluate(part, i + 1, [])[i];
  const decisive = node.parts.filter((part) => node.join === "not" || value(part) === value(node));
  return [...new Set(decisive.flatMap((part) => reasons(part, i)))];
}

function blockCounts(cells, { queries, keys }, side) {
  const found = { full: [], partial: [], empty: 0, computed: 0 };
  for (let q = 0; q < queries; q += side) {
    for (let k = 0; k < keys; k += side) {
      const [height, width] = [Math.min(side, queries - q), Math.min(side, keys - k)];
      let allowed = 0;
      for (let i = 0; i < height * width; i++) allowed += cells[(q + Math.floor(i / width)) * keys + k + (i % width)];
      if (allowed === 0) found.empty += 1;
      else found[allowed === height * width ? "full" : "partial"].push([q, k, height, width]);
      if (allowed) found.computed += height * width;
    }
  }
  return found;
}

// One path for many rectangles [row, column, height, width], each made smaller by `inset`
function rectangles(list, kind, inset = 0) {
  const one = ([q, k, height, width]) => {
    const [dx, dy] = [width * CELL - 2 * inset, height * CELL - 2 * inset];
    return `M${k * CELL + inset} ${q * CELL + inset}h${dx}v${dy}h${-dx}z`;
  };
  return svg("path", { d: list.map(one).join(""), class: `snb-mask-${kind}` });
}

function lines(view) {
  const { queries, keys, documents } = view;
  const row = documents.length;
  const passes = queries === row && keys % row === 0; // later passes repeat the row
  const padding = documents.flatMap((d, i) => (d < 0 ? [[0, i, queries, 1], ...(queries === row ? [[i, 0, 1, keys]] : [])] : []));
  const marks = [rectangles(padding, "padding")];
  const line = (...[x1, y1, x2, y2, kind]) => marks.push(svg("path", { d: `M${x1 * CELL} ${y1 * CELL}L${x2 * CELL} ${y2 * CELL}`, class: `snb-mask-${kind}` }));
  documents.forEach((document, i) => {
    if (i === 0 || document === documents[i - 1]) return;
    for (let k = i; k < (passes ? keys : row); k += row) line(k, 0, k, queries, "border");
    if (queries === row) line(0, i, keys, i, "border");
  });
  for (let k = row; k < keys; k += passes ? row : keys) line(k, 0, k, queries, "pass");
  return marks;
}

function position(view, key) {
  const row = view.documents.length;
  if (key < row) return `key ${key}`;
  const repeats = view.queries === row && view.keys % row === 0;
  return repeats ? `key ${key} (step ${Math.floor(key / row)}, position ${key % row})` : `key ${key} (slot ${key - row})`;
}

// What the entry under the pointer is, in words
function sentence(view, { q, k }, { cells, original, removed }) {
  const i = q * view.keys + k;
  const why = reasons(view.tree, i);
  const [verb, holds] = original[i] ? ["attends to", "true"] : ["does not attend to", "false"];
  const text = `Query ${q} ${verb} ${position(view, k)}. ${holds}: ${why.join(", ")}.`;
  if (cells[i] && !original[i]) return `${text} Leaks without: ${removed.filter((c) => why.includes(c)).join(", ")}.`;
  return !cells[i] && original[i] ? `${text} Lost without: ${removed.join(", ")}.` : text;
}

function picture(view, { cells, original }, side, at) {
  const [allowed, leak, lost, lit] = [[], [], [], []];
  cells.forEach((now, i) => {
    const [q, k] = [Math.floor(i / view.keys), i % view.keys];
    if (now) (original[i] ? (at?.q === q ? lit : allowed) : leak).push([q, k, 1, 1]);
    else if (original[i]) lost.push([q, k, 1, 1]);
  });
  const blocks = blockCounts(cells, view, side);
  const cross = leak.map(([q, k]) => `M${k * CELL + 2} ${q * CELL + 8}l6 -6`).join("");
  return [
    rectangles(blocks.full, "full"), rectangles(blocks.partial, "partial"),
    rectangles(allowed, "allowed", 0.6), rectangles(lit, "lit", 0.6),
    rectangles(leak, "leak", 0.6), svg("path", { d: cross, class: "snb-mask-cross" }),
    rectangles(lost, "lost", 1.5), ...lines(view),
    at ? rectangles([[at.q, 0, 1, view.keys], [0, at.k, view.queries, 1]], "at") : null,
  ].filter((part) => part);
}

function numbers(view, { cells, original }, side, headDim) {
  const total = (list) => list.reduce((a, b) => a + b, 0);
  const blocks = blockCounts(cells, view, side);
  const allowed = total(cells);
  const [leak, lost] = [1, 0].map((now) => total(cells.map((c, i) => Number(c === now && original[i] === 1 - now))));
  const here = {
    allowed, leak, lost, full: blocks.full.length, partial: blocks.partial.length, empty: blocks.empty,
    useful: allowed / Math.max(blocks.computed, 1), flops: 4 * headDim * allowed, block_flops: 4 * headDim * blocks.computed,
  };
  const columns = { [`${view.queries} × ${view.keys}, blocks of ${side}`]: here };
  if (view.longer) columns[`${count(view.longer.queries)} × ${count(view.longer.keys)}, blocks of 128`] = view.longer;
  return numberTable(LABELS, columns, (value, name) => (name === "useful" ? `${(100 * value).toFixed(0)}%` : count(value)));
}

export default {
  render({ model, el }) {
    const place = root(el, "mask_explorer", "Mask explorer");
    let [at, view, drawn] = [null, chosen(model), null];
    const { menus, head_dim: headDim } = model.get("state");
    const none = (name, c) => [c, name === "window" && c === 0 ? "none" : String(c)];
    const selects = menus.map(({ name, label, choices }) => menu(model, name, label, choices.map((c) => none(name, c))));
    const side = menu(model, "side", "side of a block", SIDES.map((s) => [s, String(s)]));
    const figure = svg("svg", { class: "snb-mask", tabindex: 0, role: "img" });
    const legend = h("fieldset", { class: "snb-row" });
    const said = h("p", { class: "snb-reading", "aria-live": "polite" });
    const table = wide("numbers of the mask");
    place.append(h("div", { class: "snb-row" }, selects, side), legend, figure, said, h("p", { class: "snb-muted" }, KEY), table);

    function draw() {
      const controls = model.get("controls");
      const { views } = model.get("state");
      const key = (n, i) => menus.map((m) => (m === menus[n] ? m.choices[i] : controls[m.name])).join("|");
      selects.forEach((label, n) => limit(model, label, (i) => key(n, i) in views));
      view = chosen(model) ?? view;
      if (at) at = { q: Math.min(at.q, view.queries - 1), k: Math.min(at.k, view.keys - 1) };
      const removed = controls.removed.filter((name) => names(view.tree).includes(name));
      drawn = { cells: entries(view, removed), original: entries(view, []), removed };
      const boxes = names(view.tree).map((name) => {
        const change = (e) => setControl(model, "removed", e.target.checked ? removed.filter((r) => r !== name) : [...removed, name]);
        return h("label", {}, h("input", { type: "checkbox", checked: !removed.includes(name), onchange: change }), ` ${name}`);
      });
      const focused = [...legend.querySelectorAll("input")].indexOf(document.activeElement);
      legend.replaceChildren(h("legend", {}, "clauses (remove one to see what leaks)"), ...boxes);
      if (focused >= 0) legend.querySelectorAll("input")[focused]?.focus();
      figure.setAttribute("viewBox", `-2 -2 ${view.keys * CELL + 4} ${view.queries * CELL + 4}`);
      figure.style.maxWidth = `min(100%, ${Math.max(view.keys * 20, 160)}px)`;
      table.replaceChildren(numbers(view, drawn, controls.side, headDim));
      point(at);
    }

    function point(entry) {
      at = entry;
      const words = at ? sentence(view, at, drawn) : "Rows are queries, columns are keys. Point at an entry, or use the arrow keys.";
      said.textContent = words;
      figure.setAttribute("aria-label", `attention mask, ${view.queries} queries by ${view.keys} keys. ${words}`);
      figure.replaceChildren(...picture(view, drawn, model.get("controls").side, at));
    }

    const under = (e) => {
      const box = figure.getBoundingClientRect();
      const unit = box.width / (view.keys * CELL + 4);
      const [k, q] = [e.clientX - box.left, e.clientY - box.top].map((d) => Math.floor((d / unit - 2) / CELL));
      if (q >= 0 && k >= 0 && q < view.queries && k < view.keys && (q !== at?.q || k !== at?.k)) point({ q, k });
    };
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    for (const event of ["pointermove", "pointerdown"]) figure.addEventListener(event, under);
    figure.addEventListener("keydown", (e) => {
      if (!(e.key in steps)) return;
      e.preventDefault();
      const [dq, dk] = at ? steps[e.key] : [0, 0];
      const clamp = (x, n) => Math.min(Math.max(x, 0), n - 1);
      point({ q: clamp((at?.q ?? 0) + dq, view.queries), k: clamp((at?.k ?? 0) + dk, view.keys) });
    });
    for (const name of ["controls", "state"]) model.on(`change:${name}`, draw);
    draw();
  },
};
