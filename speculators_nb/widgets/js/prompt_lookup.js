// Drafters that copy: what n-gram lookup and suffix decoding find in a text, step by step.
import { h, menu, redraw, root, setControl, slider } from "./common.js";

// A word with the blanks before it; a sign of punctuation is one by itself
const words = (text) => text.match(/\s*(?:[A-Za-z0-9_]+|[^A-Za-z0-9_\s])/g) ?? [];
const same = (text, a, b, n) => Array.from({ length: n }, (_, i) => text[a + i] === text[b + i]).every(Boolean);

// Where the last n words of a text occurred before: the places after them
function places(text, n) {
  const found = [];
  for (let end = n; end < text.length; end++) if (same(text, end - n, text.length - n, n)) found.push(end);
  return found;
}

// What followed the earliest occurrence of the longest run at the end
function ngram(text, { max_n, k }) {
  for (let n = Math.min(max_n, text.length - 1); n > 0; n--) {
    const [place] = places(text, n);
    if (place !== undefined) return { draft: text.slice(place, place + k), match: n, place };
  }
  return { draft: [], match: 0, place: 0 };
}

// The word that followed most often; of equals, the first in the order of Arctic Inference
function mostFrequent(followers) {
  const count = new Map();
  const groups = new Map();
  let most = 0;
  for (const word of followers) {
    const c = count.get(word) ?? 0;
    const group = groups.get(c) ?? [];
    const above = groups.get(c + 1) ?? [];
    groups.set(c + 1, group[0] === word ? [word, ...above] : [...above, word]);
    groups.set(c, group.filter((other) => other !== word));
    count.set(word, c + 1);
    most = Math.max(most, c + 1);
  }
  return most ? { word: groups.get(most)[0], count: most } : null;
}

// Word by word what followed the last m words most often, while that is likely enough
function follow(text, m, budget, least) {
  let [p, score] = [1, 0]; // rounded to 32 bits as Arctic Inference rounds
  const run = text.slice(-m);
  const draft = [];
  while (draft.length < budget) {
    const ends = places([...text, "\0", ...run, ...draft], run.length + draft.length).filter((e) => e <= text.length);
    const best = mostFrequent(ends.filter((e) => e < text.length).map((e) => text[e]));
    if (!best) break;
    p = Math.fround(p * Math.fround(best.count / ends.length));
    if (p < Math.fround(least)) break;
    draft.push(best.word);
    score = Math.fround(score + p);
  }
  return { draft, score, match: m, place: places(text, m)[0] };
}

// The best continuation over all lengths of the match
function suffix(text, { k }, { depth, least }) {
  let best = { draft: [], score: 0, match: 0, place: 0 };
  const own = text.slice(-depth);
  const longest = own.length - 1;
  for (let m = longest; m > 0; m--) {
    if (!places(text, m).length) continue;
    const budget = Math.min(k, m, depth - m);
    if (budget <= best.score) continue;
    const other = follow(text, m, budget, least);
    if (other.score > best.score) best = other;
  }
  return best;
}

// The verification steps that write the answer; the prompt's forward pass writes its first word
function steps(controls, state) {
  const [prompt, answer] = [words(controls.prompt), words(controls.answer)];
  const found = [];
  for (let written = 1; written < answer.length; ) {
    const text = [...prompt, ...answer.slice(0, written)];
    const step = controls.drafter === "n-gram" ? ngram(text, controls) : suffix(text, controls, state);
    const wrong = step.draft.findIndex((word, i) => word !== answer[written + i]);
    const accepted = wrong < 0 ? step.draft.length : wrong;
    found.push({ ...step, accepted, written });
    written += accepted + 1;
  }
  return { prompt, answer, found };
}

function shown({ prompt, answer, found }, now, go) {
  const step = found[now];
  const copied = step ? (i) => step.match && i >= step.place - step.match && i < step.place + step.draft.length : () => 0;
  const matched = step ? (i) => step.match && i >= step.place - step.match && i < step.place : () => 0;
  const word = (text, i) => (copied(i) ? h("mark", { class: matched(i) ? "snb-match" : "snb-copied" }, text) : text);
  const written = found.map((s, i) => {
    const attributes = { class: "snb-step", "aria-label": `step ${i + 1}`, onclick: () => go(i),
      "data-draft": JSON.stringify(s.draft), "data-accepted": s.accepted };
    if (i === now) attributes["aria-current"] = "step";
    const end = s.written + s.accepted;
    return h("button", attributes,
      answer.slice(s.written, end).map((text, j) => h("span", { class: "snb-accepted" }, word(text, prompt.length + s.written + j))),
      s.draft.slice(s.accepted, s.accepted + 1).map((text) => h("s", { class: "snb-rejected" }, text)),
      answer.slice(end, end + 1).map((text) => h("b", {}, word(text, prompt.length + end))));
  });
  return h("div", { class: "snb-output snb-mono" },
    h("span", { class: "snb-muted" }, prompt.map(word)), " ┃ ", h("b", {}, word(answer[0] ?? "", prompt.length)), written);
}

function reading({ answer, found }, now) {
  const tokens = Math.max(0, answer.length - 1);
  const step = found[now];
  const what = !step ? "" : step.match
    ? `Step ${now + 1}: the last ${step.match} ${step.match > 1 ? "words were" : "word was"} found; of ` +
      `${step.draft.length} draft tokens ${step.accepted} are accepted.`
    : `Step ${now + 1}: the last word is new, nothing is drafted.`;
  return [
    h("p", {}, h("span", { class: "snb-number" }, (tokens / Math.max(1, found.length)).toFixed(4)),
      ` tokens a step: ${found.length} forward passes for ${tokens} tokens`),
    h("p", { class: "snb-muted" }, what)];
}

export default {
  render({ model, el }) {
    const place = root(el, "prompt_lookup", "Drafters that copy");
    const state = model.get("state");
    const area = (name, label) => {
      const own = { "aria-label": label, rows: 3, oninput: (e) => setControl(model, name, e.target.value) };
      const input = h("textarea", own);
      const show = () => {
        const text = model.get("controls")[name];
        if (input.value !== text) input.value = text; // else the cursor would jump
      };
      model.on("change:controls", show);
      show();
      return h("label", { class: "snb-area" }, h("span", { class: "snb-muted" }, label), input);
    };
    const output = h("div");
    const drafters = [["n-gram", "n-gram lookup"], ["suffix", "suffix decoding"]];
    place.append(
      h("div", { class: "snb-pair" }, area("prompt", "prompt"), area("answer", "answer of the verifier")),
      h("div", { class: "snb-row" }, menu(model, "drafter", "drafter", drafters),
        slider(model, "max_n", "longest n-gram", { min: 1, max: 8 }),
        slider(model, "k", "draft tokens", { min: 1, max: 12 })),
      output);
    const draw = () => {
      const all = steps(model.get("controls"), state);
      const now = Math.max(0, Math.min(model.get("controls").step, all.found.length - 1));
      redraw(output, [...reading(all, now), shown(all, now, (i) => setControl(model, "step", i))]);
    };
    model.on("change:controls", draw);
    draw();
  },
};
