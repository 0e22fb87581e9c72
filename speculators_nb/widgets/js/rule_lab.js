// Acceptance rules on two distributions over five tokens: what each accepts and writes, exactly.
import { h, menu, root, setControl, slider, svg } from "./common.js";

const sum = (values) => values.reduce((a, b) => a + b, 0);
const argmax = (values) => values.indexOf(Math.max(...values));
const oneHot = (token, size) => Array.from({ length: size }, (_, i) => Number(i === token));
const normal = (weights) => weights.map((w) => w / sum(weights));
const surplus = (p, q) => p.map((a, i) => Math.max(0, a - q[i]));

// The distribution at another temperature; 0 puts all on the likeliest token
function tempered(weights, temperature) {
  if (temperature === 0) return oneHot(argmax(weights), weights.length);
  const top = Math.max(...weights); // divided by it, no power underflows for all
  return normal(weights.map((w) => (w / top) ** (1 / temperature)));
}

// A rule on a chain of draft tokens, every row of the verifier p and of the drafter q:
// [[probability, number of accepted tokens, weights of the next token], ...]
function tokenwise(chance, stopped, end) {
  return (chain, p, q) => {
    const found = [];
    let reached = 1;
    chain.forEach((token, i) => {
      const accept = Math.min(1, chance(p, q, token, i));
      if (accept < 1) found.push([reached * (1 - accept), i, stopped(p, q, token)]);
      reached *= accept;
    });
    return [...found, [reached, chain.length, end(p)]].filter(([probability]) => probability > 0);
  };
}

const itself = (p) => p;
const likeliest = (p) => oneHot(argmax(p), p.length);
const without = (p, q, token) => p.map((a, i) => (i === token ? 0 : a));
function residual(p, q) {
  const rest = surplus(p, q);
  return sum(rest) > 0 ? rest : p; // p = q up to rounding
}
function block(chain, p, q) {
  const joint = [1];
  for (const x of chain) joint.push(Math.min(1, (joint.at(-1) * p[x]) / q[x]));
  const rests = joint.slice(0, -1).map((P) => surplus(p.map((a) => P * a), q));
  const found = [];
  let later = 1; // no position after this one passed
  for (let i = chain.length; i >= 0; i--) {
    const mass = i < chain.length ? sum(rests[i]) : 0;
    const rest = mass + 1 - joint[i];
    const pass = i === 0 ? 1 : i === chain.length ? joint[i] : rest === 0 ? 1 : mass / rest;
    const weights = i === chain.length || mass === 0 ? p : rests[i];
    if (later * pass > 0) found.push([later * pass, i, weights]);
    later *= 1 - pass;
  }
  return found;
}
function typical(p, q, token, { epsilon, delta }) {
  const entropy = -sum(p.map((a) => (a > 0 ? a * Math.log(a) : 0)));
  return Number(p[token] > Math.min(epsilon, delta * Math.exp(-entropy)));
}
function tolerant(p, token, k) {
  return Number(p[token] >= [...p].sort((a, b) => b - a)[Math.min(k, p.length) - 1]);
}

// name -> rule; settings are those of state
const RULES = {
  greedy: () => tokenwise((p, q, x) => Number(x === argmax(p)), likeliest, likeliest),
  strict: () => tokenwise((p, q, x) => p[x], without, itself),
  standard: () => tokenwise((p, q, x) => p[x] / q[x], residual, itself),
  block: () => block,
  typical: (s) => tokenwise((p, q, x) => typical(p, q, x, s), likeliest, likeliest),
  tolerant: (s) => tokenwise((p, q, x) => tolerant(p, x, s.accept_k), likeliest, likeliest),
  lenient: (s) => tokenwise((p, q, x) => p[x] / (s.lenience * q[x]), residual, itself),
  synthetic: ({ rates }) =>
    tokenwise((p, q, x, i) => (i && !rates[i - 1] ? 0 : rates[i] / (i ? rates[i - 1] : 1)), itself, itself),
  "no residual": () => tokenwise((p, q, x) => p[x] / q[x], itself, itself),
};

// Every chain of n tokens and its probability
function chains(probs, n) {
  if (n === 0) return [[[], 1]];
  const shorter = chains(probs, n - 1);
  return shorter.flatMap(([chain, c]) =>
    probs.flatMap((b, token) => (b > 0 ? [[[...chain, token], c * b]] : [])),
  );
}

// Mean number of accepted tokens, distribution of the first token written, and the share of
// probability that the first n + 1 tokens have elsewhere than the verifier's own
function enumerate(rule, verifier, seen, drafter, n) {
  const size = verifier.length;
  const texts = new Float64Array(size ** (n + 1));
  let accepted = 0;
  const write = (index, length, probability) => {
    // what the rule does not write, the verifier writes alone
    if (length === n + 1) texts[index] += probability;
    else verifier.forEach((b, v) => b > 0 && write(index * size + v, length + 1, probability * b));
  };
  for (const [chain, drafted] of chains(drafter, n)) {
    for (const [probability, kept, weights] of rule(chain, seen, drafter)) {
      accepted += drafted * probability * kept;
      const start = chain.slice(0, kept).reduce((index, token) => index * size + token, 0);
      normal(weights).forEach((b, v) => {
        if (b > 0) write(start * size + v, kept + 1, drafted * probability * b);
      });
    }
  }
  const output = Array(size).fill(0);
  texts.forEach((b, index) => (output[Math.floor(index / size ** n)] += b));
  const own = new Float64Array(texts.length);
  for (const [chain, b] of chains(verifier, n + 1)) {
    own[chain.reduce((index, token) => index * size + token, 0)] = b;
  }
  return { accepted, output, distance: sum(surplus([...texts], own)) };
}

// An own rule has no function here: its values are the kernel's
function results({ rules, settings, values }, { p, q, temperature, length, proposal }) {
  const verifier = tempered(p, temperature);
  const drawn = tempered(q, temperature);
  const drafter = proposal === "drawn" ? drawn : likeliest(drawn);
  const found = rules.map(({ name, raw }) => {
    if (!RULES[name]) return { name, ...values[name] };
    const seen = raw && temperature === 0 ? normal(p) : verifier;
    return { name, ...enumerate(RULES[name](settings), verifier, seen, drafter, length) };
  });
  return { verifier, drafter, found };
}

// Bars of one distribution; a line across each is the verifier's probability
function bars(output, verifier, tokens, label) {
  const top = (b) => 40 - 36 * b;
  const each = output.map((b, i) => [
    svg("rect", { x: 4 + 22 * i, y: top(b), width: 16, height: 36 * b, class: "snb-bar" }),
    svg("line", { x1: 2 + 22 * i, x2: 22 + 22 * i, y1: top(verifier[i]), y2: top(verifier[i]) }),
    svg("text", { x: 12 + 22 * i, y: 51, "text-anchor": "middle" }, tokens[i]),
  ]);
  const attributes = { viewBox: "0 0 114 54", role: "img", "aria-label": label };
  return svg("svg", attributes, ...each.flat());
}

const percent = (b) => (b >= 0.1 || b === 0 ? `${(100 * b).toFixed(0)} %` : `${(100 * b).toFixed(1)} %`);
const listed = (probs, tokens) => probs.map((b, i) => `${tokens[i]} ${percent(b)}`).join(", ");

function card({ name, accepted, output, distance }, about, verifier, { length }, { tokens }) {
  const same = distance < 1e-9;
  const verdict = same ? "✓ lossless here" : `✗ moves ${percent(distance)}`;
  const data = { "data-accepted": accepted, "data-distance": distance, "data-output": output };
  return h(
    "section",
    { class: "snb-rule", "data-rule": name, ...data, "aria-label": `${name}: ${verdict}` },
    h("strong", {}, name),
    h("span", { class: same ? "snb-same" : "snb-other" }, verdict),
    h("small", { class: "snb-muted" }, about),
    bars(output, verifier, tokens, `${name} writes ${listed(output, tokens)}`),
    h("meter", { min: 0, max: length, value: accepted, "aria-label": "draft tokens accepted" }),
    h("span", {}, `accepts ${accepted.toFixed(3)} of ${length}`),
  );
}

// One slider for each token of p and of q: weights, which need not add up to one
function weights(model, name, label, tokens) {
  const inputs = tokens.map((token, i) => {
    const change = () => {
      const values = inputs.map(({ lastChild }) => Number(lastChild.value));
      if (sum(values) > 0) setControl(model, name, values);
      else inputs[i].lastChild.value = model.get("controls")[name][i]; // one must be left
    };
    const value = model.get("controls")[name][i];
    const attributes = { type: "range", min: 0, max: 1, step: 0.01, value, oninput: change };
    const input = h("input", { ...attributes, "aria-label": `${label} of ${token}` });
    const shown = h("output", {}, value.toFixed(2));
    model.on("change:controls", () => {
      input.value = model.get("controls")[name][i];
      shown.textContent = model.get("controls")[name][i].toFixed(2);
    });
    return h("label", { class: "snb-weight" }, h("span", {}, token), shown, input);
  });
  return h("div", { class: `snb-weights snb-${name}` }, h("strong", {}, label), inputs);
}

export default {
  render({ model, el }) {
    const place = root(el, "rule_lab", "Acceptance rules on two distributions");
    const { tokens, rules, longest } = model.get("state");
    const cards = h("div", { class: "snb-rules", "aria-live": "off" });
    const two = (x) => x.toFixed(1);
    place.append(
      h("div", { class: "snb-two" }, weights(model, "p", "verifier p", tokens), weights(model, "q", "drafter q", tokens)),
      h("div", { class: "snb-row" },
        slider(model, "temperature", "temperature", { min: 0, max: 2, step: 0.1, format: two }),
        slider(model, "length", "draft tokens", { min: 1, max: longest }),
        menu(model, "proposal", "a draft token is", [["drawn", "drawn from q"], ["argmax", "q's likeliest"]])),
      cards,
    );
    const draw = () => {
      const controls = model.get("controls");
      const { verifier, found } = results(model.get("state"), controls);
      const about = Object.fromEntries(rules.map((rule) => [rule.name, rule.about]));
      cards.replaceChildren(...found.map((r) => card(r, about[r.name], verifier, controls, model.get("state"))));
    };
    model.on("change:controls", draw);
    model.on("change:state", draw);
    draw();
  },
};
