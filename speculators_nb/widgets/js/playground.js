// Speed-up of drafters by number of draft tokens and batch size, with handles.
import { h, menu, root, setControl, slider, svg, wide } from "./common.js";

const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [320, 174, 30, 12, 26];
const plotHeight = HEIGHT - TOP - BOTTOM;

// The formulas of evaluate.speedup
function passCost(tokens, { ridge, expert_share: share, experts, active }) {
  const union = (experts * (1 - (1 - active / experts) ** tokens)) / active;
  return Math.max(1 - share + share * union, tokens / ridge);
}

function lengths(rates) {
  const found = [1];
  for (const rate of rates) found.push(found[found.length - 1] + rate);
  return found;
}

function speedups(rates, cost, parallel, verify) {
  return lengths(rates).map((tokens, n) => tokens / (verify[n] + cost * (parallel ? Number(n > 0) : n)));
}

const bestGamma = (speeds) => speeds.indexOf(Math.max(...speeds));

// Batch size -> speed-ups, as the controls are
function surface(state, controls) {
  const { rates, cost, source, drafter } = controls;
  const { parallel } = state.drafters[drafter];
  if (source === "measured") return new Map([[1, speedups(rates, cost, parallel, state.verify)]]);
  return new Map(state.batches.map((batch) => {
    const plain = passCost(batch, controls);
    const verify = [1, ...rates].map((_, n) => passCost(batch * (n + 1), controls) / plain);
    return [batch, speedups(rates, cost, parallel, verify)];
  }));
}

function schedule(speeds) {
  const sizes = [...speeds.keys()];
  const ranges = [];
  sizes.forEach((size, i) => {
    const last = (sizes[i + 1] ?? size + 1) - 1;
    const tokens = bestGamma(speeds.get(size));
    if (ranges.length && ranges.at(-1)[2] === tokens) ranges.at(-1)[1] = last;
    else ranges.push([size, last, tokens]);
  });
  const most = Math.max(...ranges.map((range) => range[2]));
  if (most === 0) return "{}";
  const parts = [`"num_speculative_tokens": ${most}`];
  const list = ranges.map((range) => `[${range.join(", ")}]`).join(", ");
  if (ranges.length > 1) parts.push(`"num_speculative_tokens_per_batch_size": [${list}]`);
  return `{${parts.join(", ")}}`;
}

function axes(most, xlabel, ticks) {
  const y = (value) => TOP + plotHeight * (1 - value / most);
  const text = (x, at, words, anchor = "middle") => svg("text", { x, y: at, "text-anchor": anchor }, words);
  return [
    ...ticks.flatMap((tick) => [
      svg("line", { x1: LEFT, x2: WIDTH, y1: y(tick), y2: y(tick), class: "snb-grid" }),
      text(LEFT - 5, y(tick) + 4, String(tick), "end"),
    ]),
    text((LEFT + WIDTH) / 2, HEIGHT - 5, xlabel),
  ];
}

// Bars of the acceptance rates, each a slider
function rateBars(model, chart) {
  const { rates } = model.get("controls");
  const step = (WIDTH - LEFT) / rates.length;
  // rates fall: a bar takes those after it down, and those before it up
  const change = (i, value) => {
    const rate = Math.round(Math.min(Math.max(value, 0), 1) * 1000) / 1000;
    const next = rates.map((r, j) => (j < i ? Math.max(r, rate) : j > i ? Math.min(r, rate) : rate));
    setControl(model, "rates", next);
  };
  const bars = rates.map((rate, i) => {
    const y = TOP + plotHeight * (1 - rate);
    const label = `acceptance of position ${i + 1}`;
    return svg("g", {
      class: "snb-handle", tabindex: 0, role: "slider", "aria-label": label, "aria-orientation": "vertical",
      "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": rate, "data-bar": i,
      onkeydown: (e) => {
        const by = { ArrowUp: 0.01, ArrowRight: 0.01, ArrowDown: -0.01, ArrowLeft: -0.01, PageUp: 0.1, PageDown: -0.1 }[e.key];
        if (by === undefined) return;
        e.preventDefault();
        change(i, rate + by);
      },
    },
    svg("rect", { x: LEFT + i * step, y: TOP, width: step, height: plotHeight, class: "snb-catch" }),
    svg("rect", { x: LEFT + (i + 0.12) * step, y, width: step * 0.76, height: plotHeight * rate, class: "snb-bar" }),
    svg("text", { x: LEFT + (i + 0.5) * step, y: Math.max(y - 3, 10), "text-anchor": "middle" }, rate.toFixed(2)));
  });
  const focused = document.activeElement?.dataset?.bar;
  const hadFocus = chart.contains(document.activeElement);
  chart.replaceChildren(...axes(1, "position of the draft token", [0, 0.5, 1]), ...bars);
  if (hadFocus && focused !== undefined) bars[focused]?.focus();
  chart.onpointerdown = (e) => {
    const bar = e.target.closest("[data-bar]");
    if (!bar) return;
    e.preventDefault();
    const i = Number(bar.dataset.bar);
    const box = chart.getBoundingClientRect();
    const drag = (at) => change(i, 1 - ((at.clientY - box.top) * (HEIGHT / box.height) - TOP) / plotHeight);
    chart.setPointerCapture(e.pointerId);
    chart.onpointermove = drag;
    chart.onpointerup = chart.onpointercancel = () => (chart.onpointermove = null);
    drag(e);
    chart.querySelector(`[data-bar="${i}"]`).focus();
  };
}

function curve(chart, speeds) {
  const most = Math.max(1.5, Math.ceil((Math.max(...speeds) + 0.3) * 2) / 2);
  const ticks = [0, 1, ...(most > 1.5 ? [most] : [])];
  const x = (n) => LEFT + 8 + (n * (WIDTH - LEFT - 16)) / Math.max(speeds.length - 1, 1);
  const y = (value) => TOP + plotHeight * (1 - value / most);
  const best = bestGamma(speeds);
  chart.setAttribute("aria-label", `speed-up by draft tokens, highest at ${best}: ${speeds[best].toFixed(2)}`);
  chart.replaceChildren(
    ...axes(most, "draft tokens in a step, K", ticks),
    svg("polyline", { points: speeds.map((s, n) => `${x(n)},${y(s)}`).join(" "), class: "snb-line" }),
    ...speeds.map((s, n) => svg("circle", { cx: x(n), cy: y(s), r: n === best ? 5 : 2.5, class: n === best ? "snb-dot" : "snb-point" })),
    svg("text", { x: x(best), y: y(speeds[best]) - 8, "text-anchor": best === 0 ? "start" : best === speeds.length - 1 ? "end" : "middle" }, `${speeds[best].toFixed(2)} at K = ${best}`),
  );
}

function table(speeds, batch) {
  const most = Math.max(...[...speeds.values()].flat());
  const columns = [...speeds.values()][0].map((_, n) => h("th", { scope: "col" }, `K = ${n}`));
  const rows = [...speeds].map(([size, row]) => {
    const best = bestGamma(row);
    const cells = row.map((s, n) => {
      const share = s > 1 ? Math.round((45 * (s - 1)) / Math.max(most - 1, 1e-9)) : 0;
      const style = `background: color-mix(in srgb, var(--snb-p) ${share}%, transparent)`;
      return h("td", { style, class: n === best ? "snb-best" : null, "data-value": s }, s.toFixed(2));
    });
    return h("tr", { class: size === batch ? "snb-now" : null }, h("th", { scope: "row" }, String(size)), cells);
  });
  return h("table", { class: "snb-surface" },
    h("caption", {}, "speed-up by batch size; framed: the best K"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "batch"), columns)), h("tbody", {}, rows));
}

export default {
  render({ model, el }) {
    const place = root(el, "playground", "Speed-up playground");
    const { drafters, verify, batches } = model.get("state");
    const names = Object.keys(drafters).map((name) => [name, name]);
    const percent = (x) => `${Math.round(100 * x)}%`;
    const drafter = menu(model, "drafter", "drafter", names);
    const unit = () => (drafters[model.get("controls").drafter].parallel ? "block" : "token");
    const passes = (c) => `${c.toFixed(2)} passes a ${unit()}`;
    const cost = slider(model, "cost", "drafting costs", { min: 0, max: 0.5, step: 0.01, format: passes });
    const sources = [["computed", "computed, by batch size"], ...(verify ? [["measured", "measured, batch size 1"]] : [])];
    const source = menu(model, "source", "verification", sources);
    const machine = h("div", { class: "snb-row" },
      menu(model, "batch", "batch size", batches.map((b) => [b, String(b)])),
      slider(model, "ridge", "tokens until computing is slower than reading", { min: 10, max: 600, step: 10 }),
      slider(model, "expert_share", "experts' share of what one token reads", { min: 0, max: 0.95, step: 0.05, format: percent }),
      slider(model, "experts", "experts in a layer", { min: 8, max: 256, step: 8 }),
      slider(model, "active", "of these a token uses", { min: 1, max: 8 }));
    const reset = h("button", { type: "button", onclick: () => begin(model.get("controls").drafter) }, "measured values");
    const bars = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": "acceptance rates" });
    const speed = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    const [surfaceTable, fields] = [wide("speed-up by batch size"), h("pre", { class: "snb-fields", "aria-live": "polite" })];
    place.append(h("div", { class: "snb-row" }, drafter, cost, reset), h("div", { class: "snb-row" }, source), machine,
      h("div", { class: "snb-pair" },
        h("figure", {}, h("figcaption", {}, "acceptance: drag a bar"), bars),
        h("figure", {}, h("figcaption", {}, "speed-up"), speed)),
      surfaceTable, h("p", { class: "snb-muted" }, "for vLLM's --speculative-config:"), fields);

    let shown = model.get("controls").drafter;
    function begin(name) {
      shown = name;
      const { rates, cost: first } = drafters[name];
      model.set("controls", { ...model.get("controls"), drafter: name, rates, cost: first });
      model.save_changes();
    }
    function draw() {
      const controls = model.get("controls");
      if (controls.drafter !== shown) return begin(controls.drafter);
      machine.hidden = controls.source === "measured";
      const speeds = surface(model.get("state"), controls);
      const batch = speeds.has(controls.batch) ? controls.batch : 1;
      rateBars(model, bars);
      curve(speed, speeds.get(batch));
      surfaceTable.replaceChildren(table(speeds, batch));
      fields.textContent = schedule(speeds);
      return undefined;
    }
    model.on("change:controls", draw);
    draw();
  },
};
