"""On-policy training data: the verifier answers the questions of a corpus in this process.
Generation is batched, with per-answer seeds; runs can be resumed."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import get_max_memory
from tqdm.auto import tqdm

from ..core.options import check_options
from ..data.chat_encoding import check_ids
from ..data.chat_template import ControlTokens, reads_parts_alone
from ..data.messages import BadRow, reason_of
from ..data.prepare import BATCH
from ..data.sources import conversation_count
from ..jobs.ranks import shard
from ..verifier.cache import ColumnLayer, recurrent_kinds
from ..verifier.identity import fingerprint
from ..verifier.row_limits import RowLimits
from ..verifier.tapped_model import Verifier, computing
from .answer_parser import AnswerParser, UnreadableAnswer
from .journal import Journal, Report, still_to_do
from .replay import check_sampling

# Each answer has its own stream of uniform numbers, seeded by conversation and turn, and a token is read off the
# distribution function at that number: an answer does not change when the batch around it does, and a run that was
# interrupted writes what it would have written. (`generate` of transformers draws all rows from one generator.) No
# prompt is padded: keys and values are put into columns such that all texts end together, and a row that has finished
# is replaced at once; where all have one length no mask is passed. For a recurrent state prompts are padded on the
# left.


def pick(
    logits: torch.Tensor,  # [B, V]
    u: torch.Tensor,  # [B] uniform in [0, 1)
    temperature,  # [B] or one number; 0: the most probable token
    top_p: Any = 1.0,  # [B] or one number: the most probable tokens that reach it are kept
) -> torch.Tensor:  # [B] token ids
    "Inverse transform sampling: the first token at which the distribution function exceeds u."
    greedy = logits.argmax(-1)
    t, top_p = (
        torch.as_tensor(x, dtype=torch.float32, device=logits.device).expand(len(logits)) for x in (temperature, top_p)
    )
    if not t.any():
        return greedy
    p = (logits.float() / t.masked_fill(t == 0, 1)[:, None]).softmax(-1)
    if (top_p < 1).any():
        falling, order = p.sort(-1, descending=True)
        beyond = falling.cumsum(-1) - falling >= top_p[:, None]
        p = p.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0)
    cdf = p.cumsum(-1)
    drawn = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return torch.where(t == 0, greedy, drawn)


READ_TOKENS = 1024  # of prompts in one forward pass, so that the first answers begin soon


@dataclass(eq=False)
class AnswerRequest:
    "A prompt and the answer to it, while it is being generated."

    prompt: list[int]  # token ids, generation prompt included
    temperature: float = 0.0  # 0: greedy
    seed: int = 0  # of the sampling
    top_p: float = 1.0
    about: Any = None  # whatever the caller wants to know of it
    tokens: list[int] = field(default_factory=list)  # of the answer, so far
    uniform: list[float] = field(default_factory=list)  # a number in [0, 1) for each token

    @property
    def text(self) -> list[int]:
        "Prompt, and answer so far."
        return [*self.prompt, *self.tokens]

    def draw(self, most: int):
        "Draw the numbers by which the tokens are picked: they depend on nothing but the seed."
        if self.temperature > 0:
            generator = torch.Generator().manual_seed(self.seed)
            self.uniform = torch.rand(most, generator=generator).tolist()


class AnswerBatch:
    "Requests that are answered together, and the KV cache of their texts."

    def __init__(self, verifier: Verifier):
        self.verifier = verifier
        self.cache: Any = None  # DynamicCache of the rows
        self.requests: list[AnswerRequest | None] = []  # of each row; None: it has finished
        self.lengths: list[int] = []  # tokens of each row in the cache
        self.width = 0  # columns of the cache
        self.joins = not recurrent_kinds(verifier.config)  # whether rows can be replaced

    @property
    def running(self) -> list[int]:
        "Rows that are being answered."
        return [row for row, request in enumerate(self.requests) if request]

    def add(self, new: list[AnswerRequest]) -> Iterator[list[AnswerRequest]]:
        """Read texts into rows that have finished, and into new ones; beside a recurrent state none is running. Gives
        requests when these have their next token."""
        todo = sorted(new, key=lambda request: -len(request.text))
        if not self.running:
            self.cache = None
        while todo:
            longest = len(todo[0].text)
            alike = [request for request in todo if len(request.text) == longest]
            group = alike[: max(1, READ_TOKENS // longest)] if self.joins else todo
            todo = todo[len(group) :]
            lengths = [len(request.text) for request in group]
            ids = [[0] * (longest - len(r.text)) + r.text for r in group]
            logits, read = self._read(ids, lengths, longest)
            self._place(group, lengths, read, len(group) + len(todo))
            self._pick(group, logits)
            yield group

    def _place(self, group, lengths, read, needed):
        "Give requests rows; where new ones are made, as many as are needed soon."
        if self.cache is None:
            self.cache, self.width = read, max(lengths)
            self.requests, self.lengths = list(group), lengths
            if self.joins:
                read.layers = [ColumnLayer(layer) for layer in read.layers]
            return
        free = [row for row, request in enumerate(self.requests) if request is None]
        if len(free) < len(group):
            rows, missing = list(range(len(self.requests))), needed - len(free)
            free += range(len(rows), len(rows) + missing)
            self._take(rows, missing)
        for row, request, length in zip(free, group, lengths):
            self.requests[row], self.lengths[row] = request, length
        for layer, its in zip(self.cache.layers, read.layers):
            layer.put(free[: len(group)], its)

    def _take(self, rows, new=0):
        "Keep these rows, and make new ones."
        index = torch.tensor(rows + rows[:1] * new, device=self.verifier.device)
        self.cache.reorder_cache(index)
        self.requests = [self.requests[row] for row in rows] + [None] * new
        self.lengths = [self.lengths[row] for row in rows] + [0] * new

    def step(self) -> list[AnswerRequest]:  # those that are running
        "Append a token to each answer."
        rows = self.running
        if len(rows) <= 0.75 * len(self.requests):
            self._take(rows)
            rows = self.running
        longest = max(self.lengths[row] for row in rows)
        if self.joins:
            self.width = longest
            for layer in self.cache.layers:
                layer.show(longest)
        # a row that has finished attends to anything, so that it needs no mask
        lengths = [n if r else longest for r, n in zip(self.requests, self.lengths)]
        self.lengths, self.width = [n + 1 for n in lengths], self.width + 1
        ids = [[request.tokens[-1] if request else 0] for request in self.requests]
        logits, _ = self._read(ids, self.lengths, self.width, self.cache)
        running: Any = [self.requests[row] for row in rows]
        self._pick(running, logits if len(rows) == len(ids) else logits[rows])
        return running

    def _read(self, ids, lengths, width, cache=None):
        "Logits [B, V] after the last column, and the cache; each row fills its last columns."
        mask, device = None, self.verifier.device
        if min(lengths) < width:
            starts = width - torch.tensor(lengths)
            mask = (torch.arange(width) >= starts[:, None]).long().to(device)
        out: Any = self.verifier(torch.tensor(ids, device=device), mask, cache, want_logits=1)
        return out.logits[:, -1], out.past_key_values

    def _pick(self, requests, logits):
        "Append a token to the answer of each."
        numbers = [(r.uniform[len(r.tokens)] if r.uniform else 0.0, r.temperature, r.top_p) for r in requests]
        u, temperature, top_p = torch.tensor(numbers, device=logits.device).unbind(1)
        for request, token in zip(requests, pick(logits, u, temperature, top_p).tolist()):
            request.tokens.append(token)


@torch.no_grad()
def answers(
    verifier: Verifier,  # generates the answers
    take: Callable[[], AnswerRequest | None],  # the next request; None: there is none at present
    max_new_tokens: int,  # an answer that reaches it is cut
    eos_ids: Iterable[int],  # ids that end an answer; the one that did is part of it
    batch_size: int = 96,  # answers generated together
    progress: Callable[[int], Any] | None = None,  # gets numbers of new tokens
) -> Iterator[AnswerRequest]:  # each with its tokens, as soon as it is answered
    """Answer requests until there is none. The verifier's context cuts an answer. Texts within and beyond the border of
    a RoPE (longrope, dynamic) are never read together, and one that crosses it is read anew."""
    batch, limits, ends = AnswerBatch(verifier), RowLimits.of(verifier.config), set(eos_ids)
    outside: deque[AnswerRequest] = deque()  # beyond the border, and not in the batch
    beyond = False  # whether the batch is

    def finished(requests):
        if progress:
            progress(len(requests))
        for request in requests:
            n = len(request.tokens)
            length = len(request.prompt) + n
            over = n >= max_new_tokens or limits.exceeded(length + 1) or request.tokens[-1] in ends
            if over or not verifier.until_border(length - 1):
                batch.requests[batch.requests.index(request)] = None
                if over:
                    yield request
                else:
                    outside.append(request)

    def next_one():
        if beyond:
            return outside.popleft() if outside else None
        while len(outside) < batch_size and (request := take()):
            if len(request.text) <= verifier.border:
                return request
            outside.append(request)
        return None

    def prompts():
        free = batch_size - len(batch.running)
        new = list(islice(iter(next_one, None), free if batch.joins or not batch.running else 0))
        for request in new:
            request.draw(max_new_tokens)
        return new

    while True:
        while new := prompts():
            for group in batch.add(new):
                yield from finished(group)
        if batch.running:
            yield from finished(batch.step())
        elif beyond or outside:
            beyond = not beyond
        else:
            return


def answer(
    verifier: Verifier,  # generates the answers
    prompts: list[list[int]],  # token ids, generation prompt included
    max_new_tokens: int,  # an answer that reaches it is cut
    eos_ids: Iterable[int],  # ids that end an answer; the one that did is part of it
    temperature: float = 0.0,  # 0: greedy
    seeds: Sequence[int] | None = None,  # seed of each answer; needed above temperature 0
    top_p: float = 1.0,  # the most probable tokens that reach it are kept
    progress: Callable[[int], Any] | None = None,  # gets numbers of new tokens
) -> list[list[int]]:  # the answers' token ids
    "Answers to all of some prompts, generated together."
    assert seeds is not None or not temperature, "above temperature 0 each answer has a seed"
    seeds = seeds or [0] * len(prompts)
    requests = [AnswerRequest(p, temperature, s, top_p) for p, s in zip(prompts, seeds)]
    take = partial(next, iter(requests), None)
    for _ in answers(verifier, take, max_new_tokens, eos_ids, len(prompts), progress):
        pass
    return [request.tokens for request in requests]


IN_PROCESS = ("temperature", "top_p", "reasoning_effort", "chat_template_kwargs")


@dataclass
class _Answering:
    "What makes and reads the answers."

    verifier: Verifier
    tokenizer: Any
    eos_ids: set[int]
    max_new_tokens: int
    max_length: int

    def is_due(self, replay, journal):
        "Whether a question is to be answered; its tokens are then in `replay.prompt`."
        try:
            history = replay.pending()
            _check_supported(replay, history)
            if not history:
                return False
            replay.prompt = replay.render(history, self.tokenizer, limit=self.max_length)
            embedding = self.verifier.model.get_input_embeddings()
            vocab_size = embedding.get_parameter("weight").shape[0]
            check_ids(np.asarray(replay.prompt), vocab_size)
            if not replay.prompt:
                raise BadRow("the chat template makes nothing of it")
            if len(replay.prompt) >= self.max_length:
                raise BadRow(f"prompt of {self.max_length} tokens or more")
            return True
        except Exception as e:  # a template may raise anything
            if replay.rows:  # what is answered is kept
                replay.end(reason_of(e))
            else:
                journal.fail(replay.key, e, replay.where)
        return False

    def request(self, replay):
        "What asks for its next answer."
        return AnswerRequest(
            replay.prompt,
            replay.sampling.get("temperature", 0.0),
            replay.next_seed(),
            replay.sampling.get("top_p", 1.0),
            replay,
        )

    def take(self, replay, ids):
        "Take an answer into its conversation, which ends there if it cannot be read."
        finish, unread = "stop", None
        try:
            kwargs = json.dumps(replay.template_kwargs, sort_keys=True)
            template = str(self.tokenizer.chat_template)
            parser = _parser(self.tokenizer, template, kwargs, frozenset(self.eos_ids))
            message = parser(ids, replay.prompt, replay.tools)
            for call in message.get("tool_calls", ()):
                call.setdefault("id", f"call{len(replay.finish):05}")  # nine letters, as Mistral's
                finish = "tool_calls"
        except UnreadableAnswer as e:
            message, unread = {"role": "assistant", "content": self.tokenizer.decode(ids)}, e
        if ids[-1] not in self.eos_ids:
            finish = "length"
        replay.add_answer(replay.prompt, ids, message, finish)
        if unread and finish != "length":
            replay.end(f"an answer that cannot be read: {unread}")


def _check_supported(replay, history):
    "ValueError, BadRow: what only a server can answer."
    if unknown := sorted(set(replay.sampling) - set(IN_PROCESS)):
        raise ValueError(
            f"{', '.join(unknown)}: only a server knows these sampling parameters; see regenerate_from_server"
        )
    for i, message in enumerate(history or ()):
        if isinstance(message["content"], list):
            raise BadRow("holds more than text: ask a server for its answer", f"message {i}")


@lru_cache(maxsize=64)
def _parser(tokenizer, template, kwargs, eos_ids):
    "A parser for a template and its arguments; conversations may differ in them."
    return AnswerParser(tokenizer, eos_ids, **json.loads(kwargs))


def _windows(todo, most):
    "Conversations in lists of `most`, or of as many as have `BATCH` characters for each 64 of these; at least one."
    window, size = [], 0
    for replay in todo:
        window.append(replay)
        size += sum(len(str(m["content"])) for m in replay.original)
        if len(window) >= most or size > BATCH * max(1, most // 64):
            yield window
            window, size = [], 0
    if window:
        yield window


def _replayed(windows, answering, journal, batch_size, progress):
    "The conversations of all windows, each when it is over."
    waiting = deque()

    def take():
        while not waiting:
            window = next(windows, None)
            if window is None:
                return None
            due = [replay for replay in window if answering.is_due(replay, journal)]
            waiting.extend(sorted(due, key=lambda replay: len(replay.prompt)))
        return answering.request(waiting.popleft())

    model, most, ends = answering.verifier, answering.max_new_tokens, answering.eos_ids
    for request in answers(model, take, most, ends, batch_size, progress):
        replay = request.about
        answering.take(replay, request.tokens)
        if answering.is_due(replay, journal):
            waiting.appendleft(replay)  # so that a conversation is soon over, and kept
        elif replay.rows:
            yield replay


def eos_ids_of(verifier: Verifier, tokenizer) -> set[int]:
    """Every id that ends an answer: the tokenizer names one, the verifier's generation config none, one or several.
    ValueError: none is known."""
    ids = verifier.model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None, -1}  # as configs write none
    if not ids:
        raise ValueError(
            "neither the tokenizer nor the verifier's generation_config has an eos_token_id: answers would never end"
        )
    return ids


MOST_ROWS = 96  # answers that are generated together by default


@torch.no_grad()
def rows_in_memory(verifier: Verifier, tokens: int) -> int:
    """How many texts of so many tokens half of the free memory can cache, 1 to `MOST_ROWS`; one short text is read to
    see its size."""
    ids = torch.zeros(1, 8, dtype=torch.long, device=verifier.device)
    read: Any = verifier(ids, want_logits=False).past_key_values
    states = [getattr(layer, name, None) for layer in read.layers for name in ("keys", "values")]
    each = sum(x.nbytes for x in states if x is not None) / 8 * tokens
    on_cuda = verifier.device.type == "cuda"
    free = torch.cuda.mem_get_info(verifier.device)[0] if on_cuda else list(get_max_memory().values())[-1]
    return max(1, min(MOST_ROWS, int(free / 2 / max(each, 1))))


class AnswersBar(tqdm):
    "A progress bar of conversations and answered tokens, shown from the start, and at most once a second."

    tokens = 0

    def __init__(self, **options: Any):
        super().__init__(unit="conversation", mininterval=1, miniters=0, **options)

    def answered(self, tokens: int):
        "Count tokens, with their speed."
        self.tokens += tokens
        speed = self.tokens / max(self.format_dict["elapsed"], 1e-3)
        self.set_postfix_str(f"{self.tokens:,} tokens, {speed:,.0f} tokens/s", refresh=False)
        self.update(0)

    def settled(self, conversations: int):
        "So many are settled in all."
        self.update(conversations - self.n)


def regenerate(
    verifier: Verifier,  # generates the answers
    tokenizer,  # with a chat template
    conversations: str | Path | Iterable,  # as `sources.read_conversations` takes them
    out_path,  # JSONL; continued if it exists
    max_new_tokens: int = 256,  # per answer
    temperature: float = 0.0,  # 0: greedy
    seed: int = 0,  # of the sampling
    batch_size: int | None = None,  # answers generated together; None: as memory has place
    compute_dtype: torch.dtype | None = None,  # of products; None: the verifier's
    max_length: int = 2048,  # a prompt of this length, or of the context's, ends it
    sampling: dict | None = None,  # more parameters or distributions (`replay.check_sampling`)
    languages=None,  # only conversations in these, as in `language.wanted_languages`
    limit: int | None = None,  # stop after so many conversations of the input
    rank: int = 0,  # of this process, which answers every `world_size`-th conversation
    world_size: int = 1,  # processes that share the conversations
) -> Report:  # counts of this share; also what failed and why
    """Let the verifier answer every question. What cannot be read or answered is counted in the
    report and named in `NAME.errors.jsonl`. ValueError: an option, or `out_path` was made by
    another verifier or with other settings; BlockingIOError: another process makes this share."""
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "batch_size": batch_size,
        "max_length": max_length,
        "languages": languages,
        "max_samples": limit,
        "rank": rank,
        "world_size": world_size,
    }
    check_options(options, "regenerate")
    if reads_parts_alone(tokenizer):
        raise ValueError(
            f"verifier {tokenizer.name_or_path!r}: its chat template reads texts in parts of a list alone, which is "
            "not done here; let a server answer, regenerate_from_server"
        )
    eos_ids = eos_ids_of(verifier, tokenizer)
    longest = min(max_length, RowLimits.of(verifier.config).context or max_length)
    sampling = check_sampling({"temperature": temperature} | (sampling or {}), IN_PROCESS)
    settings = {
        "verifier": fingerprint(verifier.model),
        "sampling": sampling,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
    }
    rows = batch_size or rows_in_memory(verifier, longest + max_new_tokens)
    control = ControlTokens(tokenizer)
    computed = {"compute_dtype": str(compute_dtype)} if compute_dtype else {}
    total = conversation_count(conversations, limit)
    mine = None if total is None else len(shard(total, rank, world_size))
    journal = Journal(out_path, settings, rank, world_size)
    with journal, AnswersBar(total=mine, desc="regenerate") as bar, computing(verifier, compute_dtype):
        answering = _Answering(verifier, tokenizer, eos_ids, max_new_tokens, longest)
        todo = still_to_do(conversations, journal, sampling, seed, languages, limit=limit, control=control)
        for replay in _replayed(_windows(todo, 4 * rows), answering, journal, rows, bar.answered):
            journal.write(replay, **computed)
            bar.settled(journal.report.done)
    return journal.report
