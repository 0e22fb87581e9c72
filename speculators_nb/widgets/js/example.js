// The smallest widget: a curve that JavaScript computes, dots that Python has simulated.
import { h, root, slider, svg } from "./common.js";

// Mean acceptance length of a chain of k draft tokens, each accepted with probability a
const length = (a, k) => (a === 1 ? k + 1 : (1 - a ** (k + 1)) / (1 - a));

function draw(model, figure, numbers) {
  const { a } = model.get("controls");
  const { depth, simulated } = model.get("state");
  const x = (k) => 10 + (k / depth) * 300;
  const y = (tokens) => 150 - (tokens / (depth + 1)) * 140;
  const lengths = Array.from({ length: depth + 1 }, (_, k) => length(a, k));
  const line = lengths.map((tokens, k) => `${x(k)},${y(tokens)}`).join(" ");
  const dots = simulated.a === a ? simulated.lengths : [];
  figure.replaceChildren(
    svg("polyline", { points: line, class: "snb-line" }),
    ...dots.map((tokens, k) => svg("circle", { cx: x(k), cy: y(tokens), r: 4, class: "snb-dot" })),
  );
  const python = dots.length ? dots[depth].toFixed(2) : "not simulated here";
  numbers.replaceChildren(
    h("span", { class: "snb-number" }, lengths[depth].toFixed(4)),
    ` tokens a step for k = ${depth}; simulated: `,
    h("span", { class: "snb-simulated" }, python),
  );
}

export default {
  render({ model, el }) {
    const place = root(el, "example", "Acceptance length of a chain");
    const figure = svg("svg", { viewBox: "0 0 320 160", role: "img", "aria-label": "a curve" });
    const numbers = h("p", { "aria-live": "polite" });
    const format = (a) => a.toFixed(2);
    const control = slider(model, "a", "acceptance rate", { min: 0, max: 1, step: 0.05, format });
    place.append(control, figure, numbers);
    const redraw = () => draw(model, figure, numbers);
    model.on("change:controls", redraw);
    model.on("change:state", redraw);
    redraw();
  },
};
