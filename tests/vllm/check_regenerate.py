#!/usr/bin/env python
"""Answers from the real vLLM, on a CPU, against answers of the same verifier in this process.

    .venv/bin/python tests/vllm/check_regenerate.py        two to four minutes; the first call also makes .venv-vllm (4
    minutes, 3.4 GB)

`vllm serve` starts on the shipped verifier, in float32, and the script asks that

- greedy rows of `regenerate_from_server` (token ids from vLLM, many conversations at once) are those of `regenerate`,
  token for token, mask and text
  included: on a CPU both compute the same numbers up to rounding;
- rows made from the text alone, as for a server without `return_token_ids`, are the same rows, wherever vLLM counts the
  tokens that the tokenizer makes;
- a client that is killed (SIGKILL) in the middle leaves a file that the next one completes: every conversation once,
  the same rows;
- sampled answers (temperatures drawn per conversation) come again with the same seed, and temperature 0 among them is
  the greedy answer;
- what vLLM refuses because it is too long ends its conversation, and what was said before stays.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from check_vllm import VENV, VERIFIER, install

CORPUS, N, LIMIT = VERIFIER.parent / "corpus/train.jsonl", 80, 96


def main():
    from transformers import AutoTokenizer

    from speculators_nb.regenerate import from_server as module
    from speculators_nb.regenerate.in_process import regenerate
    from speculators_nb.regenerate.journal import read_regenerated
    from speculators_nb.serve.serve_command import serve_command
    from speculators_nb.serve.server import Server
    from speculators_nb.verifier.tapped_model import Verifier

    ask, problems, start = module.regenerate_from_server, [], time.time()

    def check(what, good):
        print(f"{'ok    ' if good else 'WRONG '} {what}", flush=True)
        problems.extend([] if good else [what])

    def rows(path):
        return {line["id"]: (line["input_ids"], line["loss_mask"], line["messages"]) for line in read_regenerated(path)}

    def words(path):
        return {
            line["id"]: (line["metadata"]["sampling_params"]["temperature"], line["input_ids"])
            for line in read_regenerated(path)
        }

    install()
    command = serve_command(
        VERIFIER, dtype="float32", max_model_len=512, enforce_eager=True, extra=["--max-num-seqs", "16"]
    )
    with tempfile.TemporaryDirectory() as tmp, Server(command, vllm=VENV / "bin/vllm") as server:
        tmp, tokenizer = Path(tmp), AutoTokenizer.from_pretrained(VERIFIER)
        print(f"vllm serve answers after {time.time() - start:.0f} s", flush=True)
        begin = time.time()
        report = ask(server.url, CORPUS, tmp / "there.jsonl", max_new_tokens=LIMIT, temperature=0, limit=N)
        print(f"{report}\n{report['tokens'] / (time.time() - begin):.0f} tokens/s", flush=True)
        here = regenerate(
            Verifier.from_pretrained(str(VERIFIER)),
            tokenizer,
            CORPUS,
            tmp / "here.jsonl",
            max_new_tokens=LIMIT,
            limit=N,
        )
        a, b = rows(tmp / "there.jsonl"), rows(tmp / "here.jsonl")
        check(
            (
                f"{sum(a.get(k) == v for k, v in b.items())} of {len(b)} greedy rows are equal: token ids, mask and "
                "messages"
            ),
            a == b,
        )
        check(
            f"reports agree: {here['answers']} answers, {here['tokens']} tokens, {dict(here['finish_reasons'])}",
            all(report[k] == here[k] for k in ("written", "answers", "tokens", "cut", "finish_reasons")),
        )

        class Mute(module.ServerReplay):
            "As if the server knew nothing of token ids."

            def __init__(self, *args):
                super().__init__(*args)
                self._wants_ids = False

        whole, module.ServerReplay = module.ServerReplay, Mute
        report = ask(
            server.url, CORPUS, tmp / "text.jsonl", max_new_tokens=LIMIT, temperature=0, limit=N, tokenizer=tokenizer
        )
        module.ServerReplay = whole
        c, other = rows(tmp / "text.jsonl"), report["other_tokens"]
        equal = sum(c.get(k) == v for k, v in a.items())
        check(
            (
                f"from text alone, {equal} of {len(a)} rows are equal; {other} of {report['answers']} answers have "
                "another number of tokens than vLLM counted"
            ),
            report["retokenised"] == report["answers"] and equal >= len(a) - other and len(a) > other,
        )

        path, options = tmp / "killed.jsonl", dict(max_new_tokens=LIMIT, temperature=0, limit=N, concurrency=4)
        client = multiprocessing.get_context("fork").Process(
            target=ask, args=(server.url, CORPUS, path), kwargs=options
        )
        client.start()
        while not path.exists() or path.read_bytes().count(b"\n") < N // 4:
            time.sleep(0.02)
        client.kill()
        client.join()
        report = ask(server.url, CORPUS, path, **options)
        once = Counter(line["primary_id"] for line in read_regenerated(path) if line["part"][0] == 0)
        check(
            (
                f"client killed: {report['kept']} conversations kept, {report['written']} answered by the next, each "
                "once, the same rows"
            ),
            report["kept"] + report["written"] == N == len(once) == once.total()
            and client.exitcode == -9
            and rows(path) == a,
        )

        mix = dict(max_new_tokens=LIMIT, limit=40, sampling={"temperature": [[0, 1], [0.8, 1]], "top_p": 0.95}, seed=3)
        for name in ("one", "two"):
            ask(server.url, CORPUS, tmp / f"{name}.jsonl", **mix)
        one, two = words(tmp / "one.jsonl"), words(tmp / "two.jsonl")
        greedy = {k: ids for k, (t, ids) in one.items() if t == 0}
        check(
            (
                f"{sum(two.get(k) == v for k, v in one.items())} of {len(one)} rows come again with the seed; "
                f"{len(greedy)} drawn at temperature 0 are greedy"
            ),
            one == two
            and 0 < len(greedy) < len(one)
            and all(ids == a[k][0] for k, ids in greedy.items())
            and any(ids != a[k][0] for k, (t, ids) in one.items() if t),
        )

        long = {
            "id": "long",
            "messages": [
                {"role": "user", "content": "Tell me about the garden."},
                {"role": "assistant", "content": "…"},
                {"role": "user", "content": "and " * 600},
            ],
        }
        report = ask(server.url, [long], tmp / "long.jsonl", max_new_tokens=LIMIT, temperature=0)
        check(
            "a second prompt beyond the server's limit ends the conversation",
            report["truncated"] == {"a prompt beyond the server's limit": 1}
            and [len(m) for _, _, m in rows(tmp / "long.jsonl").values()] == [2],
        )
    print(f"{time.time() - start:.0f} s")
    if problems:
        raise SystemExit("\n".join(["", *problems]))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["TQDM_DISABLE"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.exit(main())
