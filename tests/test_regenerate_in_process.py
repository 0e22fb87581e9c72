"""Regenerated answers are those of the verifier, independent of batch and interruption, and counted when they fail."""

import io
import json

import pytest
import torch
from small_verifier import TURNING, read_whole, turning_verifier
from test_chat_encoding import tokenizer as byte_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations import sdpa_attention

from speculators_nb.data.prepare import prepare
from speculators_nb.regenerate import in_process
from speculators_nb.regenerate.in_process import (
    AnswerRequest,
    AnswersBar,
    answer,
    answers,
    eos_ids_of,
    pick,
    regenerate,
    rows_in_memory,
)
from speculators_nb.regenerate.journal import read_regenerated
from speculators_nb.regenerate.replay import Replay
from speculators_nb.verifier.tapped_model import Verifier

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content "
    "}}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)


def tokenizer():
    return byte_tokenizer(TEMPLATE)


def make_verifier(kind="qwen3", eos_bias=2.0):
    "Random weights; the end token is made likely, so that answers end at different lengths."
    torch.manual_seed(1)
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=258, n_embd=32, n_layer=3, n_head=2, n_positions=512, bos_token_id=257, eos_token_id=257
            )
        )
    else:
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=258,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                initializer_range=0.3,
                eos_token_id=257,
            )
        )
    head = model.lm_head
    model.lm_head = torch.nn.Linear(32, 258, bias=True)
    with torch.no_grad():
        model.lm_head.weight.copy_(head.weight)
        model.lm_head.bias.zero_()
        model.lm_head.bias[257] = eos_bias
    return Verifier(model)


def talks(n):
    return [
        {
            "id": i,
            "messages": [
                {"role": r, "content": f"{t} {i}" + "!" * (i % 5)}
                for t in range(1 + i % 3)
                for r in ("user", "assistant")
            ],
        }
        for i in range(n)
    ]


PROMPTS = [[1, 2, 3], [4] * 9, [5, 6], [7] * 20, [8, 9, 10, 11]]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_greedy_answers_are_those_of_generate(kind):
    verifier = make_verifier(kind)
    ours = answer(verifier, PROMPTS, 24, {257})
    for p, a in zip(PROMPTS, ours):
        hf = verifier.model.generate(
            torch.tensor([p]),
            attention_mask=torch.ones(1, len(p)),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=257,
            pad_token_id=257,
        )
        assert a == hf[0, len(p) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_does_not_depend_on_its_batch(temperature):
    verifier = make_verifier(eos_bias=6.0)
    together = answer(verifier, PROMPTS, 40, {257}, temperature, seeds=range(5))
    assert len(set(map(len, together))) > 1 or temperature == 0  # rows really leave at different times
    assert together == [answer(verifier, [p], 40, {257}, temperature, seeds=[s])[0] for s, p in enumerate(PROMPTS)]
    assert answer(verifier, PROMPTS[::-1], 40, {257}, temperature, seeds=range(4, -1, -1)) == together[::-1]


@pytest.mark.parametrize("kind", TURNING)
def test_an_answer_that_outgrows_its_angles_does_not_depend_on_its_batch(kind):
    verifier = turning_verifier(kind)
    prompts = [[5, 9, 2] * 6, [3], [30, 31, 8] * 10, [4] * 24, [7] * 23]
    truth = [read_whole(verifier, prompt, 20) for prompt in prompts]
    assert answer(verifier, prompts, 20, []) == truth
    end = truth[0][11]
    cut = [text[: text.index(end) + 1] if end in text else text for text in truth]
    assert answer(verifier, prompts, 20, {end}) == cut
    requests = iter([AnswerRequest(prompt, about=i) for i, prompt in enumerate(prompts)])
    done = answers(verifier, lambda: next(requests, None), 20, [], batch_size=2)
    assert {request.about: request.tokens for request in done} == dict(enumerate(truth))


def test_finished_rows_cost_nothing():
    verifier, sizes = make_verifier(eos_bias=6.0), []
    handle = verifier.decoder.register_forward_pre_hook(
        lambda m, a, k: sizes.append(k["input_ids"].shape[0]), with_kwargs=True
    )
    answers = answer(verifier, [[i] for i in range(32)], 60, {257}, 1.0, seeds=range(32))
    handle.remove()
    assert sizes[0] == 32 and sizes == sorted(sizes, reverse=True)
    assert len(sizes) == max(map(len, answers))
    for step, size in enumerate(sizes):
        assert sum(len(a) > step for a in answers) > 0.75 * size - 1  # at most a quarter of a batch is idle


def test_a_finished_row_is_replaced_at_once():
    """Nine prompts in three rows: the batch stays full while there are prompts, and each answer is that of its prompt
    alone, whatever was in its row before. Nothing is padded, and no keys are copied for grouped heads."""
    verifier, sizes = make_verifier(eos_bias=6.0), []
    prompts = [[i] * n for i, n in enumerate((3, 30, 5, 80, 2, 9, 41, 4, 120))]
    alone = [answer(verifier, [p], 90, {257}, 1.0, seeds=[s])[0] for s, p in enumerate(prompts)]
    verifier.decoder.register_forward_pre_hook(
        lambda m, a, k: sizes.append(tuple(k["input_ids"].shape)), with_kwargs=True
    )
    todo = iter([AnswerRequest(p, 1.0, s, about=s) for s, p in enumerate(prompts)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_attention, "repeat_kv", lambda *_: pytest.fail("keys are copied"))
        done = {r.about: r.tokens for r in answers(verifier, lambda: next(todo, None), 90, {257}, 3)}
    assert list(done) != sorted(done) and [done[i] for i in range(9)] == alone
    assert sorted(n for rows, n in sizes if n > 1) == sorted(map(len, prompts))  # each read once, without padding
    last = max(i for i, (_, n) in enumerate(sizes) if n > 1)
    assert {rows for rows, n in sizes[3:last] if n == 1} == {3}


def test_what_is_over_is_written_before_others_are(tmp_path):
    path, verifier, kept = tmp_path / "o.jsonl", make_verifier(eos_bias=6.0), []
    verifier.decoder.register_forward_pre_hook(
        lambda *_: kept.append(path.read_text().count("\n") if path.exists() else 0)
    )
    regenerate(verifier, tokenizer(), talks(9), path, max_new_tokens=60, temperature=1.0, batch_size=9)
    assert len(set(kept)) > 4


def test_rows_in_memory(monkeypatch):
    verifier, each = make_verifier(), 3 * 2 * 16 * 4  # layers, keys and values, head_dim, bytes
    monkeypatch.setattr(in_process, "get_max_memory", lambda: {"cpu": 2 * 40 * each * 100})
    assert [rows_in_memory(verifier, n) for n in (1, 100, 400, 10**6)] == [96, 40, 10, 1]


def test_products_in_another_dtype_are_recorded(tmp_path):
    verifier, seen = make_verifier(), set()
    verifier.norm.register_forward_pre_hook(lambda m, args: seen.add(args[0].dtype))
    verifier.layers[0].mlp.gate_proj.register_forward_hook(lambda m, args, out: seen.add(out.dtype))
    regenerate(verifier, tokenizer(), talks(2), tmp_path / "o.jsonl", max_new_tokens=4, compute_dtype=torch.bfloat16)
    assert seen == {torch.float32, torch.bfloat16}  # the residual stream stays
    assert {line["metadata"]["compute_dtype"] for line in read_regenerated(tmp_path / "o.jsonl")} == {"torch.bfloat16"}


def test_pick_draws_from_the_distribution():
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 2
    logits[7] = -torch.inf
    p, n = (logits / 0.7).softmax(-1), 20000
    drawn = pick(logits.expand(n, -1), torch.rand(n, generator=torch.Generator().manual_seed(1)), 0.7).bincount(
        minlength=64
    )
    assert drawn[7] == 0
    chi2 = ((drawn - n * p)[p > 0] ** 2 / (n * p)[p > 0]).sum()
    assert chi2 < 62 + 5 * (2 * 62) ** 0.5  # 62 degrees of freedom, five standard deviations
    for u in (0.0, 1 - 2**-24):
        assert p[pick(logits[None], torch.tensor([u]), 0.7)] > 0


def test_conversations_are_replayed(tmp_path):
    tok, verifier = tokenizer(), make_verifier(eos_bias=6.0)
    report = regenerate(
        verifier, tok, talks(9), tmp_path / "out.jsonl", max_new_tokens=200, batch_size=2, temperature=1.0
    )
    lines = list(read_regenerated(tmp_path / "out.jsonl"))
    assert report["written"] == 9 and not report["failed"] and report["cut"] == 0
    assert sorted(line["primary_id"] for line in lines if line["part"][0] == 0) == [str(i) for i in range(9)]
    for line in lines:
        original = talks(9)[int(line["primary_id"])]["messages"]
        assert [m["role"] for m in line["messages"]] == [m["role"] for m in original]
        assert [m for m in line["messages"] if m["role"] == "user"] == [m for m in original if m["role"] == "user"]
        spoken = [i for i, m in zip(line["input_ids"], line["loss_mask"]) if m]
        assert spoken[-1] == 257 and line["metadata"]["finish_reasons"] == ["stop"] * len(original[::2])
    assert sum(sum(line["loss_mask"]) for line in lines) == report["tokens"]
    data = prepare(read_regenerated(tmp_path / "out.jsonl"), tok, 4096)
    assert [r["input_ids"] for r in data] == [line["input_ids"] for line in lines]


def test_a_row_is_what_the_verifier_saw():
    """Each row's trained tokens, given the tokens before them, are the verifier's own greedy choices."""
    tok, verifier = tokenizer(), make_verifier(eos_bias=4.0)
    replay = Replay(talks(3)[2])
    while history := replay.pending():
        prompt = replay.render(history, tok)
        ids = answer(verifier, [prompt], 30, {257})[0]
        replay.add_answer(
            prompt, ids, {"role": "assistant", "content": tok.decode(ids, skip_special_tokens=True)}, "stop"
        )
    for ids, mask in replay.rows:
        choice = verifier(torch.tensor([ids])).logits[0].argmax(-1)
        assert all(choice[i - 1] == ids[i] for i in range(1, len(ids)) if mask[i])


def test_cut_answers_end_the_conversation(tmp_path):
    report = regenerate(make_verifier(eos_bias=-100.0), tokenizer(), talks(3), tmp_path / "out.jsonl", max_new_tokens=5)
    assert report["cut"] == 3
    assert all(
        len(line["messages"]) == 2 and line["metadata"]["finish_reasons"] == ["length"] and sum(line["loss_mask"]) == 5
        for line in read_regenerated(tmp_path / "out.jsonl")
    )


def test_resume_is_the_run_that_was_not_interrupted(tmp_path):
    tok = tokenizer()
    verifier = make_verifier(eos_bias=6.0)
    kwargs = dict(max_new_tokens=60, temperature=1.0, batch_size=3)
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    regenerate(verifier, tok, talks(12), whole, **kwargs)
    regenerate(verifier, tok, talks(7), torn, **kwargs)
    torn.write_bytes(torn.read_bytes()[:-30])  # a torn last line
    assert len({line["primary_id"] for line in read_regenerated(torn)}) == 6
    report = regenerate(verifier, tok, talks(12), torn, **kwargs)
    assert (report["kept"], report["written"]) == (6, 6)
    assert torn.read_bytes() == whole.read_bytes()  # also the order
    assert regenerate(verifier, tok, talks(12), torn, **kwargs)["written"] == 0
    assert torn.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(temperature=0.5), "sampling was {'temperature': 0.0}, is {'temperature': 0.5}"),
        (dict(seed=3), "seed was 0, is 3"),
        (dict(verifier=make_verifier("gpt2")), "verifier was"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, words):
    kwargs = dict(
        verifier=make_verifier(),
        tokenizer=tokenizer(),
        conversations=talks(2),
        out_path=tmp_path / "o.jsonl",
        max_new_tokens=4,
    )
    regenerate(**kwargs)
    with pytest.raises(ValueError, match=words):
        regenerate(**(kwargs | change))


def test_failures_are_counted_and_named(tmp_path, caplog):
    user = [{"role": "user", "content": "?"}]
    rows = [
        *talks(2),
        talks(1)[0],
        {"id": "x", "messages": [{"role": "narrator", "content": "?"}]},
        {"id": "y", "messages": [{"role": "assistant", "content": "first"}]},
        {"id": "z", "messages": [{"role": "user", "content": "?" * 300}]},
        {"id": "k", "messages": user, "top_k": 3},
        {"id": "t", "messages": user, "temperature": -1},
    ]
    report = regenerate(make_verifier(), tokenizer(), rows, tmp_path / "o.jsonl", max_new_tokens=4, max_length=200)
    assert report["written"] == 2 and report["failed"].total() == 5 and report["duplicates"] == 1
    named = {e["id"]: e["error"] for e in map(json.loads, (tmp_path / "o.errors.jsonl").read_text().splitlines())}
    words = dict(
        x="'narrator' is unknown",
        y="no user message",
        z="prompt of 200 tokens or more",
        k="top_k: only a server",
        t="temperature: -1 is out of range",
    )
    assert named.keys() == words.keys() and all(w in named[k] for k, w in words.items())
    assert "5 conversations failed" in caplog.text
    assert "duplicates" in str(report) and "narrator" in report._repr_html_()
    assert (
        regenerate(make_verifier(), tokenizer(), talks(2), tmp_path / "o.jsonl", max_new_tokens=4, max_length=200)[
            "kept"
        ]
        == 2
    )
    # nothing failed in the last run
    assert not (tmp_path / "o.errors.jsonl").exists() and not (tmp_path / "o.jsonl.lock").exists()


def test_a_prompt_that_is_too_long_ends_a_conversation_and_keeps_what_was_said(tmp_path):
    row = {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!"},
            {"role": "user", "content": "?" * 300},
        ]
    }
    report = regenerate(
        make_verifier(eos_bias=6.0),
        tokenizer(),
        [row],
        tmp_path / "o.jsonl",
        max_new_tokens=100,
        temperature=1.0,
        max_length=200,
    )
    (line,) = read_regenerated(tmp_path / "o.jsonl")
    assert (
        len(line["messages"]) == 2
        and line["metadata"]["truncated"] == "prompt of 200 tokens or more"
        and report["truncated"].total() == 1
    )


def test_sampling_of_each_conversation(tmp_path):
    """What a conversation draws or brings along decides its answers, whatever stands beside it in the batch."""
    tok, verifier = tokenizer(), make_verifier(eos_bias=4.0)
    rows = [t | ({"temperature": 0.5, "top_p": 0.6} if t["id"] % 3 == 0 else {}) for t in talks(30)]
    mix = {"temperature": [[0, 1], [1.0, 1]]}
    regenerate(verifier, tok, rows, tmp_path / "mix.jsonl", max_new_tokens=30, sampling=mix, batch_size=8)
    mixed = {line["id"]: line for line in read_regenerated(tmp_path / "mix.jsonl")}
    got = {line["primary_id"]: line["metadata"]["sampling_params"] for line in mixed.values()}
    assert all(got[str(i)] == {"temperature": 0.5, "top_p": 0.6} for i in range(0, 30, 3)) and {
        p["temperature"] for p in got.values()
    } == {0, 0.5, 1.0}
    for t in (0.0, 1.0):
        regenerate(
            verifier,
            tok,
            [r for r in talks(30) if got[str(r["id"])]["temperature"] == t],
            tmp_path / f"{t}.jsonl",
            max_new_tokens=30,
            temperature=t,
        )
        alone = list(read_regenerated(tmp_path / f"{t}.jsonl"))
        assert alone and all(mixed[line["id"]]["input_ids"] == line["input_ids"] for line in alone)
    with pytest.raises(ValueError, match="'top_k' is not known here"):
        regenerate(verifier, tok, rows, tmp_path / "x.jsonl", sampling={"top_k": 3})


def test_progress_is_shown_from_the_start_and_counts_tokens(tmp_path, capsys):
    counted = []
    answers = answer(make_verifier(eos_bias=6.0), PROMPTS, 40, {257}, 1.0, seeds=range(5), progress=counted.append)
    assert sum(counted) == sum(map(len, answers))
    capsys.readouterr()
    verifier, shown = make_verifier(), []
    verifier.model.register_forward_pre_hook(lambda *_: shown.append(capsys.readouterr().err))
    report = regenerate(verifier, tokenizer(), talks(3), tmp_path / "o.jsonl", max_new_tokens=4)
    assert "0/3" in shown[0] and f"{report['tokens']} tokens" in capsys.readouterr().err


def test_an_end_token_is_needed():
    tok, verifier = tokenizer(), make_verifier()
    assert eos_ids_of(verifier, tok) == {257}
    verifier.model.generation_config.eos_token_id = -1
    assert eos_ids_of(verifier, tok) == {257}
    tok.eos_token, verifier.model.generation_config.eos_token_id = None, None
    with pytest.raises(ValueError, match="answers would never end"):
        eos_ids_of(verifier, tok)


def test_the_bar_is_drawn_once_a_second():
    "A line for every token would fill the log of a job."
    shown = io.StringIO()
    with AnswersBar(total=9, desc="regenerate", file=shown) as bar:
        for _ in range(300):
            bar.answered(8)
    assert shown.getvalue().count("regenerate") <= 4 and "2,400 tokens" in shown.getvalue()
