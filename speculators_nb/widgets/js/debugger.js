// Step debugger: a generation step by step, and the two distributions behind each draft token.
import { h, redraw, root, slider } from "./common.js";

const number = (x) => x.toFixed(4);
const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "⏎") || "(empty)";

// The step of a run that wrote the output token at `position`; the prompt's token has none
function stepAt(run, position) {
  let end = 1;
  const found = run.steps.findIndex((step) => (end += step.tokens.length) > position);
  return found < 0 ? run.steps.length - 1 : found;
}

// The position of the first token that a step wrote
function startOf(run, step) {
  return run.steps.slice(0, step).reduce((n, s) => n + s.tokens.length, 1);
}

// What became of a draft token: the rule came to it if its parent was accepted and no sibling before it
function verdict(step, node) {
  if (step.path.includes(node)) return "accepted";
  const parent = step.parents[node];
  if (parent >= 0 && !step.path.includes(parent)) return "not reached";
  const before = step.path.some((other) => other < node && step.parents[other] === parent);
  return before ? "not reached" : "rejected";
}

function depth(step, node) {
  return node < 0 ? -1 : depth(step, step.parents[node]) + 1;
}

// The output of a run; a button for each step
function text(state, run, now, go) {
  const word = (id) => state.words[id];
  const written = run.steps.map((step, i) => {
    const accepted = step.path.slice(0, step.tokens.length).map((node) => step.draft[node]);
    const rejected = step.draft.filter((_, node) => verdict(step, node) === "rejected");
    const bonus = step.tokens.slice(accepted.length);
    const attributes = { class: "snb-step", "aria-label": `step ${i + 1}`, onclick: () => go(i) };
    if (i === now) attributes["aria-current"] = "step";
    return h("button", attributes,
      accepted.map((id) => h("span", { class: "snb-accepted" }, word(id))),
      rejected.map((id) => h("s", { class: "snb-rejected" }, word(id))),
      bonus.map((id) => h("b", {}, word(id))));
  });
  return h("div", { class: "snb-output snb-mono" }, h("b", {}, word(run.first)), written);
}

// The draft tokens of a step; a button selects one
function proposal(state, step, selected, select) {
  if (!step.draft.length) return h("p", { class: "snb-muted" }, "no draft token in this step");
  const head = ["draft token", "p", "q", "min(p, q)", "chance", "outcome"].map((t) => h("th", { scope: "col" }, t));
  const rows = step.draft.map((id, node) => {
    const [p, q, what] = [step.p[node], step.q[node], verdict(step, node)];
    const choose = () => select(node);
    const name = h("button", {
      class: "snb-mono", onclick: choose, onfocus: choose, "aria-pressed": String(node === selected),
      style: `margin-left: ${depth(step, node)}em`,
    }, visible(state.words[id]));
    // not at mouseenter: a row may be drawn under a pointer that rests
    return h("tr", { class: `snb-${what.replace(" ", "-")}`, onmousemove: choose },
      h("th", { scope: "row" }, name),
      h("td", {}, number(p)), h("td", {}, number(q)),
      h("td", { class: "snb-min" }, number(Math.min(p, q))),
      h("td", {}, number(step.chance[node])), h("td", {}, what));
  });
  return h("div", { class: "snb-wide", tabindex: 0, role: "group", "aria-label": "draft tokens" },
    h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}

// A distribution's likeliest tokens as bars
function bars(state, title, pairs, colour, marked) {
  const rows = pairs.map(([id, p]) => h("li", id === marked ? { class: "snb-marked" } : {},
    h("span", { class: "snb-mono" }, visible(state.words[id])),
    h("span", { class: "snb-mass", style: `width: ${(p * 5).toFixed(2)}rem; background: var(--snb-${colour})` }),
    h("span", {}, number(p))));
  return h("section", {}, h("p", { class: "snb-muted" }, title), rows.length ? h("ol", {}, rows) : h("p", {}, "none"));
}

// The distributions behind the selected token
function details(state, run, step, node) {
  const after = step.path.length ? step.path.at(-1) : -1;
  const all = [];
  if (node !== null && node < step.draft.length) {
    const marked = step.draft[node];
    all.push(bars(state, "verifier p", step.top_p[step.parents[node] + 1], "p", marked),
      bars(state, "drafter q", step.top_q[node], "q", marked));
  }
  const rejected = step.draft.some((_, i) => verdict(step, i) === "rejected");
  const title = rejected ? "residual after the rejection" : "the bonus token's distribution";
  const next = step.tokens.length > step.path.length ? step.tokens.at(-1) : null;
  all.push(bars(state, title, rejected ? step.residual : step.top_p[after + 1], "rejected", next));
  return h("div", { class: "snb-details", "aria-live": "polite" }, all);
}

function panel(model, state, index) {
  const { position, run: chosen, node } = model.get("controls");
  const run = state.runs[index];
  const now = stepAt(run, position);
  const step = run.steps[now];
  const selected = chosen === index ? node : 0;
  const go = (i) => change(model, { position: startOf(run, i), run: index, node: 0 });
  const mean = startOf(run, run.steps.length) - 1;
  return h("div", { class: "snb-run" },
    h("p", { class: "snb-name" }, run.name),
    h("p", { class: "snb-muted" }, `step ${now + 1} of ${run.steps.length}; `,
      h("span", { class: "snb-mean" }, (mean / Math.max(1, run.steps.length)).toFixed(4)), " tokens a step"),
    text(state, run, now, go),
    step && proposal(state, step, selected, (i) => {
      const before = model.get("controls");
      if (before.node !== i || before.run !== index) change(model, { run: index, node: i });
    }),
    step && details(state, run, step, step.draft.length ? Math.min(selected, step.draft.length - 1) : null));
}

function change(model, values) {
  model.set("controls", { ...model.get("controls"), ...values });
  model.save_changes();
}

export default {
  render({ model, el }) {
    const state = model.get("state");
    const place = root(el, "debugger", "Step debugger");
    const most = Math.max(...state.runs.map((run) => startOf(run, run.steps.length) - 1));
    const move = (by) => {
      const run = state.runs[model.get("controls").run];
      const step = stepAt(run, model.get("controls").position) + by;
      if (step >= 0 && step < run.steps.length) change(model, { position: startOf(run, step), node: 0 });
    };
    const worst = state.worst.map((w, i) => h("option", { value: i }, w.text));
    const jump = h("select", { "aria-label": "worst rejections" }, h("option", { value: "" }, "jump to…"), worst);
    jump.addEventListener("change", () => {
      const to = state.worst[jump.value];
      if (to) change(model, { position: startOf(state.runs[to.run], to.step), run: to.run, node: to.node });
    });
    const runs = h("div", { class: "snb-runs" });
    place.append(
      h("div", { class: "snb-row" },
        h("button", { onclick: () => move(-1) }, "◀ step"), h("button", { onclick: () => move(1) }, "step ▶"),
        slider(model, "position", "output token", { min: 1, max: Math.max(1, most) }),
        h("label", { class: "snb-control" }, h("span", {}, "worst rejections"), jump)),
      runs);
    const draw = () => redraw(runs, state.runs.map((_, index) => panel(model, state, index)));
    model.on("change:controls", draw);
    draw();
  },
};
