"""Regenerating answers with a served verifier (OpenAI-compatible API, vLLM).
Many conversations at a time, token ids from the server, resumable."""

import json
import re
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tqdm.auto import tqdm

from ..core.concurrency import Breaker, concurrently
from ..core.http_client import Endpoint, EndpointError
from ..core.options import check_options
from ..data.chat_encoding import ready_row
from ..data.chat_template import ControlTokens, check_calls, open_tokenizer
from ..data.messages import Misread, as_served, in_a_spelling, normalize, reason_of
from ..data.sources import conversation_count
from ..jobs.ranks import shard
from ..jobs.servers import EndpointPool, NoServerLeft, addresses_of
from .journal import Journal, Report, still_to_do
from .replay import Replay, check_sampling


def retokenise(
    replay: Replay, history: list[dict], message: dict, finish: str, tokenizer
) -> tuple[list[int], list[int]]:
    """The tokens that prompt and answer would have, by the messages of the request, the answer, and why it ended.
    ValueError: the template does not let an answer continue its prompt."""

    def text_of(messages):
        how = replay.template_kwargs
        try:
            return str(tokenizer.apply_chat_template(messages, tools=replay.tools, tokenize=False, **how))
        except Exception as e:  # a template may raise anything
            raise Misread(f"the chat template fails: {type(e).__name__}: {e}") from e

    def rendered(messages):
        text = text_of(messages)
        check_calls(text_of, messages, text, [(0, len(text))])
        full = replay.render(messages, tokenizer, prompt=False)
        return replay.render(messages[:-1], tokenizer), full

    prompt, full = in_a_spelling(as_served(normalize([*history, message])), rendered)
    if full[: len(prompt)] != prompt:
        raise ValueError(
            "the server gives no token ids, and the chat template renders an answered question otherwise than an open "
            "one, so they cannot be made from the text; use a server that knows return_token_ids (vLLM)"
        )
    answer = full[len(prompt) :]
    special = set(tokenizer.all_special_ids)
    end = next((i for i in reversed(range(len(answer))) if answer[i] in special), None)
    return prompt, answer if end is None else answer[: end + (finish != "length")]


def _token_ids(ids):
    "Token ids of a server, checked."
    mask = [0] * len(ids) if isinstance(ids, list) else []
    checked, _ = ready_row({"input_ids": ids, "loss_mask": mask})
    return checked.tolist()


_TOO_LONG = re.compile("context length|max_model_len|maximum.{0,20}length|too long", re.I)


class _Answer(NamedTuple):
    "An answer of a server; the arguments of `Replay.add_answer`."

    prompt: list[int]
    ids: list[int]
    message: dict
    finish: str


def _choice_of(reply):
    "The choice of a reply, which has a message. ValueError: there is none."
    try:
        choice = reply["choices"][0]
        if isinstance(choice["message"], dict):
            return choice
    except (KeyError, IndexError, TypeError):
        pass
    raise ValueError(f"the server's answer has no choices[0].message: {json.dumps(reply)[:200]}") from None


# finish reasons of an answer that the server broke off: vLLM and SGLang, while they are paused, fail or shut down
BROKEN_OFF = (None, "abort", "error")


def _message_of(reply):
    """The choice of a reply, its message, and its finish reason. EndpointError: the server gave no answer, or broke it
    off; ValueError: the answer cannot be used."""
    try:
        choice = _choice_of(reply)
    except ValueError as e:
        raise EndpointError(str(e)) from None
    raw, finish = choice["message"], choice.get("finish_reason")
    if finish in BROKEN_OFF:
        raise EndpointError(f"the server broke off: the answer ended for the reason {finish!r}")
    if finish not in ("stop", "length", "tool_calls"):
        raise ValueError(f"the answer ended for the reason {finish!r}")
    message = {"role": "assistant", "content": raw.get("content")}
    if raw.get("tool_calls"):
        message["tool_calls"] = raw["tool_calls"]
    elif message["content"] is None:
        message["content"] = ""
    if reasoning := raw.get("reasoning") or raw.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    return choice, message, finish


class ServerReplay:
    "Replays conversations with a server; called with a `Replay`. Shared by threads."

    def __init__(
        self, endpoint: Endpoint | EndpointPool, model: str, tokenizer, max_new_tokens: int, max_length: int | None
    ):
        self.endpoint = endpoint
        self.model = model
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.max_length = max_length
        self._wants_ids = True
        self._lock = threading.Lock()

    def _request(self, replay, history):
        "The server's reply to a history."
        body = {
            "model": self.model,
            "messages": history,
            "max_tokens": self.max_new_tokens,
            "seed": replay.next_seed() % 2**31,
            **replay.sampling,
        }
        if replay.tools:
            body["tools"] = replay.tools
        if self._wants_ids:
            try:
                with_ids = body | {"return_token_ids": True}
                return self.endpoint.post("/v1/chat/completions", with_ids)
            except EndpointError as e:
                if e.status not in (400, 422) or "return_token_ids" not in str(e):
                    raise
                self._wants_ids = False  # a strict server refuses what it does not know
        return self.endpoint.post("/v1/chat/completions", body)

    def __call__(self, replay: Replay) -> Replay:
        "Replay a conversation, which is returned. EndpointError or ValueError: it cannot be answered."
        while history := replay.pending():
            try:
                reply = self._request(replay, history)
                answer = self._read(reply, replay, history)
            except EndpointError as e:
                if e.status not in (400, 413, 422) or not replay.rows:  # what is answered is kept
                    raise
                too_long = _TOO_LONG.search(str(e))
                replay.end("a prompt beyond the server's limit" if too_long else f"a refused prompt, status {e.status}")
                break
            except ValueError as e:  # asked again, it would be answered so again
                if not replay.rows:
                    raise
                replay.end(reason_of(e))
                break
            if self.max_length and len(answer.prompt) >= self.max_length:
                replay.end(f"a prompt beyond {self.max_length} tokens")
                if not replay.rows:
                    raise ValueError(replay.about["truncated"])
                break
            replay.add_answer(*answer)
            usage = reply.get("usage") or {}
            replay.usage.update({k: v for k, v in usage.items() if isinstance(v, int)})
        return replay

    def _read(self, reply, replay, history):
        "The answer with its tokens, by the server or, where it gives none, from the text."
        choice, message, finish = _message_of(reply)
        prompt = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
        ids = choice.get("token_ids")
        if prompt and ids is not None:
            return _Answer(_token_ids(prompt), _token_ids(ids), message, finish)
        with self._lock:  # a fast tokenizer is not made for threads
            if self.tokenizer is None:
                raise ValueError(
                    "the server gives no token ids (vLLM does, with return_token_ids), and without the verifier's "
                    "tokenizer they cannot be made from the text; name it: tokenizer=<folder or hub id>"
                )
            prompt, ids = retokenise(replay, history, message, finish, self.tokenizer)
        counted = (reply.get("usage") or {}).get("completion_tokens", len(ids))
        replay.about["token_ids"] = "from text"
        replay.usage["retokenised"] += 1
        replay.usage["other_tokens"] += counted != len(ids)
        return _Answer(prompt, ids, message, finish)


def regenerate_from_server(
    url: str | Endpoint | Iterable[str],  # server(s); a key, if any, is in OPENAI_API_KEY
    conversations: str | Path | Iterable,  # as `sources.read_conversations` takes them
    out_path,  # JSONL; continued if it exists
    model: str | None = None,  # served name; None: the only one
    tokenizer=None,  # the verifier's, or its path or hub id: for servers that give no token ids
    max_new_tokens: int = 2048,  # per answer
    temperature: float | None = None,  # 0: greedy; None: the server's
    seed: int = 0,  # of the sampling
    max_length: int | None = None,  # prompt length ending a conversation; None: server's limit
    sampling: dict | None = None,  # more parameters or distributions (`replay.check_sampling`)
    languages=None,  # only conversations in these, as in `language.wanted_languages`
    limit: int | None = None,  # stop after so many conversations of the input
    concurrency: int = 16,  # conversations in work at once
    max_failures: int = 50,  # in a row; the job stops there
    timeout: float = 600.0,  # seconds that an answer may take
    patience: float = 120.0,  # of several servers: seconds to wait while none answers
    rank: int = 0,  # of this process, which answers every `world_size`-th conversation
    world_size: int = 1,  # processes that share the conversations
) -> Report:  # counts of this share; also what failed and why
    """Let a served verifier answer every question. A conversation is written once it is whole: one
    whose server fails on the way is asked again, from its first question, by the next run.
    ValueError: `out_path` was made with other settings; TooManyFailures, NoServerLeft: the job was
    stopped; BlockingIOError: another process makes this share."""
    options = {
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "languages": languages,
        "max_samples": limit,
        "concurrency": concurrency,
        "max_failures": max_failures,
        "timeout": timeout,
        "patience": patience,
        "rank": rank,
        "world_size": world_size,
    }
    check_options(options)
    endpoint = _endpoint_of(url, model, timeout, patience)
    model = model or _only_model(endpoint)
    sampling = check_sampling(({} if temperature is None else {"temperature": temperature}) | (sampling or {}))
    settings = dict(model=model, sampling=sampling, seed=seed, max_new_tokens=max_new_tokens)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = open_tokenizer(tokenizer)
    server_replay = ServerReplay(endpoint, model, tokenizer, max_new_tokens, max_length)
    breaker = Breaker(max_failures)
    total = conversation_count(conversations, limit)
    control = tokenizer and ControlTokens(tokenizer)  # without it, nobody here knows them
    mine = None if total is None else len(shard(total, rank, world_size))
    with (
        Journal(out_path, settings, rank, world_size) as journal,
        tqdm(total=mine, desc="regenerate", unit="conversation", delay=1) as bar,
    ):
        journal.report |= {"retokenised": 0, "other_tokens": 0}
        todo = still_to_do(conversations, journal, sampling, seed, languages, limit=limit, control=control)
        with closing(concurrently(server_replay, todo, concurrency)) as results:
            for replay, result in results:
                if isinstance(result, NoServerLeft):  # no conversation's fault
                    raise result
                if isinstance(result, Exception):
                    journal.fail(replay.key, result, replay.where)
                else:
                    journal.write(replay, endpoint=endpoint.url)
                bar.update(journal.report.done - bar.n)
                breaker.see(result)
    return journal.report


def _endpoint_of(url, model, timeout, patience) -> Endpoint | EndpointPool:
    "The client of one server, or of several. An answer that cannot be read speaks against one."
    if isinstance(url, Endpoint):
        return url
    urls = addresses_of(url)
    if len(urls) == 1:
        return Endpoint(urls[0], timeout=timeout)
    return EndpointPool(urls, model, timeout, patience, check=_choice_of)


def _only_model(endpoint):
    "The served model. ValueError: there are several, or none."
    served = endpoint.models()
    if len(served) != 1:
        raise ValueError(f"model: {endpoint.url} serves {', '.join(served) or 'nothing'}; name one of them")
    return served[0]
