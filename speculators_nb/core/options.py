"""Rules for the options of every command and function, in one table, and the relations between options.
They are checked before any work is done. A refusal is one line with the option, the fault and a value that is right."""

import difflib
import ipaddress
import json
import math
import numbers
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import speculators_nb


def near(word: str, known: Collection[str]) -> str:  # the closest one, or all
    "The remedy for a misspelt word."
    close = difflib.get_close_matches(str(word), list(known), 1)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(sorted(known))}."


def shown(value: Any) -> str:  # at most 100 characters
    "A value as a message shows it: shortened, and an address without its password."
    text = re.sub(r"://[^/\s@]*@", "://***@", repr(value))
    return text if len(text) <= 100 else f"{text[:97]}..."


def duration(seconds: float) -> str:  # "40 s", "12 min", "3.2 hours", with two digits that count
    "A time that is estimated, in the unit that suits it."
    for unit, size in (("hours", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            amount = seconds / size
            return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.2g} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


@dataclass(frozen=True)
class OptionRule:
    "What one option may be."

    kind: str  # a key of KINDS
    example: Any  # a value that is right
    none: bool = False  # None is allowed: the option is left out
    low: float | None = None  # smallest value
    high: float | None = None  # largest value
    above: float | None = None  # the value must be greater
    below: float | None = None  # the value must be less
    words: tuple[str, ...] | Callable[[], Sequence[str]] = ()  # of a word, or what gives them
    of: "OptionRule | None" = None  # of a list: the rule of each item
    alone: bool = False  # of a list: one value counts as a list of it
    objects: bool = False  # also what only Python can give: a function, a tokenizer
    test: Callable[[Any], str | None] | None = None  # what else is wrong with a value

    def problem(self, value: Any) -> str | None:  # None: it is right
        "What is wrong with a value, and what to write."
        if value is None:
            return None if self.none else f"is missing; write something like {self.example}"
        plain = isinstance(value, (bool, numbers.Number, str, bytes, os.PathLike))
        if self.kind == "list":
            plain = plain or not callable(value)
        elif self.kind == "mapping":
            plain = plain or isinstance(value, list)
        if self.objects and not plain:
            return None
        return KINDS[self.kind](self, value) or (self.test(value) if self.test else None)


def range_of(rule: OptionRule) -> str:  # empty: any
    "The range of a rule, in words."
    ends = {"greater than": rule.above, "at least": rule.low, "less than": rule.below, "at most": rule.high}
    return " and ".join(f"{words} {end}" for words, end in ends.items() if end is not None)


def _number(rule, value, whole=False):
    what = f"must be {'a whole number' if whole else 'a number'}, e.g. {rule.example}"
    if isinstance(value, str):
        return f"is text, and {what}"
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        return what
    try:
        finite = whole or math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        finite = False
    if not finite:
        return f"must be finite, e.g. {rule.example}"
    inside = (
        (rule.low is None or value >= rule.low)
        and (rule.above is None or value > rule.above)
        and (rule.high is None or value <= rule.high)
        and (rule.below is None or value < rule.below)
    )
    return None if inside else f"must be {range_of(rule)}, e.g. {rule.example}"


def _switch(rule, value):
    if type(value).__name__ in ("bool", "bool_"):
        return None
    return f"must be true or false, e.g. {str(rule.example).lower()}"


def _word(rule, value):
    words = rule.words if isinstance(rule.words, tuple) else rule.words()
    is_dtype = type(value).__name__ == "dtype"
    given = str(value).removeprefix("torch.") if is_dtype else value
    if isinstance(given, str) and given in words:
        return None
    choose = f"choose {', '.join(words[:-1])} or {words[-1]}"
    if not isinstance(given, str):
        quotes = ", in quotes in a recipe" if isinstance(given, bool) else ""
        return f"is no word; {choose}{quotes}"
    close = difflib.get_close_matches(given, words, 1)
    return f"is not known; {choose}" + (f". Did you mean {close[0]}?" if close else "")


def _text(rule, value):
    if not isinstance(value, str):
        return f"must be text, e.g. {rule.example}"
    if not value.strip():
        return f"is empty; write something like {rule.example}"
    control = re.search(r"[\x00-\x1f]", value)
    return f"holds the character {control[0]!r}; leave it out" if control else None


def _path(rule, value):
    if not isinstance(value, (str, os.PathLike)):
        return f"must name a file or a folder, e.g. {rule.example}"
    path = os.fspath(value)
    if len(path) > 4000 or any(len(os.fsencode(part)) > 255 for part in path.split(os.sep)):
        return f"is too long for a path; write something like {rule.example}"
    return _text(rule, path)


# `nn.losses.register_loss` and `nn.supervision.register_loss_weight` add to these two
LOSSES = ["kl_div", "rkl", "jsd", "ce", "soft_ce", "topk_ce", "tv", "nla", "lk_hybrid"]
LOSS_WEIGHTS = ["fixed-exp-decay", "dpace", "auf"]


def _list(rule, value):
    single = isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__")
    if single and not rule.alone:
        return f"must be a list, e.g. {rule.example}"
    problems = map(rule.of.problem, [value] if single else value)
    return next(filter(None, problems), None)


def _mapping(rule, value):
    if isinstance(value, Mapping):
        return None
    return f"must be a mapping of names and values, e.g. {rule.example}"


def _loss(rule, value):
    "A loss, or a mixture of losses: a mapping or its JSON."
    if not isinstance(value, (str, Mapping)):
        return f"must name a loss, or be a mapping of names and weights, e.g. {rule.example}"
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return 'is not JSON; write something like {"ce": 0.1, "kl_div": 1}'
    mixture = value if isinstance(value, Mapping) else {value: 1}
    if not mixture:
        return f"names no loss; name at least one of {', '.join(LOSSES)}"
    for name, weight in mixture.items():
        if name not in LOSSES:
            return f"{name!r} is no loss; choose from {', '.join(LOSSES)}"
        if wrong := number(1.0, low=0).problem(weight):
            return f"the weight of {name} {wrong}"
    return None if any(mixture.values()) else "all weights are 0; give one that is greater"


KINDS = {
    "resume": lambda rule, value: None if isinstance(value, bool) else _path(rule, value),  # True: the newest
    "number": _number,
    "whole": partial(_number, whole=True),
    "switch": _switch,
    "word": _word,
    "text": _text,
    "path": _path,
    "list": _list,
    "mapping": _mapping,
    "loss": _loss,
}

number = partial(OptionRule, "number")
switch = partial(OptionRule, "switch")
text = partial(OptionRule, "text")
path = partial(OptionRule, "path")
mapping = partial(OptionRule, "mapping")


def whole(example, low: float | None = None, high: float | None = 2**31, **more) -> OptionRule:
    "A whole number from `low` to `high`."
    return OptionRule("whole", example, low=low, high=high, **more)


def word(*words, **more) -> OptionRule:
    "One of some words."
    return OptionRule("word", words[0], words=words, **more)


def several(of: OptionRule, example, **more) -> OptionRule:
    "A list whose items keep a rule."
    return OptionRule("list", example, of=of, **more)


def switches(names: str, **more) -> dict[str, OptionRule]:
    "Switches of these names, which are separated by blanks."
    return dict.fromkeys(names.split(), switch(False, **more))


def address_problem(value: str) -> str | None:
    "What is wrong with the address of a server."
    try:
        parts = urlsplit(value)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fine = False
    if not fine or re.search(r"\s", value):
        return "is no address of a server; write something like http://127.0.0.1:8000"
    if parts.username or parts.password or parts.query:
        return (
            "holds a password or a query, which would end up in logs; "
            "put the key into the environment variable OPENAI_API_KEY or VLLM_API_KEY"
        )
    return None


def host_problem(value: str) -> str | None:
    "What is wrong with an address to listen on."
    plain = value.partition("%")[0]  # an address of IPv6 may name its interface
    if re.fullmatch(r"[\d.]+|.*:.*", plain):
        try:
            ipaddress.ip_address(plain)
            return None
        except ValueError:
            pass
    elif re.fullmatch(r"[\w.-]+", value):
        return None
    return "is no address to listen on; write something like 127.0.0.1"


DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa", "sdaa")  # torch's


def device_problem(value: str) -> str | None:
    "What is wrong with the name of a device."
    if value == "auto" or re.fullmatch(rf"({'|'.join(DEVICES)})(:\d{{1,3}})?", value):
        return None
    known = ", ".join(DEVICES[:3])
    return f"is no device; choose {known}, one by number, e.g. cuda:0, or auto"


def ascending_problem(value: Sequence[int]) -> str | None:
    "What is wrong with layer ids beyond their range."
    ascending = sorted(set(value))
    return None if list(value) == ascending else f"must ascend, each id once, e.g. {ascending}"


def repeated_problem(value: Any) -> str | None:
    "What is wrong with settings that are each measured once."
    twice = [v for v, n in Counter(value).items() if n > 1] if isinstance(value, (list, tuple)) else []
    return f"{twice[0]} is there twice; give each value once" if twice else None


def recorded_problem(value: str | os.PathLike) -> str | None:
    "What is wrong with the name of an output, which its records hold."
    try:
        os.fspath(value).encode()
    except UnicodeEncodeError:
        return "is no UTF-8, in which the records of a run are written; name another place"
    return None


def steps_problem(value: float) -> str | None:
    "What is wrong with an interval of steps."
    fine = value <= 1 or value == int(value)
    return None if fine else f"must be a whole number, or a share below 1, e.g. {int(value)}"


def no_steps_problem(value: int) -> str | None:
    "What is wrong with a number of steps."
    return "trains nothing; give a number of steps, or leave it out" if value == 0 else None


def costs_problem(value: Collection[float]) -> str | None:
    "What is wrong with the costs of steps."
    return None if len(value) else "is empty; give the costs of steps with 0, 1, … draft tokens"


MOONCAKE = r"mooncake://(?P<host>[\w.-]+):(?P<port>\d{1,5})(\?segment_gb=(?P<gb>\d{1,5}(\.\d+)?))?"


@dataclass(frozen=True)
class MooncakeAddress:
    "The master of a Mooncake store, and the memory that a server gives to it."

    host: str
    port: int
    segment_gb: float = 4.0  # of states that are not read yet


def mooncake_address(storage: Any) -> MooncakeAddress | None:
    "The Mooncake master that `mooncake://HOST:PORT` names; None for a folder. ValueError: its address is broken."
    text = os.fspath(storage) if isinstance(storage, (str, os.PathLike)) else ""
    if not re.match(r"mooncake:", text, re.I):
        return None
    found = re.fullmatch(MOONCAKE, text)
    gb = float(found["gb"] or 4.0) if found else 0
    if not found or not 0 < int(found["port"]) < 65536 or not gb:
        raise ValueError(
            f"storage={shown(text)}: is no address of a Mooncake master; write something like "
            "mooncake://127.0.0.1:50051, or with ?segment_gb=16 behind it"
        )
    return MooncakeAddress(found["host"], int(found["port"]), gb)


def storage_problem(value: str | os.PathLike) -> str | None:
    "What is wrong with the place of hidden states between a server and its client."
    try:
        mooncake_address(value)
    except ValueError as e:
        return str(e).partition(": ")[2]
    return recorded_problem(value)


def printable(text: str) -> str:
    r"""A text for a terminal: what it would obey, such as an escape sequence or a character
    that turns the line around, is written as \x1b; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def typed(value: object) -> str:  # as it is typed after a command
    "An argument that a command does not take for an option: the folder -x is written ./-x."
    text = str(value)
    return f"./{text}" if text.startswith("-") else text


def pairs(extra: Mapping | Iterable[str] | None) -> dict[str, Any]:
    "Read further arguments: a mapping, or texts name=value. Errors: ValueError: not name=value, or a name given twice."
    if isinstance(extra, Mapping):
        return dict(extra)
    found = {}
    for item in extra or ():
        name, equals, value = item.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"extra={shown(item)}: write name=value, e.g. warmup_steps=100")
        if name in found:
            raise ValueError(f"extra={shown(item)}: {name} is given twice; leave one out")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


DECIDED = {  # words of `vllm serve` -> the option that decides them
    "--host": "host",
    "--port": "port",
    "--dtype": "dtype",
    "--max-model-len": "max_model_len",
    "--enforce-eager": "enforce_eager",
    "--speculative-config": "k and method",
}


def check_vllm_arguments(extra: Iterable[str]) -> None:
    """Further arguments of `vllm serve`, e.g. --max-num-seqs=8. Errors: ValueError for one that has an option of its
    own here, and for a word that is no argument."""
    takes = False  # whether the item before is an option that may want a value
    for item in extra:
        if option := DECIDED.get(item.partition("=")[0]):
            raise ValueError(f"extra={shown(item)}: has an option of its own; use {option}")
        if not item.startswith("-") and not takes:
            raise ValueError(
                f"extra={shown(item)}: is no argument of vllm serve; write --name=value, e.g. --extra=--max-num-seqs=8"
            )
        takes = item.startswith("-") and "=" not in item


# options of `train` -> their names in `train_drafter`
TRAINER_NAMES = {"server": "url", "aux_layer_ids": "target_layer_ids"}
NO_WEIGHTS = ("ngram", "ngram_gpu", "suffix")  # methods without a draft checkpoint
FILTERS = dict(top_p=1.0, top_k=0, min_p=0.0)  # of sampling: name -> default, which is off
# options of `evaluate` that one engine alone reads: name -> default
ONLY_VLLM = dict(
    server=None, concurrency=None, max_model_len=None, vllm=None, extra=None, dtype="auto", load="requests"
)
ONLY_HERE = dict(rule="standard", as_engine=False, device=None, attn_implementation=None, kv_cache="dynamic")


class NoEffect(ValueError):
    "An option that is given, and that another one makes useless."

    def __init__(self, message: str, name: str = ""):
        super().__init__(message)
        self.name = name


def _leave_out(values: Mapping, names: Mapping | Sequence[str], why: str) -> None:
    "Errors: NoEffect where an option is given, and is not its default (name -> default), that would have no effect."
    defaults = names if isinstance(names, Mapping) else dict.fromkeys(names, 0)
    for name, default in defaults.items():
        value = values.get(name)
        if value is not None and value != [] and value != default:
            raise NoEffect(f"{name}={shown(value)}: {why}", name)


def _check_together(values: Mapping, command: str) -> None:
    "Options that depend on each other, where some may be given alone. Errors: ValueError."
    get = values.get
    rank, world_size = get("rank"), get("world_size")
    if rank is not None and world_size is not None and rank >= world_size:
        raise ValueError(f"{rank=}: must be less than {world_size=}; lower it, or raise the other")
    low, high = get("down_sample_ratio_min"), get("down_sample_ratio")
    if low is not None and high is not None and low > high:
        raise ValueError(f"down_sample_ratio_min={low}: must be at most down_sample_ratio={high}; lower it")
    if get("eval_share") == 0:
        none = "and eval_share=0 holds no row out; raise eval_share, or leave this out"
        _leave_out(values, ["early_stopping_patience"], f"needs evaluations, {none}")
        _leave_out(values, ["decode_prompts"], f"is decoded at each evaluation, {none}")
    if get("regenerate_every") is None:
        why = "has no effect without regenerate_every; leave it out, or give regenerate_every"
        _leave_out(values, {"regenerate_temperature": 1.0}, why)
    if (rank := get("lora_rank")) is not None:
        if "from_pretrained" in values and get("from_pretrained") is None:
            raise ValueError(
                f"lora_rank={shown(rank)}: an adapter is for a drafter that is there; give from_pretrained "
                "(--from-pretrained), or leave lora_rank out"
            )
        _leave_out(
            values, ["fsdp"], f"lora_rank={shown(rank)} trains few weights, on every rank; leave one of them out"
        )
    else:
        _leave_out(values, ["lora_alpha"], "has no effect without lora_rank; leave it out, or give lora_rank")
    k: Any = get("k")
    if get("rule") == "fly" and 1 in (k if isinstance(k, (list, tuple)) else [k]):
        raise ValueError(
            "rule='fly': looks at the tokens after a doubtful one, and k=1 drafts none; draft at least 2, or set "
            "rule=standard"
        )
    saves, evaluates = get("save_strategy"), get("eval_strategy", "epoch")
    keeps = get("eval_share", 0) != 0 and get("load_best_model_at_end", True)
    if keeps and "save_strategy" in values and saves not in (evaluates, "best"):
        raise ValueError(
            f"save_strategy={shown(saves)}: the checkpoint of the best evaluation is kept, with "
            f"eval_share={shown(get('eval_share'))} and eval_strategy={shown(evaluates)}; save as often as you "
            "evaluate, or set load_best_model_at_end=false"
        )
    if (weight := get("per_position_loss_weight")) not in (None, "fixed-exp-decay"):
        why = f"per_position_loss_weight={shown(weight)} weighs every drafted token already; leave one of them out"
        _leave_out(values, {"step_weights": None}, why)
    decider = "temperature" if command == "evaluate" else "temperatures"
    if decider in values:
        given: Any = get(decider)
        if max(given if hasattr(given, "__iter__") else [given or 0], default=0) <= 0:
            why = f"has no effect with {decider}={shown(given)}, which is greedy; leave it out, or set {decider}=1"
            _leave_out(values, FILTERS, why)
    from_server = get("source") == "vllm" if command == "features" else command == "train" and get("server") is not None
    if from_server and get("storage", "") is None:
        raise ValueError(
            "storage=None: is missing; name the folder or the Mooncake store that the server writes to, as in: "
            "speculators-nb serve VERIFIER --hidden-states FOLDER"
        )
    match command:
        case "regenerate":
            if get("verifier", "") is None and get("server", "") is None:
                raise ValueError(
                    "verifier=None: nothing would write the answers; give verifier (in this process) or server (its "
                    "address)"
                )
            if get("server") is not None:
                _leave_out(values, ["self_prompts"], "are written in this process; leave it out")
        case "features" if from_server:
            why = "has no effect with source=vllm; leave it out, or set source=hf"
            _leave_out(values, dict(device=None, attn_implementation=None, compute_dtype="auto"), why)
        case "features" if "source" in values:
            why = f"has no effect with source={get('source')}; leave it out, or set source=vllm"
            _leave_out(values, ["storage"], why)
        case "train":
            if from_server:
                why = "the verifier must run in this process; leave it or server out"
                _leave_out(values, {"regenerate_every": None}, why)
            elif "server" in values:
                _leave_out(values, ["storage"], "has no effect without a server; leave it out, or give server")
            more = pairs(get("extra"))
            options = {TRAINER_NAMES.get(name, name): name for name in values}
            if taken := sorted(more.keys() & (options.keys() | values.keys())):
                option = f"--{options.get(taken[0], taken[0]).replace('_', '-')}"
                given = shown(f"{taken[0]}={more[taken[0]]}")
                raise ValueError(f"extra={given}: has an option of its own; use {option}")
            if more:
                check_options({name: v for name, v in values.items() if name != "extra" and v is not None} | more)
        case "evaluate":
            _check_evaluate(values)
        case "serve" if get("hidden_states") is not None:
            why = "hidden_states serves the verifier alone; leave it out"
            _leave_out(values, ("k", "method", "native", "verifier"), why)
        case "serve" if "hidden_states" in values:
            why = "has no effect without hidden_states; leave it out, or give hidden_states"
            _leave_out(values, ["aux_layer_ids"], why)
        case "check" if get("engine") == "llama.cpp":
            _leave_out(values, ["engine_version"], "is a version of vLLM; leave it out, or set engine=vllm")
        case "export" if get("to") == "fp8":
            unread = "format", "verifier", "trust_remote_code"
            _leave_out(values, unread, "has no effect with to=fp8; leave it out")
        case "export" if get("to") is not None:
            why = "has no effect with to=llama.cpp, which reads GGUF; leave one of them out"
            _leave_out(values, ["format", "trust_remote_code"], why)
            if get("verifier") is None:
                raise ValueError(
                    "verifier=None: name the GGUF file that llama.cpp serves; the drafter is given its tokenizer"
                )
    if command in ("evaluate", "serve"):
        check_vllm_arguments(get("extra") or ())


def _check_evaluate(values: Mapping) -> None:
    get, engine, k, method = values.get, values.get("engine"), values.get("k", 1), values.get("method")
    drafter, verifier, server = get("drafter"), get("verifier"), get("server")
    lengths = k if isinstance(k, (list, tuple)) else [k]
    if engine == "reference" and (len(lengths) > 1 or 0 in lengths):
        raise ValueError(
            f"k={shown(k)}: the reference decoder measures one draft length at a "
            "time, of at least 1; give one, e.g. 4, or set engine=vllm"
        )
    if values.keys() >= {"drafter", "method", "verifier", "server"}:
        if drafter is None and method is None and server is None:
            raise ValueError(
                "drafter is missing: write evaluate DRAFTER DATA, or give method ngram, suffix or "
                "mtp (heads of the verifier), and verifier"
            )
        if method in NO_WEIGHTS and drafter is not None:
            raise ValueError(
                f"drafter={shown(str(drafter))}: method={method} drafts without one; leave it out, "
                "and name the model as verifier"
            )
        if method is not None and drafter is None and method not in (*NO_WEIGHTS, "mtp"):
            raise ValueError(f"drafter is missing: method={method} needs one; give its folder or hub id")
        alone = drafter is None and method is not None
        if verifier is None and (alone or method == "draft_model"):
            raise ValueError(f"verifier=None: method={method} needs the model that is to write; give it")
    several = get("temperature")
    if method == "suffix" and isinstance(several, (list, tuple)) and several[1:]:
        raise ValueError(
            f"temperature={shown(several)}: method=suffix remembers the answers at the first; measure one at a time"
        )
    if engine == "vllm" and "server" in values and server is None:
        why = "vLLM 0.32 does not take it with speculative decoding; leave it out, or set engine=reference"
        _leave_out(values, ["min_p"], why)
    if engine is not None:
        other, unread = ("vllm", ONLY_VLLM) if engine == "reference" else ("reference", ONLY_HERE)
        _leave_out(values, unread, f"has no effect with engine={engine}; leave it out, or set engine={other}")
    if server is not None:
        why = "is decided when a server starts, and this one runs already; leave it out"
        _leave_out(values, dict(k=None, method=None, dtype="auto", max_model_len=None, vllm=None, extra=None), why)


MOST_DRAFTED = 4096  # tokens in a step
MOST_TOKENS = 2**22  # in a row, an answer, a forward pass
SEED = dict(low=0, high=2**32 - 1)  # NumPy takes no other
TEMPERATURE: dict[str, Any] = dict(low=0, high=100)
SEVERAL_TEMPERATURES = several(number(0.7, **TEMPERATURE), "0 0.7", none=True, alone=True, test=repeated_problem)
HERE = "http://127.0.0.1:8000"  # where a server listens, if no option says otherwise
ADDRESS = text(HERE, test=address_problem)

REGISTERED: set[str] = set()  # types of drafters that were registered in this process


@cache
def shipped_drafters() -> dict[str, dict[str, str]]:  # type -> class -> its module
    "Each drafter's model and config, as the sources of models/ register them."
    entry = re.compile(r'^@SpeculatorModel\w*\.register\("(\w+)"\)\nclass (\w+)', re.M)
    found: dict[str, dict[str, str]] = {}
    for file in sorted((Path(speculators_nb.__file__).parent / "models").glob("*.py")):
        for kind, name in entry.findall(file.read_text(encoding="utf-8")):
            found.setdefault(kind, {})[name] = f"models.{file.stem}"
    return found


@cache
def installed_drafters() -> EntryPoints:  # type -> module that registers it
    "The drafters of other packages: their entry points `speculators_nb.drafters`."
    return entry_points(group="speculators_nb.drafters")


def algorithms() -> tuple[str, ...]:
    "Every `speculators_model_type` that can be trained."
    further = sorted(installed_drafters().names | REGISTERED)
    return tuple(dict.fromkeys([*shipped_drafters(), *further]))


FIRST_CHOICE = "eagle3"  # the algorithm where none is named


STORED = ("bfloat16", "float16", "float32", "float8_e4m3fn", "fp8")  # of a feature file
FLOATS = ("bfloat16", "float16", "float32", "float64")  # of weights
SERVED = ("auto", "half", "float16", "bfloat16", "float", "float32")  # as vLLM spells them
METHODS = (
    *("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "dflash", "dspark", "medusa"),
    *("mlp_speculator", "mtp", "extract_hidden_states", "custom_class"),
)
# as transformers spells them
ATTENTION = "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
PROMPT_SETS = "shipped", "mt-bench", "gsm8k", "humaneval", "math-500", "speed-bench", "alpaca-eval", "cnn-dailymail"
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)


def each(kind: Callable[..., OptionRule], examples: Mapping[str, Any], **limits) -> dict[str, OptionRule]:
    "Rules of one kind with the same limits: name -> its example."
    return {name: kind(example, **limits) for name, example in examples.items()}


PLACE: dict[str, Any] = dict(test=recorded_problem)  # what a command writes
# files and folders, servers, names
RULES = each(path, dict(data="chats.jsonl", prompts="data/corpus/train.jsonl", drafter="output/drafter"), objects=True)
RULES |= each(
    path,
    dict(
        data_dir="features",
        prepared="prepared",
        recipe="data/recipes/laptop.yaml",
        folder="output/drafter",
        checkpoint="output/drafter",
        gguf="Qwen3-0.6B-Q8_0.gguf",
        heldout="data/corpus/heldout.jsonl",
    ),
)
RULES |= each(path, dict(output="answers.jsonl", out="output/stitched"), **PLACE)
RULES |= each(path, dict(output_dir="output/run", native="output/native"), none=True, **PLACE)
RULES |= each(path, dict.fromkeys(("storage", "hidden_states"), "/dev/shm/states"), none=True, test=storage_problem)
RULES |= each(
    path,
    dict(
        from_pretrained="output/drafter",
        image_folder="pictures",
        decode_prompts="shipped",
        features="output/features",
        vllm=".venv-vllm/bin/vllm",
        draft_config="draft/config.json",
    ),
    none=True,
)
RULES |= each(text, dict(model="Qwen/Qwen3-8B", format="eagle3", draft_hidden_act="silu"), none=True)
RULES |= each(text, dict(metric_for_best_model="loss", run_name="first"), none=True)
RULES |= {
    "verifier": path("Qwen/Qwen3-8B", none=True, objects=True),
    "import_": several(path("my_drafters.py"), "my_drafters.py", none=True),
    "resume_from_checkpoint": OptionRule("resume", "output/drafter/checkpoint-100", none=True),
    "runs": several(text("output/run"), "output/run-a output/run-b"),
    "evaluation": several(text("output/evaluation"), "output/evaluation", none=True),
    **dict.fromkeys(("server", "url"), several(ADDRESS, HERE, none=True, alone=True)),
    "host": text("127.0.0.1", test=host_problem),
    "device": text("cuda:0", none=True, objects=True, test=device_problem),
    "transformer_layer_architecture": text("auto"),
}

# counts
RULES |= each(whole, dict(max_failures=50, world_size=1, ddp_timeout=1800), low=1)
RULES |= each(whole, dict(max_samples=100, n_prompts=100, n_heldout=48, self_prompts=2000), low=1, none=True)
RULES |= each(whole, dict(conversations=50_000, max_model_len=4096), low=1, none=True)
RULES |= each(whole, dict(vocab_size=151936, draft_vocab_size=32000, max_anchors=512), low=1, none=True)
RULES |= each(whole, dict(early_stopping_patience=3, regenerate_every=1, save_total_limit=2), low=1, none=True)
RULES |= each(whole, dict(torch_empty_cache_steps=100, ddp_bucket_cap_mb=25), low=1, none=True)
RULES |= each(whole, dict(max_new_tokens=256, max_tokens=8192, min_trained=1), low=1, high=MOST_TOKENS)
RULES |= each(whole, dict(context=128, tokens_each=1000), low=1, high=MOST_TOKENS)
RULES |= each(whole, dict(max_length=2048, total_seq_len=2048), low=2, high=MOST_TOKENS)
RULES |= each(whole, dict(batch_size=96), low=1, high=65536, none=True)
RULES |= each(whole, dict(ttt_steps=3, num_depths=8, num_heads=5, forward_num_total=3), low=1, high=64)
RULES |= each(whole, dict(repeats=15, rounds=40, devices=8), low=1, high=10**6)
RULES |= each(whole, dict(num_proc=4, dataloader_prefetch_factor=2), low=1, high=1024, none=True)
RULES |= each(whole, dict(rank=0, top_k=50), low=0)
RULES |= {
    "port": whole(8000, 1, 65535, none=True),
    "concurrency": several(whole(8, 1, 65536), 8, none=True, alone=True, test=repeated_problem),
    "seed": whole(0, **SEED),
    "data_seed": whole(0, none=True, **SEED),
    "k": several(whole(4, 0, MOST_DRAFTED), 4, none=True, alone=True, objects=True),
    "record": whole(5, 0, MOST_DRAFTED),
    "speculative_tokens": whole(5, 1, MOST_DRAFTED, none=True),
    "num_speculative_steps": whole(3, 1, 64, none=True),
    "block_size": whole(8, 2, 1024),
    "draws": whole(1000, 1, 10**7),
    "max_steps": whole(1000, -1, test=no_steps_problem),
    "gradient_accumulation_steps": whole(1, 1, 2**20),
    "context_parallel_size": whole(1, 1, 1024),
    "dataloader_num_workers": whole(2, 0, 1024),
    "num_layers": whole(1, 1, 1000, none=True),
    "lora_rank": whole(16, 1, 2**16, none=True),
    "lora_alpha": number(32, above=0, none=True),
    "num_hidden_layers": whole(1, 0, 1000),
    "intermediate_size": whole(1024, 1, 2**20, none=True),
    "markov_rank": whole(256, 0, 2**16),
    "mask_token_id": whole(0, 0, none=True),
    "sliding_window": whole(2048, 1, MOST_TOKENS, none=True),
    "full_attention_indices": several(whole(0, 0, 999), [0, 2], none=True),
    **dict.fromkeys(
        ("aux_layer_ids", "target_layer_ids"),
        several(whole(2, 0, 10_000), "2 18 33", none=True, test=ascending_problem),
    ),
}

# other numbers
RULES |= each(number, dict(patience=120, warmup_steps=100, weight_decay=0.01, max_grad_norm=1.0, eval_delay=0), low=0)
RULES |= each(number, dict(confidence_head_alpha=1.0, feature_weight=1.0, noise_std=0.2), low=0)
RULES |= each(number, dict(down_sample_ratio_min=0.2, dpace_alpha=0.5, min_p=0.05), low=0, high=1)
RULES |= each(number, dict(val_fraction=0.05, adam_beta1=0.9, adam_beta2=0.999), low=0, below=1)
RULES |= each(number, dict(temperature=0.7, regenerate_temperature=1.0), **TEMPERATURE)
RULES |= each(number, dict(timeout=600, dflash_decay_gamma=4.0, budget=2.5e11), above=0)
RULES |= each(number, dict(learning_rate=1e-4, muon_learning_rate=1e-3), above=0, none=True)
RULES |= each(number, dict(memory=80, disk=2000, tflops=989, bandwidth=3.0), above=0, none=True)
RULES |= each(number, dict(num_train_epochs=3, epochs=3), above=0, high=10**6)
RULES |= each(number, dict(down_sample_ratio=0.7, top_p=0.9), above=0, high=1)
RULES |= each(number, dict(ttt_step_loss_decay=1.0, step_weight_beta=0.6), above=0, high=10)
RULES |= each(number, dict(logging_steps=10, save_steps=100), above=0, test=steps_problem)
RULES |= {
    "eval_steps": number(100, above=0, none=True, test=steps_problem),
    "eval_share": number(0.05, low=0, below=1, none=True),
    "shard_gb": number(2.0, above=0, high=1000, none=True),
    "mfu": number(0.3, above=0, high=1, none=True),
    "head_loss_decay": number(0.8, above=0, high=10, none=True),
    "step_weights": several(number(0.5, low=0), [0.5, 0.3, 0.2], none=True, objects=True),
    "temperatures": SEVERAL_TEMPERATURES,
}

# words
RULES |= {
    "algorithm": OptionRule("word", FIRST_CHOICE, words=algorithms),
    "draft_arch": word("llama", "qwen3", "deepseek_v3", none=True),
    "method": word(*METHODS, none=True),
    "engine": word("reference", "vllm"),
    "engine_version": word("0.32", "0.33", none=True),
    "source": word("hf", "vllm"),
    "to": word("llama.cpp", "fp8", none=True),
    "rows": word("conversation", "turn"),
    "too_long": word("cut", "drop"),
    "on_bad": word("raise", "skip"),
    "rule": word("standard", "greedy", "strict", "block", "traversal", "typical", "fly", objects=True),
    "kv_cache": word("dynamic", "static", "graphs"),
    "load": word("requests", "guidellm"),
    "optimizer": word("adamw", "muon"),
    "checkpoint_format": word("full", "sharded"),
    "markov_head_type": word("vanilla", "gated", "rnn"),
    "attn_impl": word("blocked", "sdpa", "flex", "eager", none=True),
    "draft_attn_impl": word("simple_flex_attention", "sdpa", "eager", none=True),
    "attn_implementation": word(*ATTENTION, none=True),
    "dtype": word(*STORED),
    "compute_dtype": word("auto", "bfloat16", "float32", none=True),
    "save_dtype": word(*FLOATS[:3], none=True),
    "gemm_dtype": word(*FLOATS, none=True),
    "lr_scheduler_type": word(*SCHEDULES),
    "logging_strategy": word("no", "steps", "epoch"),
    "eval_strategy": word("no", "steps", "epoch", none=True),
    "save_strategy": word("no", "steps", "epoch", "best"),
    "per_position_loss_weight": OptionRule("word", "dpace", words=lambda: tuple(LOSS_WEIGHTS), none=True, objects=True),
    "loss_fn": OptionRule("loss", "kl_div", none=True),
    "languages": several(text("en"), "en", none=True, alone=True),
    "report_to": several(text("tensorboard"), "tensorboard", none=True, alone=True),
    "extra": several(text("warmup_steps=100"), "warmup_steps=100", none=True),
}

RULES |= {
    "template_kwargs": mapping({"enable_thinking": False}, none=True),
    "config": mapping({"norm_before_residual": True}, none=True),
    "lr_scheduler_kwargs": mapping({"num_cycles": 2}, none=True),
    "gradient_checkpointing_kwargs": mapping({"use_reentrant": False}, none=True),
    "activation_checkpointing_kwargs": mapping({"use_reentrant": False}, none=True),  # from transformers 5.24 on
    "sampling": mapping({"top_p": 0.9}, none=True, objects=True),
}

# switches; `train.training_arguments` refuses those of transformers that would have no effect
RULES |= switches(
    """dedup shuffle allow_urls overwrite dry_run resume trust_remote_code trust_features link run ngram as_engine
    baseline train_reasoning train_tool_calls bf16 fsdp layernorms fusion_bias embed_requires_grad norm_before_residual
    fc_norm norm_before_fc norm_output fresh_head verifier_norm tie_weights inputs_hidden_states_normalized ce_from_data
    logging_first_step load_best_model_at_end eval_on_start full_determinism use_cpu torch_compile
    dataloader_pin_memory dataloader_persistent_workers dataloader_in_order push_to_hub skip_memory_metrics
    remove_unused_columns save_on_each_node log_on_each_node restore_callback_states_from_checkpoint
    enable_jit_checkpoint hub_always_push eval_use_gather_object do_train do_eval do_predict"""
)
RULES |= switches(
    """cross_document_targets serving_window use_off_policy_tokens sample_from_anchor as_served
    sliding_window_non_causal is_causal attention_sink_bias enable_confidence_head confidence_head_with_markov
    enforce_eager disable_tqdm greater_is_better tf32 ddp_find_unused_parameters ddp_broadcast_buffers
    ddp_static_graph hub_private_repo gradient_checkpointing activation_checkpointing""",
    none=True,
)
ARGUMENTS = several(text("--max-num-seqs=8"), "--max-num-seqs=8", none=True)
IN = {
    "convert.source": path("downloads/eagle"),
    "train.algorithm": OptionRule("word", FIRST_CHOICE, words=algorithms, none=True),
    "vocab.draft_vocab_size": whole(32000, 1),
    **each(whole, {"regenerate.concurrency": 16, "features.concurrency": 8}, low=1, high=65536),
    **dict.fromkeys(("regenerate.engine", "features.engine"), word("local", "ray")),
    "check.engine": word("vllm", "llama.cpp"),
    "evaluate.server": text("http://127.0.0.1:8000", none=True, test=address_problem),
    **dict.fromkeys(("evaluate.dtype", "serve.dtype"), word(*SERVED)),
    **dict.fromkeys(("evaluate.extra", "serve.extra"), ARGUMENTS),
    "serve.k": whole(4, 0, MOST_DRAFTED, none=True),
    **each(whole, {"demo.k": 4, "real.k": 4, "experiment.k": 4}, low=1, high=MOST_DRAFTED),
    "evaluate.temperature": SEVERAL_TEMPERATURES,
    "evaluate.drafter": path("output/drafter", none=True, objects=True),
    "evaluate.method": word(*METHODS[:-2], none=True),  # the last two draft nothing here
    "doctor.data": path("chats.jsonl", none=True, objects=True),
    "from-gguf.save_dtype": word(*FLOATS[:3]),
    **{
        f"{command}.verifier": path("Qwen/Qwen3-8B", objects=True)
        for command in ("prepare", "features", "convert", "stitch-mtp", "demo")
    },
    **{
        f"{command}.output_dir": path("output/run", **PLACE)
        for command in ("prepare", "features", "train", "calibrate", "convert", "export", "demo", "real", "from-gguf")
    },
    "experiment.file": path("experiment.yaml"),
    "experiment.seeds": whole(3, 1, 1000),
    "experiment.draft_lengths": several(whole(4, 1, MOST_DRAFTED), "2 4"),
    "experiment.n_prompts": whole(24, 1),
    "experiment.workers": whole(2, 1, 1024),
    "experiment.max_new_tokens": whole(160, 1, MOST_TOKENS),
    "experiment.features": path("output/features"),
    "experiment.heldout": path("output/prepared"),
    # arguments from Python
    **each(whole, {"NgramDrafter.min_n": 1, "NgramDrafter.max_n": 5, "tolerant.accept_k": 1}, low=1),
    **each(whole, {"fly.entropy_top_k": 3, "batch_verify.batch": 8, "reliability_table.bins": 10}, low=1),
    **each(whole, {"LengthByRates.memory": 50, "LengthByConfidence.every": 10}, low=1),
    "fly.window_size": whole(6, 1, none=True),
    "SuffixDrafter.depth": whole(24, 2),
    "SuffixDrafter.max_requests": whole(10_000, 0),
    "SuffixDrafter.factor": number(1.0, low=0),
    "SuffixDrafter.min_prob": number(0.1, low=0, high=1),
    "LengthByRates.costs": several(number(1.0, above=0), [1.0, 1.1, 1.2], test=costs_problem),
    **{f"experiment.{name}": mapping({"max_steps": 100}) for name in ("settings", "grid", "common")},
}


def rule_of(name: str, where: str = "") -> OptionRule | None:  # None: there is none
    "The rule of an option."
    return IN.get(f"{where}.{name}") or RULES.get(name)


def check_options(values: Mapping, where: str = "", before: str = "") -> None:
    """Refuse what makes no sense of any options of a command. Errors: ValueError: `before`, the option, its value and
    what to write."""
    try:
        for name, value in values.items():
            rule = rule_of(name, where)
            if rule and (wrong := rule.problem(value)):
                plain = os.fspath(value) if isinstance(value, os.PathLike) else value
                if rule.alone and isinstance(value, (list, tuple)) and len(value) == 1:
                    plain = value[0]
                raise ValueError(f"{name}={shown(plain)}: {wrong}")
        _check_together(values, where)
        if where in ("", "vocab"):  # which writes beside what it reads
            return
        for output in values.keys() & {"output", "output_dir"}:
            for source in values.keys() & {"data", "data_dir", "prepared", "verifier"}:
                made, read = values[output], values[source]
                named = all(isinstance(place, (str, os.PathLike)) for place in (made, read))
                if named and os.path.realpath(made) == os.path.realpath(read):
                    raise ValueError(f"{output}={shown(os.fspath(made))}: is {source} itself; name another place")
    except ValueError as e:
        if before:
            raise ValueError(f"{before}{e}") from None
        raise
