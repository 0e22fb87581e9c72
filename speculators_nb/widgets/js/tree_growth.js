// A dynamic draft tree: its nodes by depth and budget, what the verifier accepts, and a chain beside it.
import { h, limit, menu, numberTable, root, slider, svg, wide } from "./common.js";

const [COLUMN, ROW, BOX] = [92, 26, 72]; // of the drawing: a level, a leaf, a node's width
const MOST_DEPTH = 6;
const MOST_NODES = 24;
const LABELS = { nodes: "draft tokens", expected: "accepted, as the drafter expects", accepted: "accepted", passes: "passes of the drafter" };

function depths(nodes) {
  const found = [];
  for (const parent of nodes.parents) found.push(parent < 0 ? 1 : found[parent] + 1);
  return found;
}

// The nodes that the re-ranking keeps, ascending; among equals the earlier one
function keptNodes(nodes, depth, budget) {
  const level = depths(nodes);
  const shallow = nodes.scores.map((_, node) => node).filter((node) => level[node] <= depth);
  const ranked = shallow.sort((a, b) => nodes.scores[b] - nodes.scores[a] || a - b);
  return ranked.slice(0, budget).sort((a, b) => a - b);
}

function acceptedPath(nodes, kept, truth) {
  const path = [];
  let node = -1;
  for (const token of truth) {
    const above = node;
    node = kept.find((i) => nodes.parents[i] === above && nodes.tokens[i] === token) ?? -1;
    if (node < 0) break;
    path.push(node);
  }
  return path;
}

function counts(nodes, kept, truth) {
  const level = depths(nodes);
  return {
    nodes: kept.length,
    expected: kept.reduce((sum, node) => sum + Math.exp(nodes.scores[node]), 0),
    accepted: acceptedPath(nodes, kept, truth).length,
    passes: Math.max(0, ...kept.map((node) => level[node])),
  };
}

// Node -> place across: leaves evenly spread, every parent centred on its children
function heights(nodes, kept) {
  const place = new Map();
  let leaves = 0;
  const visit = (node) => {
    const children = kept.filter((i) => nodes.parents[i] === node);
    children.forEach(visit);
    const middle = children.reduce((sum, child) => sum + place.get(child), 0) / children.length;
    place.set(node, children.length ? middle : leaves++);
  };
  visit(-1);
  return { place, leaves };
}

function sentence(nodes, node, words, accepted) {
  const path = [];
  for (let up = node; up >= 0; up = nodes.parents[up]) path.unshift(words[nodes.tokens[up]]);
  const parent = nodes.parents[node];
  const own = Math.exp(nodes.scores[node] - (parent < 0 ? 0 : nodes.scores[parent]));
  const verdict = accepted ? "accepted" : "rejected";
  return `${path.join(" · ")}: probability ${own.toFixed(3)} after its parent, path ${Math.exp(nodes.scores[node]).toFixed(3)}; ${verdict}.`;
}

function drawing(nodes, kept, place, words, title, tell) {
  const path = acceptedPath(nodes, kept, place.truth);
  const level = depths(nodes);
  const { place: across, leaves } = heights(nodes, kept);
  const [width, height] = [COLUMN * (1 + Math.max(0, ...kept.map((n) => level[n]))), ROW * leaves + 4];
  const x = (node) => (node < 0 ? 0 : level[node]) * COLUMN;
  const y = (node) => (across.get(node) + 0.5) * ROW + 2;
  const edges = kept.map((node) => svg("line", {
    x1: x(nodes.parents[node]) + BOX, y1: y(nodes.parents[node]), x2: x(node), y2: y(node),
    class: path.includes(node) ? "snb-edge snb-accepted" : "snb-edge",
  }));
  const one = (node) => {
    const kind = node < 0 || path.includes(node) ? "snb-node snb-accepted" : "snb-node";
    const word = node < 0 ? "…" : words[nodes.tokens[node]];
    const label = node < 0 ? "the text so far" : sentence(nodes, node, words, path.includes(node));
    const say = node < 0 ? null : () => tell(label);
    const short = word.length > 7 ? `${word.slice(0, 6)}…` : word;
    const chance = node < 0 ? "" : Math.exp(nodes.scores[node]).toFixed(2).replace(/^0/, "");
    return svg("g", { class: kind, tabindex: node < 0 ? null : 0, role: "img", "aria-label": label, onpointerenter: say, onfocus: say },
      svg("rect", { x: x(node), y: y(node) - 10, width: BOX, height: 20, rx: 4 }),
      svg("text", { x: x(node) + 5, y: y(node) + 4 }, short),
      svg("text", { x: x(node) + BOX - 4, y: y(node) + 4, "text-anchor": "end", class: "snb-chance" }, chance));
  };
  const figure = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": title });
  figure.style.cssText = `width: ${width}px; max-width: none`;
  figure.append(...edges, ...[-1, ...kept].map(one));
  return h("figure", {}, h("figcaption", {}, title), wide(title, figure));
}

export default {
  render({ model, el }) {
    const place = root(el, "tree_growth", "Tree growth");
    const { positions, widths } = model.get("state");
    const position = menu(model, "position", "tokens of the answer so far", positions.map((p) => [p, String(p)]));
    const width = menu(model, "top_k", "top_k", widths.map((k) => [k, String(k)]));
    const depth = slider(model, "depth", "depth", { min: 1, max: MOST_DEPTH });
    const budget = slider(model, "budget", "budget", { min: 1, max: MOST_NODES });
    const text = h("p", { class: "snb-mono snb-text" });
    const said = h("p", { "aria-live": "polite", class: "snb-reading" });
    const [figures, numbers] = [h("div"), wide("numbers of tree and chain")];
    place.append(h("div", { class: "snb-row" }, position, width, depth, budget), text, figures, said, numbers);
    const tell = (words) => (said.textContent = words);

    function draw() {
      const { places, words } = model.get("state");
      const controls = model.get("controls");
      const isKnown = (p, k) => String(k) in (places[p]?.trees ?? {});
      limit(model, position, (i) => isKnown(positions[i], controls.top_k));
      limit(model, width, (i) => isKnown(controls.position, widths[i]));
      const here = places[controls.position];
      const tree = here?.trees[controls.top_k];
      if (!tree) return tell("The kernel grows this tree…");
      const kept = keptNodes(tree, controls.depth, controls.budget);
      const chain = keptNodes(here.chain, MOST_NODES, controls.budget);
      const after = here.truth.slice(0, 6).map((token) => words[token]).join(" ");
      text.replaceChildren(`…${here.text}`, h("span", { class: "snb-muted" }, ` | the verifier: ${after}…`));
      const rows = { tree: counts(tree, kept, here.truth), chain: counts(here.chain, chain, here.truth) };
      figures.replaceChildren(
        drawing(tree, kept, here, words, `tree: ${rows.tree.accepted} of ${kept.length} draft tokens accepted (${tree.tokens.length} were grown in ${MOST_DEPTH} levels)`, tell),
        drawing(here.chain, chain, here, words, `chain: ${rows.chain.accepted} of ${chain.length} accepted`, tell));
      const format = (value, name) => (name === "expected" ? value.toFixed(2) : String(value));
      numbers.replaceChildren(numberTable(LABELS, rows, format));
      return tell("In colour: what the verifier accepts. Numbers: probability of the path. Point at a token for more.");
    }
    model.on("change:controls", draw);
    model.on("change:state", draw);
    draw();
  },
};
