"""Rules for the options of every command and function, in one table, and the relations between options.
They are checked before any work is done. A refusal is one line with the option, the fault and a value that is right."""

import difflib
import ipaddress
import json
import math
import numbers
import os
import re
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
        if self.objects and not plain and (self.kind != "list" or callable(value)):
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
    if not math.isfinite(value):
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


# `nn.losses.register_loss` and `nn.step_weights.register_loss_weight` add to these two
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


def whole(example, low=None, high=2**31, **more) -> OptionRule:
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


def _leave_out(values: Mapping, name: str, why: str, default: Any = 0) -> None:
    "Errors: ValueError where an option is given, and is not its default, that would have no effect."
    value = values.get(name)
    if value is not None and value != [] and value != default:
        raise ValueError(f"{name}={shown(value)}: {why}")


def _check_output(values: Mapping) -> None:
    "Errors: ValueError where what is made is what it is made from."
    paths = {name: os.fspath(value) for name, value in values.items() if isinstance(value, (str, os.PathLike))}
    for output in paths.keys() & {"output", "output_dir"}:
        for source in paths.keys() & {"data", "data_dir", "prepared", "verifier"}:
            if os.path.realpath(paths[source]) == os.path.realpath(paths[output]):
                raise ValueError(f"{output}={shown(paths[output])}: is {source} itself; name another place")


NO_WEIGHTS = ("ngram", "ngram_gpu", "suffix")  # methods without a draft checkpoint
FILTERS = dict(top_p=1.0, top_k=0, min_p=0.0)  # of sampling: name -> default, which is off


def _check_filters(values: Mapping, decider: str) -> None:
    "A filter of sampling has an effect only where a temperature is above 0."
    given: Any = values.get(decider)
    temperatures = given if hasattr(given, "__iter__") else [given or 0]
    if max(temperatures, default=0) <= 0:
        why = f"has no effect with {decider}={shown(given)}, which is greedy; leave it out, or set {decider}=1"
        for name, default in FILTERS.items():
            _leave_out(values, name, why, default)


def _check_together(values: Mapping) -> None:
    "Options of any command or function that depend on each other. Errors: ValueError."
    get = values.get
    rank, world_size = get("rank"), get("world_size")
    if rank is not None and world_size is not None and rank >= world_size:
        raise ValueError(f"{rank=}: must be less than {world_size=}; lower it, or raise the other")
    low, high = get("down_sample_ratio_min"), get("down_sample_ratio")
    if low is not None and high is not None and low > high:
        raise ValueError(f"down_sample_ratio_min={low}: must be at most down_sample_ratio={high}; lower it")
    if get("eval_share") == 0:
        none = "and eval_share=0 holds no row out; raise eval_share, or leave this out"
        _leave_out(values, "early_stopping_patience", f"needs evaluations, {none}")
        _leave_out(values, "decode_prompts", f"is decoded at each evaluation, {none}")
    if get("regenerate_every") is None:
        why = "has no effect without regenerate_every; leave it out, or give regenerate_every"
        _leave_out(values, "regenerate_temperature", why, default=1.0)
    if (rank := get("lora_rank")) is not None:
        if "from_pretrained" in values and get("from_pretrained") is None:
            raise ValueError(
                f"lora_rank={shown(rank)}: an adapter is for a drafter that is there; give from_pretrained "
                "(--from-pretrained), or leave lora_rank out"
            )
        _leave_out(values, "fsdp", f"lora_rank={shown(rank)} trains few weights, on every rank; leave one of them out")
    else:
        _leave_out(values, "lora_alpha", "has no effect without lora_rank; leave it out, or give lora_rank", None)
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
        _leave_out(values, "step_weights", why, default=None)
    if "temperatures" in values:
        _check_filters(values, "temperatures")


def _check_storage(values: Mapping) -> None:
    if values.get("storage", "") is None:
        raise ValueError(
            "storage=None: is missing; name the folder or the Mooncake store that the server writes to, as in: "
            "speculators-nb serve VERIFIER --hidden-states FOLDER"
        )


def _check_features(values: Mapping) -> None:
    source = values.get("source", "hf")
    if source == "vllm":
        _check_storage(values)
        why = "has no effect with source=vllm; leave it out, or set source=hf"
        for name, default in (("device", None), ("attn_implementation", None), ("compute_dtype", "auto")):
            _leave_out(values, name, why, default)
    elif "source" in values:
        _leave_out(values, "storage", f"has no effect with source={source}; leave it out, or set source=vllm")


def _check_train(values: Mapping) -> None:
    if values.get("server") is not None:
        _check_storage(values)
        _leave_out(values, "regenerate_every", "the verifier must run in this process; leave it or server out", None)
    elif "server" in values:
        _leave_out(values, "storage", "has no effect without a server; leave it out, or give server")
    more = pairs(values.get("extra"))
    if taken := sorted(more.keys() & values.keys()):
        option = f"--{taken[0].replace('_', '-')}"
        given = shown(f"{taken[0]}={more[taken[0]]}")
        raise ValueError(f"extra={given}: has an option of its own; use {option}")
    if more:
        check_options({name: v for name, v in values.items() if name != "extra" and v is not None} | more)


# options of `evaluate` that one engine alone reads: name -> default
ONLY_VLLM = dict(
    server=None, concurrency=None, max_model_len=None, vllm=None, extra=None, dtype="auto", load="requests"
)
ONLY_HERE = dict(rule="standard", as_engine=False, device=None, attn_implementation=None, kv_cache="dynamic")


def _check_what_drafts(drafter: Any, method: str | None, verifier: Any, server: str | None) -> None:
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


def _check_evaluate(values: Mapping) -> None:
    get, engine, k = values.get, values.get("engine"), values.get("k", 1)
    lengths = k if isinstance(k, (list, tuple)) else [k]
    if engine == "reference" and (len(lengths) > 1 or 0 in lengths):
        raise ValueError(
            f"k={shown(k)}: the reference decoder measures one draft length at a "
            "time, of at least 1; give one, e.g. 4, or set engine=vllm"
        )
    if values.keys() >= {"drafter", "method", "verifier", "server"}:
        _check_what_drafts(get("drafter"), get("method"), get("verifier"), get("server"))
    several = get("temperature")
    if get("method") == "suffix" and isinstance(several, (list, tuple)) and several[1:]:
        raise ValueError(
            f"temperature={shown(several)}: method=suffix remembers the answers at the first; measure one at a time"
        )
    if engine == "vllm" and "server" in values and get("server") is None:
        why = "vLLM 0.32 does not take it with speculative decoding; leave it out, or set engine=reference"
        _leave_out(values, "min_p", why)
    if engine is not None:
        other = "vllm" if engine == "reference" else "reference"
        for name, default in (ONLY_VLLM if engine == "reference" else ONLY_HERE).items():
            _leave_out(
                values, name, f"has no effect with engine={engine}; leave it out, or set engine={other}", default
            )
    if "temperature" in values:
        _check_filters(values, "temperature")
    if get("server") is not None:
        for name in ("k", "method"):
            _leave_out(values, name, "is decided when a server starts, and this one runs already; leave it out")
    check_vllm_arguments(get("extra") or ())


def _check_command(values: Mapping, command: str) -> None:
    "Options of a command that depend on each other, of which some may be given alone. Errors: ValueError."
    get = values.get
    match command:
        case "regenerate":
            if get("verifier", "") is None and get("server", "") is None:
                raise ValueError(
                    "verifier=None: nothing would write the answers; give verifier (in this process) or server (its "
                    "address)"
                )
            if get("server") is not None:
                _leave_out(values, "self_prompts", "are written in this process; leave it out")
        case "features":
            _check_features(values)
        case "train":
            _check_train(values)
        case "evaluate":
            _check_evaluate(values)
        case "serve":
            if get("hidden_states") is not None:
                for name in ("k", "method", "native", "verifier"):
                    _leave_out(values, name, "hidden_states serves the verifier alone; leave it out")
            elif "hidden_states" in values:
                why = "has no effect without hidden_states; leave it out, or give hidden_states"
                _leave_out(values, "aux_layer_ids", why)
            check_vllm_arguments(get("extra") or ())
        case "check" if get("engine") == "llama.cpp":
            _leave_out(values, "engine_version", "is a version of vLLM; leave it out, or set engine=vllm")
        case "export" if get("to") is not None:
            _leave_out(values, "format", "has no effect with to=llama.cpp, which reads GGUF; leave one of them out")
            if get("verifier") is None:
                raise ValueError(
                    "verifier=None: name the GGUF file that llama.cpp serves; the drafter is given its tokenizer"
                )


MOST_DRAFTED = 4096  # tokens in a step
MOST_TOKENS = 2**22  # in a row, an answer, a forward pass
SEED = dict(low=0, high=2**32 - 1)  # NumPy takes no other
TEMPERATURE: dict[str, Any] = dict(low=0, high=100)
SEVERAL_TEMPERATURES = several(number(0.7, **TEMPERATURE), "0 0.7", none=True, alone=True)
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

RULES: dict[str, OptionRule] = {
    "data": path("chats.jsonl", objects=True),
    "data_dir": path("features"),
    "prepared": path("prepared"),
    "recipe": path("data/recipes/laptop.yaml"),
    "output": path("answers.jsonl", test=recorded_problem),
    "output_dir": path("output/run", none=True, test=recorded_problem),
    "out": path("output/stitched", test=recorded_problem),
    "folder": path("output/drafter"),
    "verifier": path("Qwen/Qwen3-8B", none=True, objects=True),
    "drafter": path("output/drafter", objects=True),
    "checkpoint": path("output/drafter"),
    "gguf": path("Qwen3-0.6B-Q8_0.gguf"),
    "from_pretrained": path("output/drafter", none=True),
    "import_": several(path("my_drafters.py"), "my_drafters.py", none=True),
    "resume_from_checkpoint": OptionRule("resume", "output/drafter/checkpoint-100", none=True),
    "native": path("output/native", none=True, test=recorded_problem),
    "storage": path("/dev/shm/states", none=True, test=storage_problem),
    "hidden_states": path("/dev/shm/states", none=True, test=storage_problem),
    "image_folder": path("pictures", none=True),
    "prompts": path("data/corpus/train.jsonl", objects=True),
    "heldout": path("data/corpus/heldout.jsonl"),
    "decode_prompts": path("shipped", none=True),
    "runs": several(text("output/run"), "output/run-a output/run-b"),
    "features": path("output/features", none=True),
    "evaluation": several(text("output/evaluation"), "output/evaluation", none=True),
    "vllm": path(".venv-vllm/bin/vllm", none=True),
    "engine_version": word("0.32", "0.33", none=True),
    **dict.fromkeys(("server", "url"), several(ADDRESS, HERE, none=True, alone=True)),
    "host": text("127.0.0.1", test=host_problem),
    "port": whole(8000, 1, 65535, none=True),
    "model": text("Qwen/Qwen3-8B", none=True),
    "device": text("cuda:0", none=True, objects=True, test=device_problem),
}

LAYERS = several(whole(2, 0, 10_000), "2 18 33", none=True, test=ascending_problem)
RULES |= {
    "source": word("hf", "vllm"),
    **dict.fromkeys(("max_samples", "n_prompts"), whole(100, 1, none=True)),
    "n_heldout": whole(48, 1, none=True),
    "self_prompts": whole(2000, 1, none=True),
    "max_new_tokens": whole(256, 1, MOST_TOKENS),
    "max_length": whole(2048, 2, MOST_TOKENS),
    "max_tokens": whole(8192, 1, MOST_TOKENS),
    "batch_size": whole(96, 1, 65536, none=True),
    "max_failures": whole(50, 1),
    "max_model_len": whole(4096, 1, none=True),
    "min_trained": whole(1, 1, MOST_TOKENS),
    "concurrency": several(whole(8, 1, 65536), 8, none=True, alone=True),
    "num_proc": whole(4, 1, 1024, none=True),
    "rank": whole(0, 0),
    "world_size": whole(1, 1),
    "timeout": number(600, above=0),
    "patience": number(120, low=0),
    "rows": word("conversation", "turn"),
    "too_long": word("cut", "drop"),
    "languages": several(text("en"), "en", none=True, alone=True),
    "template_kwargs": mapping({"enable_thinking": False}, none=True),
    "sampling": mapping({"top_p": 0.9}, none=True, objects=True),
    "val_fraction": number(0.05, low=0, below=1),
    "vocab_size": whole(151936, 1, none=True),
    "draft_vocab_size": whole(32000, 1, none=True),
    **dict.fromkeys(("aux_layer_ids", "target_layer_ids"), LAYERS),
    "dtype": word(*STORED),
    "compute_dtype": word("auto", "bfloat16", "float32", none=True),
    "shard_gb": number(2.0, above=0, high=1000, none=True),
    "seed": whole(0, **SEED),
    "config": mapping({"norm_before_residual": True}, none=True),
    "format": text("eagle3", none=True),
    "to": word("llama.cpp", none=True),
}
RULES |= switches(
    """dedup shuffle allow_urls overwrite dry_run resume trust_remote_code trust_features link
    run ngram as_engine baseline train_reasoning train_tool_calls bf16 fsdp"""
)

RULES |= {
    "algorithm": OptionRule("word", FIRST_CHOICE, words=algorithms),
    "draft_arch": word("llama", "qwen3", none=True),
    "num_layers": whole(1, 1, 1000, none=True),
    "lora_rank": whole(16, 1, 2**16, none=True),
    "lora_alpha": number(32, above=0, none=True),
    "sliding_window": whole(2048, 1, MOST_TOKENS, none=True),
    "full_attention_indices": several(whole(0, 0, 999), [0, 2], none=True),
    "draft_config": path("draft/config.json", none=True),
    "draft_hidden_act": text("silu", none=True),
    "eval_share": number(0.05, low=0, below=1, none=True),
    "on_bad": word("raise", "skip"),
    **dict.fromkeys(("num_train_epochs", "epochs"), number(3, above=0, high=10**6)),
    "total_seq_len": whole(2048, 2, MOST_TOKENS),
    "gradient_accumulation_steps": whole(1, 1, 2**20),
    "learning_rate": number(1e-4, above=0, none=True),
    "optimizer": word("adamw", "muon"),
    "checkpoint_format": word("full", "sharded"),
    "context_parallel_size": whole(1, 1, 1024),
    "save_dtype": word("bfloat16", "float16", "float32", none=True),
    "early_stopping_patience": whole(3, 1, none=True),
    "regenerate_every": whole(1, 1, none=True),
    "regenerate_temperature": number(1.0, **TEMPERATURE),
    "extra": several(text("warmup_steps=100"), "warmup_steps=100", none=True),
}

# of transformers' training arguments; `train.training_arguments` refuses those that would have no effect
RULES |= {
    "max_steps": whole(1000, -1, test=no_steps_problem),
    "muon_learning_rate": number(1e-3, above=0, none=True),
    "lr_scheduler_type": word(*SCHEDULES),
    "lr_scheduler_kwargs": mapping({"num_cycles": 2}, none=True),
    "warmup_steps": number(100, low=0),
    "weight_decay": number(0.01, low=0),
    "adam_beta1": number(0.9, low=0, below=1),
    "adam_beta2": number(0.999, low=0, below=1),
    "max_grad_norm": number(1.0, low=0),
    "metric_for_best_model": text("loss", none=True),
    "logging_strategy": word("no", "steps", "epoch"),
    "eval_strategy": word("no", "steps", "epoch", none=True),
    "save_strategy": word("no", "steps", "epoch", "best"),
    "logging_steps": number(10, above=0, test=steps_problem),
    "eval_steps": number(100, above=0, none=True, test=steps_problem),
    "save_steps": number(100, above=0, test=steps_problem),
    "eval_delay": number(0, low=0),
    "save_total_limit": whole(2, 1, none=True),
    "report_to": several(text("tensorboard"), "tensorboard", none=True, alone=True),
    "run_name": text("first", none=True),
    "data_seed": whole(0, none=True, **SEED),
    "dataloader_num_workers": whole(2, 0, 1024),
    "dataloader_prefetch_factor": whole(2, 1, 1024, none=True),
    "torch_empty_cache_steps": whole(100, 1, none=True),
    "ddp_timeout": whole(1800, 1),
    "ddp_bucket_cap_mb": whole(25, 1, none=True),
    # the same by its name from transformers 5.24 on
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        mapping({"use_reentrant": False}, none=True),
    ),
}

RULES |= switches(
    """logging_first_step load_best_model_at_end eval_on_start ignore_data_skip full_determinism
    use_cpu torch_compile dataloader_pin_memory dataloader_persistent_workers dataloader_in_order
    push_to_hub skip_memory_metrics remove_unused_columns save_on_each_node log_on_each_node
    restore_callback_states_from_checkpoint enable_jit_checkpoint hub_always_push
    eval_use_gather_object do_train do_eval do_predict"""
)
RULES |= switches(
    """disable_tqdm greater_is_better tf32 ddp_find_unused_parameters ddp_broadcast_buffers
    ddp_static_graph hub_private_repo gradient_checkpointing activation_checkpointing enforce_eager""",
    none=True,
)

RULES |= {
    "ttt_steps": whole(3, 1, 64),
    "num_depths": whole(8, 1, 64),
    "num_heads": whole(5, 1, 64),
    "num_speculative_steps": whole(3, 1, 64, none=True),
    "forward_num_total": whole(3, 1, 64),
    "block_size": whole(8, 2, 1024),
    "speculative_tokens": whole(5, 1, MOST_DRAFTED, none=True),
    "num_hidden_layers": whole(1, 0, 1000),
    "intermediate_size": whole(1024, 1, 2**20, none=True),
    "markov_rank": whole(256, 0, 2**16),
    "markov_head_type": word("vanilla", "gated", "rnn"),
    "mask_token_id": whole(0, 0, none=True),
    "max_anchors": whole(512, 1, none=True),
    "transformer_layer_architecture": text("auto"),
    "loss_fn": OptionRule("loss", "kl_div", none=True),
    "per_position_loss_weight": OptionRule("word", "dpace", words=lambda: tuple(LOSS_WEIGHTS), none=True, objects=True),
    "ttt_step_loss_decay": number(1.0, above=0, high=10),
    "head_loss_decay": number(0.8, above=0, high=10, none=True),
    "step_weight_beta": number(0.6, above=0, high=10),
    "step_weights": several(number(0.5, low=0), [0.5, 0.3, 0.2], none=True, objects=True),
    "dflash_decay_gamma": number(4.0, above=0),
    "dpace_alpha": number(0.5, low=0, high=1),
    "confidence_head_alpha": number(1.0, low=0),
    "down_sample_ratio": number(0.7, above=0, high=1),
    "down_sample_ratio_min": number(0.2, low=0, high=1),
    "feature_weight": number(1.0, low=0),
    "noise_std": number(0.2, low=0),
    "attn_impl": word("blocked", "sdpa", "flex", "eager", none=True),
    "draft_attn_impl": word("simple_flex_attention", "sdpa", "eager", none=True),
    "gemm_dtype": word(*FLOATS, none=True),
}
RULES |= switches(
    """layernorms fusion_bias embed_requires_grad norm_before_residual fc_norm norm_before_fc
    norm_output fresh_head verifier_norm tie_weights inputs_hidden_states_normalized
    ce_from_data"""
)
RULES |= switches(
    """cross_document_targets serving_window use_off_policy_tokens sample_from_anchor as_served
    sliding_window_non_causal is_causal attention_sink_bias enable_confidence_head
    confidence_head_with_markov""",
    none=True,
)

RULES |= {
    "k": several(whole(4, 0, MOST_DRAFTED), 4, none=True, alone=True, objects=True),
    "temperature": number(0.7, **TEMPERATURE),
    "temperatures": SEVERAL_TEMPERATURES,
    "top_k": whole(50, 0),
    "top_p": number(0.9, above=0, high=1),
    "min_p": number(0.05, low=0, high=1),
    "record": whole(5, 0, MOST_DRAFTED),
    "engine": word("reference", "vllm"),
    "rule": word("standard", "greedy", "strict", "block", "traversal", "typical", "fly", objects=True),
    "kv_cache": word("dynamic", "static", "graphs"),
    "attn_implementation": word(*ATTENTION, none=True),
    "load": word("requests", "guidellm"),
    "method": word(*METHODS, none=True),
    "context": whole(128, 1, MOST_TOKENS),
    "repeats": whole(15, 1, 10**6),
    "rounds": whole(40, 1, 10**6),
    "draws": whole(1000, 1, 10**7),
    "budget": number(2.5e11, above=0),
    "streams": whole(1, 1, 65536, none=True),
    "rate": number(1.0, above=0, none=True),
    "max_requests": whole(100, 1, none=True),
    "max_seconds": number(60, above=0, none=True),
    "prompt_tokens": whole(256, 1, MOST_TOKENS),
    "conversations": whole(50_000, 1, none=True),
    "tokens_each": whole(1000, 1, MOST_TOKENS),
    "devices": whole(8, 1, 10**6),
    "memory": number(80, above=0, none=True),
    "disk": number(2000, above=0, none=True),
    "tflops": number(989, above=0, none=True),
    "mfu": number(0.3, above=0, high=1, none=True),
    "bandwidth": number(3.0, above=0, none=True),
}
ARGUMENTS = several(text("--max-num-seqs=8"), "--max-num-seqs=8", none=True)
IN = {
    "convert.source": path("downloads/eagle"),
    "train.algorithm": OptionRule("word", FIRST_CHOICE, words=algorithms, none=True),
    "vocab.draft_vocab_size": whole(32000, 1),
    "regenerate.concurrency": whole(16, 1, 65536),
    **dict.fromkeys(("regenerate.engine", "features.engine"), word("local", "ray")),
    "check.engine": word("vllm", "llama.cpp"),
    "features.concurrency": whole(8, 1, 65536),
    "evaluate.server": text("http://127.0.0.1:8000", none=True, test=address_problem),
    **dict.fromkeys(("evaluate.dtype", "serve.dtype"), word(*SERVED)),
    **dict.fromkeys(("evaluate.extra", "serve.extra"), ARGUMENTS),
    "serve.k": whole(4, 0, MOST_DRAFTED, none=True),
    "evaluate.temperature": SEVERAL_TEMPERATURES,
    "evaluate.drafter": path("output/drafter", none=True, objects=True),
    "evaluate.method": word(*METHODS[:-2], none=True),  # the last two draft nothing here
    **dict.fromkeys(("demo.k", "real.k"), whole(4, 1, MOST_DRAFTED)),
    "doctor.data": path("chats.jsonl", none=True, objects=True),
    "from-gguf.save_dtype": word(*FLOATS[:3]),
    **{
        f"{command}.verifier": path("Qwen/Qwen3-8B", objects=True)
        for command in ("prepare", "features", "convert", "stitch-mtp", "demo")
    },
    **{
        f"{command}.output_dir": path("output/run", test=recorded_problem)
        for command in ("prepare", "features", "train", "calibrate", "convert", "export", "demo", "real", "from-gguf")
    },
    "experiment.file": path("experiment.yaml"),
    "experiment.seeds": whole(3, 1, 1000),
    "experiment.k": whole(4, 1, MOST_DRAFTED),
    "experiment.draft_lengths": several(whole(4, 1, MOST_DRAFTED), "2 4"),
    "experiment.n_prompts": whole(24, 1),
    "experiment.workers": whole(2, 1, 1024),
    "experiment.max_new_tokens": whole(160, 1, MOST_TOKENS),
    "experiment.features": path("output/features"),
    "experiment.heldout": path("output/prepared"),
    **{f"experiment.{name}": mapping({"max_steps": 100}) for name in ("settings", "grid", "common")},
}


def rule_of(name: str, where: str = "") -> OptionRule | None:  # None: there is none
    "The rule of an option."
    return IN.get(f"{where}.{name}") or RULES.get(name)


def check_options(values: Mapping, where: str = "") -> None:
    """Refuse what makes no sense of any options of a command. Errors: ValueError: the option, its value and what to
    write."""
    for name, value in values.items():
        rule = rule_of(name, where)
        if rule and (wrong := rule.problem(value)):
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            if rule.alone and isinstance(value, (list, tuple)) and len(value) == 1:
                plain = value[0]
            raise ValueError(f"{name}={shown(plain)}: {wrong}")
    _check_together(values)
    if where not in ("", "vocab"):  # which writes beside what it reads
        _check_output(values)
    _check_command(values, where)
