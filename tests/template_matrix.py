"""Chat templates against conversations of many shapes: what `encode` trains, beside an oracle that does not use it.

The oracle has three sources: transformers' own rendering of the conversation as it is given, marks of templates that
have some, and words that stand in one place of the conversation alone (`Reply3`, `Result4`), which say who said what.
What a template writes at its end unasked is listed by hand. `python tests/template_matrix.py` runs all templates that
are installed with trl and axolotl, and writes templates/results/README.md.
"""

import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from speculators_nb.data.chat_encoding import encode_batch, mask_of
from speculators_nb.data.chat_template import ALL, ChatTemplate, Trained, merge_turns, turns_of
from speculators_nb.data.messages import BadRow, in_a_spelling

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
        },
    }
]
SWITCHES = {
    "all": {},
    "no calls": {"trained": Trained(tool_calls=False)},
    "no reasoning": {"trained": Trained(reasoning=False)},
    "row per turn": {"rows": "turn"},
}


def user(i):
    return {"role": "user", "content": f"Question{i}?"}


def says(i, thought=False, **more):
    return {"role": "assistant", "content": f"Reply{i}."} | (thinks(i) if thought else {}) | more


def thinks(i):
    return {"reasoning_content": f"Thought{i}", "thinking": f"Thought{i}"}


def calls(i, content=None, arguments="text", n=1, thought=False):
    "A turn that calls tools; `content` is left out if it is an ellipsis."
    value = {"city": f"Argu{i}"}
    calls = [
        {
            "id": f"call{i:03}{k:02}",
            "type": "function",
            "function": {"name": f"lookup{i}", "arguments": json.dumps(value) if arguments == "text" else value},
        }
        for k in range(n)
    ]
    out = {"role": "assistant", "tool_calls": calls} | ({} if content is ... else {"content": content})
    return out | (thinks(i) if thought else {})


def result(i, call=None):
    return {"role": "tool", "content": f"Result{i}", "name": f"lookup{call}", "tool_call_id": f"call{call:03}00"}


SYSTEM = {"role": "system", "content": "System0"}
PICTURE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Question0?"}]}


class Shape(NamedTuple):
    messages: list
    kwargs: dict = {}
    tools: bool = False


SHAPES = {
    "one answer": Shape([user(0), says(1)]),
    "a system prompt": Shape([SYSTEM, user(1), says(2)]),
    "several turns": Shape([SYSTEM, user(1), says(2), user(3), says(4), user(5), says(6)]),
    "a call, null, text": Shape([user(0), calls(1), result(2, 1), says(3)], tools=True),
    "a call, null, object": Shape([user(0), calls(1, None, "object"), result(2, 1), says(3)], tools=True),
    "a call, empty, text": Shape([user(0), calls(1, ""), result(2, 1), says(3)], tools=True),
    "a call, empty, object": Shape([user(0), calls(1, "", "object"), result(2, 1), says(3)], tools=True),
    "a call, no content": Shape([user(0), calls(1, ...), result(2, 1), says(3)], tools=True),
    "a call is the end": Shape([SYSTEM, user(1), calls(2)], tools=True),
    "a call beside an answer": Shape([user(0), calls(1, "Reply1."), result(2, 1), says(3)], tools=True),
    "two calls": Shape([user(0), calls(1, n=2), result(2, 1), result(3, 1), says(4)], tools=True),
    "calls without definitions": Shape([user(0), calls(1), result(2, 1), says(3)]),
    "reasoning": Shape([user(0), says(1, True)]),
    "reasoning in several turns": Shape([user(0), says(1, True), user(2), says(3, True)]),
    "reasoning and a call": Shape(
        [user(0), calls(1, thought=True), result(2, 1), says(3, True), user(4), says(5)], tools=True
    ),
    "reasoning in the content": Shape(
        [user(0), {"role": "assistant", "content": "<think>\nThought1\n</think>\n\nReply1."}, user(2), says(3)]
    ),
    "thinking is off": Shape([user(0), says(1), user(2), says(3)], {"enable_thinking": False}),
    "thinking is on": Shape([user(0), says(1, True), user(2), says(3, True)], {"enable_thinking": True}),
    "the assistant is first": Shape([says(0), user(1), says(2)]),
    "two answers in a row": Shape([user(0), says(1), says(2)]),
    "an unanswered question": Shape([user(0), says(1), user(2)]),
    "control tokens in contents": Shape(
        [{"role": "user", "content": "Question0 CONTROL?"}, {"role": "assistant", "content": "Reply1 CONTROL so."}]
    ),
    "a picture": Shape([PICTURE, says(1)]),
}


THINKING = ("thinking is off", "thinking is on")


def installed() -> dict[str, str]:
    "name -> text of the templates that trl and axolotl bring, where they are installed."
    out = {}
    for package, folder in (("trl", "chat_templates"), ("axolotl", "utils/chat_templates/templates")):
        spec = find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            for file in sorted((Path(root) / folder).glob("*.jinja")):
                out[f"{package}/{file.stem}"] = file.read_text(encoding="utf-8")
    return out


def families() -> dict[str, str]:
    "name -> text of templates of our own, each of the shape of a family."
    files = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
    return {f"ours/{file.stem}": file.read_text(encoding="utf-8").removesuffix("\n") for file in files}


# what a tokenizer of such a model has as one token
_CONTROL = re.compile(r"<[|\uff5c]?/?[A-Za-z_\u2581][\w\u2581:.\-]*[|\uff5c]?>|<[|\uff5c]\"[|\uff5c]>|\[/?[A-Z_]{3,}\]")


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    "Bytes, and the control tokens that a template spells: the text says which tokens there are."
    bpe = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found = sorted({*_CONTROL.findall(template), "<think>", "</think>", "<bos>", "<eos>"} - {"<br>"})
    bpe.add_special_tokens([AddedToken(t, normalized=False) for t in found])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", chat_template=template)


# ---- the oracle

# what these templates write at the end of everything, though no generation prompt is requested
UNASKED = {
    "ours/an_end_of_everything": "<eos>",
    "ours/header_is_always_written": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "ours/prompt_is_always_written": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "trl/phi3": "<eos>",
    "trl/phi3_5": "<eos>",
    "axolotl/command_a": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "axolotl/command_a_rag": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "axolotl/command_a_tool_use": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
}
WORDS = re.compile(r"(?:Question|Reply|Thought|Result|System|lookup|Argu)\d+")
REASONING_TAG = re.compile(r"think|thought|THINK|analysis", re.I)
CALL_TAG = re.compile(r"tool_?call|ACTION|python_tag|TOOL_CALLS|tool\u2581call", re.I)


class Turn(NamedTuple):
    "What transformers makes of an answer and of what is before it."

    ids: np.ndarray
    low: np.ndarray  # tokens that are the assistant's for certain
    high: np.ndarray  # tokens that may be


class Refuse(Exception):
    "The oracle, too, has no answer."


def spelled_by_hand(messages):
    "The conversation as it is given, and in the other spellings of calls."
    yield messages
    for content, arguments in itertools.product(("as given", "", None, ...), ("as given", dict, str)):
        out = []
        for m in messages:
            m = dict(m)
            if m.get("tool_calls"):
                if content != "as given" and not m.get("content"):
                    m.pop("content", None)
                    m |= {} if content is ... else {"content": content}
                functions = [dict(c["function"]) for c in m["tool_calls"]]
                for f in functions:
                    value = f["arguments"] if isinstance(f["arguments"], dict) else json.loads(f["arguments"])
                    f["arguments"] = {"as given": f["arguments"], dict: value, str: json.dumps(value)}[arguments]
                m["tool_calls"] = [c | {"function": f} for c, f in zip(m["tool_calls"], functions)]
            out.append(m)
        yield out


class Oracle:
    "What transformers renders, and whose words are in it."

    def __init__(self, name, tokenizer, shape):
        self.name, self.tokenizer, self.shape = name, tokenizer, shape
        self.marked = "endgeneration" in tokenizer.chat_template
        self.unasked = UNASKED.get(name, "")
        try:
            self.turns, self.why = self.find_turns(), "no answer"
        except Refuse as e:
            self.turns, self.why = [], str(e)

    def render(self, messages, prompt=False):
        kwargs = dict(tools=TOOLS if self.shape.tools else None, **self.shape.kwargs)
        given = dict(chat_template=self.tokenizer.chat_template, add_generation_prompt=prompt, **kwargs)
        if any(value is None for m in messages for value in m.values()):
            # apply_chat_template of transformers 5.24 drops a null, which templates ask for; earlier ones hand it on
            special = self.tokenizer.special_tokens_map
            (text,), _ = render_jinja_template(conversations=[messages], **given, **special)
        else:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **given)
        return text if prompt else text.removesuffix(self.unasked)

    def encode(self, text):
        out = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return np.array(out.ids), np.array(out.offsets).reshape(-1, 2)

    def find_turns(self):
        "The turns of the first spelling that is rendered faithfully."
        why = []
        for messages in spelled_by_hand(self.shape.messages):
            try:
                return [self.turn(messages, j) for j, m in enumerate(messages) if j and m["role"] == "assistant"]
            except Refuse as e:
                why.append(f"{e}")
            except Exception as e:
                why.append(f"fails: {e}")
        raise Refuse(why[0])

    def turn(self, messages, j):
        m, text, history = messages[j], self.render(messages[: j + 1]), self.render(messages[:j])
        prompt = self.render(messages[:j], True)
        ids, offsets = self.encode(text)
        if self.marked:
            out = self.tokenizer.apply_chat_template(
                messages[: j + 1],
                tools=TOOLS if self.shape.tools else None,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self.shape.kwargs,
            )
            assert out["input_ids"][: len(ids)] == ids.tolist()
            low = np.array(out["assistant_masks"][: len(ids)], bool)
            own = [w for w in WORDS.findall(json.dumps(m)) if w in text]
            start = len(history)
            if not text.startswith(history):  # what is rewritten ends before the last words of another
                start = max(text.rfind(w) for k in range(j) for w in WORDS.findall(json.dumps(messages[k])))
            stop = min((text.find(w, start) for w in own if w in text[start:]), default=start)
            if text.startswith(prompt):  # some marks contain the generation prompt
                start = stop = max(start, len(prompt))
            high = low & (offsets[:, 0] >= start)  # not the marks of the turns before
            low = low & (offsets[:, 1] > stop)
            zone = "".join(text[a:b] for (a, b), is_low in zip(offsets, low) if is_low)
        else:
            if text.startswith(prompt):
                start = stop = len(prompt)
            elif text.startswith(history):  # the prompt has opened a tag, or the turn is continued
                words = re.findall(r"Reply\d+|Thought\d+|lookup\d+", json.dumps(m))
                start, stop = len(history), min((text.find(w, len(history)) for w in words if w in text), default=-1)
            else:
                raise Refuse("does not continue")
            low, high = (offsets[:, 1] > stop), (offsets[:, 1] > start)
            zone = text[stop:]
        if messages[0] == PICTURE and ("'type'" in text or "Question0?" not in text):
            raise Refuse("does not read parts")
        for c in m.get("tool_calls") or ():
            if zone.count(c["function"]["name"]) < len(m["tool_calls"]):
                raise Refuse("leaves out calls")
        if m.get("tool_calls"):
            if re.search(r"""\\"city\\"|\{'city'|None""", zone):
                raise Refuse("arguments or null are misspelled")
            if m.get("content") and m["content"] not in zone:
                raise Refuse("leaves out what is said")
        return Turn(ids, low, high)

    def rows(self, switch):
        "(ids, tokens that must be trained, tokens that may be) of each row."
        out = []
        for turn in self.turns:
            low, high = turn.low.copy(), turn.high.copy()
            n = len(out[-1][0]) if out else 0
            if switch != "row per turn" and out and turn.ids[:n].tolist() == out[-1][0].tolist():
                low[:n], high[:n] = out[-1][1] | low[:n], out[-1][2] | high[:n]
                out[-1] = (turn.ids, low, high)
            else:
                out.append((turn.ids, low, high))
        return [self.switched(switch, *row) for row in out]

    def switched(self, switch, ids, low, high):
        "With a switch: words of reasoning or calls, and control tokens that are their tags, are not trained."
        text = [self.tokenizer.decode([i]) for i in ids]
        ends = np.cumsum([len(t) for t in text])
        whole, must_not = "".join(text), np.zeros(len(ids), bool)
        kept = np.zeros(len(ids), bool)
        if switch in ("no calls", "no reasoning"):
            words, tag = {
                "no calls": (r"lookup\d+|Argu\d+", CALL_TAG),
                "no reasoning": (r"Thought\d+", REASONING_TAG),
            }[switch]
            starts = ends - [len(t) for t in text]
            for match in re.finditer(words, whole):
                must_not |= (ends > match.start()) & (starts < match.end())
            special = np.isin(ids, list(self.tokenizer.added_tokens_decoder))
            must_not |= special & np.array([bool(tag.search(t)) for t in text])
            for match in re.finditer(r"Reply\d+\.", whole):
                # gpt-oss and Command write what is said beside a call as reasoning
                thought = re.search(r"(analysis<\|message\|>|<\|START_THINKING\|>)$", whole[: match.start()])
                if switch == "no calls" or not thought:
                    kept |= (ends > match.start()) & (starts < match.end())
            low = low & kept & ~must_not
            high = high & ~must_not
        return ids, low, high


def cells(name, text, shapes=SHAPES, switches=SWITCHES):
    "(shape, switch, 'agree' | 'refused' | 'disagree', why) of each cell of a template."
    tokenizer = tokenizer_of(text)
    try:
        templates = [ChatTemplate(tokenizer, **kwargs) for kwargs in ({}, *(SHAPES[s].kwargs for s in THINKING))]
    except ValueError as e:
        yield from ((shape, switch, "refused", str(e)) for shape in shapes for switch in switches)
        return
    for shape in shapes:
        template = next(t for t in templates if t.kwargs == SHAPES[shape].kwargs)
        oracle = Oracle(name, tokenizer, SHAPES[shape])
        for switch in switches:
            yield (shape, switch, *judge(template, oracle, switch))


def pictured(template, shape, rows="conversation", trained=ALL):
    "Rows of a conversation with pictures, as `images.encode_images` makes them; None: it has none."
    if not any(isinstance(m["content"], list) for m in shape.messages if "content" in m):
        return None
    try:
        turns = in_a_spelling(shape.messages, lambda m: turns_of(m, template, None, trained=trained))
    except BadRow as e:
        return e
    texts = merge_turns(turns, rows)
    encodings = template.tokens([text for text, _ in texts])
    control = template.control.ids
    return [
        (np.array(e.ids), mask_of(np.array(e.offsets).reshape(-1, 2), spans, np.isin(e.ids, control), text))
        for e, (text, spans) in zip(encodings, texts)
    ]


def judge(template, oracle, switch):
    "('agree', '') | ('refused', why) | ('disagree', what)"
    shape, tokenizer = oracle.shape, oracle.tokenizer
    row = {"messages": shape.messages, "tools": TOOLS if shape.tools else None}
    made = pictured(template, shape, **SWITCHES[switch])
    if made is None:
        (made,) = encode_batch([row], template, **SWITCHES[switch])
    expected = oracle.rows(switch)
    if isinstance(made, Exception):
        if not isinstance(made, BadRow):
            return "disagree", f"refused without a reason: {made!r}"
        return ("disagree", f"refused: {made}") if expected else ("refused", made.reason)
    if not expected:
        return "disagree", f"taken, and the oracle says: {oracle.why}"
    if len(expected) != len(made):
        return "disagree", f"{len(made)} rows, expected {len(expected)}"
    for (ids, mask), (true_ids, low, high) in zip(made, expected):
        if ids.tolist() != true_ids.tolist():
            return "disagree", "other tokens: " + tokenizer.decode(ids)[-80:]
        if (low & ~mask).any() or (mask & ~high).any():
            lost, more = (tokenizer.decode(ids[part]) for part in (low & ~mask, mask & ~high))
            return "disagree", f"not trained: {lost!r}, trained: {more!r}"
    text = "".join(tokenizer.decode(ids) for ids, _ in made)
    first = getattr(made, "omitted", {}).values()  # messages of which something is left out, by kind
    for i, m in enumerate(shape.messages):
        words = WORDS.findall(json.dumps({k: v for k, v in m.items() if k in ("content", "reasoning_content")}))
        lost = [w for w in words if w not in text]
        if lost and not any(place <= i for place in first):
            return "disagree", f"left out, and not counted: {lost}"
    return "agree", ""


RESULTS = Path(__file__).parent / "templates/results/README.md"
PAGE = """# Chat templates against conversations

{templates} templates ({where}), {shapes} shapes of conversations,
{switches} switches: **{cells} cells, {agree} agree with the oracle, {refused} are refused by name,
{disagree} disagree.** The oracle is described in `tests/template_matrix.py`, which wrote
this page: `PYTHONPATH=. python tests/template_matrix.py`, transformers {transformers}.

## Refusals

Each is a refusal of the oracle's, too: transformers' rendering fails, or leaves something out, in every spelling.

| Reason | Cells | Shapes of conversations | Templates |
| --- | --- | --- | --- |
{refusals}

## Templates

Cells that agree and cells that are refused, of {each} each.

| Template | Agree | Refused |
| --- | --- | --- |
{table}
"""


def main():
    import transformers

    texts = installed() | families()
    counts, reasons, bad = defaultdict(Counter), defaultdict(lambda: (Counter(), Counter())), []
    for name, text in texts.items():
        for shape, switch, status, why in cells(name, text):
            counts[name][status] += 1
            if status == "refused":
                why = re.sub(r"verifier '': its chat template (.*?), it renders.*", r"the chat template \1", why)
                why = re.sub(r" of  fails: \w+: ", " fails: ", why).partition(". Mark them")[0]
                for names, value in zip(reasons[why], (shape, name)):
                    names[value] += 1
            if status == "disagree":
                bad.append(f"{name}, {shape}, {switch}: {why}")
        print(name, dict(counts[name]), flush=True)
    total = sum(counts.values(), Counter())
    refusals = [
        f"| {why.replace('|', chr(92) + '|')} | {shapes.total()} | {', '.join(shapes)} "
        f"| {len(names)}: {', '.join(names)} |"
        for why, (shapes, names) in sorted(reasons.items(), key=lambda r: -sum(r[1][0].values()))
    ]
    page = PAGE.format(
        templates=len(texts),
        where=f"{len(families())} of our own, the others as trl and axolotl install them",
        shapes=len(SHAPES),
        switches=len(SWITCHES),
        cells=total.total(),
        **{k: total[k] for k in ("agree", "refused", "disagree")},
        transformers=transformers.__version__,
        refusals="\n".join(refusals),
        each=len(SHAPES) * len(SWITCHES),
        table="\n".join(f"| {name} | {n['agree']} | {n['refused']} |" for name, n in counts.items()),
    )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(page, encoding="utf-8")
    print(total, *bad, sep="\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
