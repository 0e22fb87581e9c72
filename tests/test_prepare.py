"""From chats to a folder: what goes, what stays, what is refused, what a kill costs, and what the upstream library's
folders hold."""

import functools
import gzip
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from bad import data as bad
from calls import calls_of
from datasets import Dataset, disable_progress_bars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chat_encoding import PLAIN, tokenizer
from transformers import AutoTokenizer

from speculators_nb.data.chat_encoding import encode, to_dataset
from speculators_nb.data.messages import CONVERSATIONS, normalize
from speculators_nb.data.prepare import Result, RowSpool, fingerprint_data, prepare, prepare_data
from speculators_nb.data.prepared_folder import changes, load_prepared, read_token_freq
from speculators_nb.data.sources import read_conversations
from speculators_nb.evaluate.prompts import encode_prompts, prompt_of, read_prompts
from speculators_nb.lab.shipped import read_corpus
from speculators_nb.nn.draft_vocabulary import load_vocab_mapping

DATA = Path(__file__).parents[1] / "data"
VERIFIER = DATA / "tiny-verifier"
disable_progress_bars()


def corpus(n):
    return read_corpus(DATA / "corpus/train.jsonl")[:n]


@pytest.fixture(scope="module")
def chats():
    return corpus(120)


@pytest.fixture(scope="module")
def folder(chats, tmp_path_factory):
    "Prepared from all; it is only looked at."
    return prepare_data(chats, VERIFIER, tmp_path_factory.mktemp("prepared") / "p").folder


@pytest.fixture(scope="module")
def tok():
    return AutoTokenizer.from_pretrained(VERIFIER)


def bytes_tokenizer():
    return tokenizer(PLAIN)


def rows_in(prepared):
    return [(r["input_ids"].tolist(), r["loss_mask"].int().tolist()) for r in prepared.rows]


def everything(folder):
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in Path(folder).iterdir()}


def test_rows_are_those_of_encode(chats, tok, tmp_path):
    prepared = prepare_data(chats, VERIFIER, tmp_path / "p", shuffle=False, val_fraction=0.0)
    assert rows_in(prepared) == [row for c in chats for row in encode(normalize(c), tok)]
    assert len(prepared) == len(prepared.train) == 120 and len(prepared.val) == 0 and not len(prepared.dropped)
    turns = prepare_data(chats, VERIFIER, tmp_path / "t", shuffle=False, rows="turn")
    assert rows_in(turns) == [row for c in chats for row in encode(normalize(c), tok, rows="turn")]
    assert turns.trained.sum() == prepared.trained.sum() and turns.lengths.sum() > prepared.lengths.sum()


def test_preparing_is_short_to_read(chats, tmp_path):
    """Our functions, and their files, that make a folder of five conversations. Each limit is what was reached; those
    beside `data` are of options, files and provenance, which all commands share."""
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, chats[:5])))
    calls = calls_of(lambda: prepare_data(tmp_path / "c.jsonl", VERIFIER, tmp_path / "p", num_proc=1))
    functions = {(file, name) for file, name, _ in calls}
    assert sum(name == "normalize" for _, name, _ in calls) == 5  # each conversation is read into one form once
    of_data = {function for function in functions if function[0].startswith("/data/")}
    assert len(of_data) <= 83 and len({file for file, _ in of_data}) <= 6, sorted(of_data)
    assert len(functions) <= 128 and len({file for file, _ in functions}) <= 15, sorted(functions - of_data)


@pytest.mark.statement("release-19", "release-25", "release-26")
def test_what_is_written(chats, tmp_path):
    prepared = prepare_data(chats, VERIFIER, tmp_path / "p", val_fraction=0.1, draft_vocab_size=256)
    folder = tmp_path / "p"
    lengths = json.loads((folder / "sample_lengths.json").read_text())
    assert lengths == {str(i): len(ids) for i, (ids, _) in enumerate(rows_in(prepared))}
    counts = {}
    for ids, mask in rows_in(prepared):
        for i, m in zip(ids, mask):
            if m:
                counts[i] = counts.get(i, 0) + 1
    assert (
        prepared.token_freq
        == counts
        == read_token_freq(folder)
        == torch.load(folder / "token_freq.pt", weights_only=True)
    )
    config = json.loads((folder / "data_config.json").read_text())
    assert (
        config["command"] == "prepare_data"
        and config["origin"]["max_length"] == 2048
        and config["reproducibility"]["package_versions"]["tokenizers"]
    )
    assert (
        config["data"]["num_samples"] == 120
        and config["data"]["num_tokens"] == sum(lengths.values())
        and config["split"] == {"train": 108, "val": 12}
    )
    t2d, d2t = load_vocab_mapping(folder, 256, 2048)
    top = sorted(counts, key=lambda i: (-counts[i], i))[:256]
    assert t2d.nonzero().flatten().tolist() == sorted(top) == (d2t + torch.arange(256)).tolist()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".p.lock", "p"]
    read = load_prepared(folder)
    assert repr(read) == repr(prepared) and read.table.equals(prepared.table)


@pytest.mark.parametrize("rows", ["conversation", "turn"])
def test_what_held_out_conversations_ask_is_there_as_prompts(chats, tok, tmp_path, rows):
    prepared = prepare_data(chats, VERIFIER, tmp_path / "p", rows=rows)
    assert prepared.config["split"]["val"] == len(prepared.val) >= 6  # 5 % of 120 conversations
    prompts = read_prompts(tmp_path / "p")
    assert prompts == read_prompts(tmp_path / "p/heldout.jsonl") and len(prompts) == 6
    asked = {json.dumps(encode_prompts([prompt_of(chat)], tok)[0]): chat["messages"][0]["content"] for chat in chats}
    lines = list(map(json.loads, (tmp_path / "p/heldout.jsonl").read_text().splitlines()))
    assert all(asked[json.dumps(line["prompt"])] in line["text"] for line in lines)
    first = [line["prompt"] for line in lines]
    held, trained = (list(part["input_ids"]) for part in (prepared.val, prepared.train))
    begins = lambda ids, prompt: ids[: len(prompt)].tolist() == prompt
    assert all(any(begins(ids, prompt) for prompt in first) for ids in held)
    assert not any(begins(ids, prompt) for prompt in first for ids in trained)
    assert not (prepare_data(chats, VERIFIER, tmp_path / "all", val_fraction=0).folder / "heldout.jsonl").exists()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_evaluate_reads_the_columns_that_prepare_reads(name):
    asked = [{"role": "user", "content": "How are you?"}]
    assert prompt_of({name: [*asked, {"role": "assistant", "content": "Fine."}]}).messages == asked


def test_questions_of_held_out_conversations_with_pictures_with_tools_and_with_neither():
    ids, mask, asked = np.array([1, 2, 3]), np.array([False, False, True]), [{"role": "user", "content": "x"}]
    tools = [{"type": "function"}]
    spool = RowSpool(io.BytesIO())
    for more in ((asked, tools), (), (asked, None)):
        spool.append([(ids, mask, *more)])
    spool.finish()
    questions = [*Result(spool, np.array([3] * 3), np.arange(3), {}, None, held_out=3).questions()]
    assert questions == [{"messages": asked, "tools": tools}, {"prompt": [1, 2]}, {"messages": asked, "tools": None}]


@pytest.mark.parametrize("val_fraction", [0.0, 0.2])
def test_the_same_call_again_does_nothing(chats, tmp_path, val_fraction):
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, chats)))
    prepare_data(tmp_path / "c.jsonl", VERIFIER, tmp_path / "p", val_fraction=val_fraction)
    before = everything(tmp_path / "p")
    os.rename(tmp_path / "c.jsonl", tmp_path / "elsewhere.jsonl")  # the content counts, not the name
    prepare_data(str(tmp_path / "elsewhere.jsonl"), str(VERIFIER), tmp_path / "p", val_fraction=val_fraction)
    assert everything(tmp_path / "p") == before
    prepare_data(
        tmp_path / "elsewhere.jsonl", VERIFIER, tmp_path / "p", val_fraction=val_fraction, draft_vocab_size=128
    )  # adds a mapping, changes nothing
    after = everything(tmp_path / "p")
    assert {k: after[k] for k in before} == before and after.keys() - before.keys() == {"d2t-128.npy", "t2d-128.npy"}


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(max_length=99), "max_length was 2048, is 99"),
        (dict(max_samples=7), "max_samples was None, is 7"),
        (dict(rows="turn"), "rows was 'conversation', is 'turn'"),
        (dict(seed=1), "seed was 0, is 1"),
        (dict(too_long="drop"), "too_long was"),
        (dict(dedup=False), "dedup was True"),
        (dict(shuffle=False), "shuffle was"),
        (dict(val_fraction=0.5), "val_fraction was 0.05, is 0.5"),
        (dict(min_trained=3), "min_trained was 1"),
        (dict(allow_urls=True), "allow_urls was False, is True"),
        (dict(image_folder="/pictures"), "image_folder was None, is '/pictures'"),
        (dict(template_kwargs={"x": 1}), "template_kwargs was"),
        (dict(data=corpus(121)), "data was '"),
        (dict(verifier=bytes_tokenizer()), "tokenizer was '"),
    ],
)
def test_a_stale_folder_is_refused_by_what_changed(chats, folder, change, words):
    before = everything(folder)
    with pytest.raises(ValueError, match="was prepared from something else") as e:
        prepare_data(**dict(data=chats, verifier=VERIFIER, output_dir=folder) | change)
    assert words in str(e.value) and str(e.value).count(" was ") == 1 + 1  # the one difference
    assert everything(folder) == before


def test_a_stale_folder_is_overwritten_where_one_says_so(chats, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "p")
    before = everything(tmp_path / "p")
    assert len(prepare_data(chats, VERIFIER, tmp_path / "p", max_length=99, overwrite=True)) > 0
    assert everything(tmp_path / "p") != before


def test_only_prepared_folders_are_ever_replaced(chats, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="not a prepared folder"):
            prepare_data(chats, VERIFIER, tmp_path / "mine", overwrite=overwrite)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="not a prepared folder"):
        prepare_data(chats, VERIFIER, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert len(prepare_data(chats, VERIFIER, tmp_path / "empty")) == 120
    assert (tmp_path / "mine/thesis.tex").read_text() == "years"


def test_the_report_counts_all_that_went(chats, tok, tmp_path):
    bad = [
        [{"role": "user", "content": "nobody answers"}],
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"tools": "{", "messages": chats[0]["messages"]},
        {"input_ids": [1, 2], "loss_mask": [0, 0]},
        {"input_ids": [1] * 80, "loss_mask": [0] * 70 + [1] * 10},
        {"input_ids": [1] * 80, "loss_mask": [0] * 60 + [1] * 20},
    ]
    prepared = prepare_data(
        chats + chats[:9] + bad, VERIFIER, tmp_path / "p", max_length=64, min_trained=2, val_fraction=0
    )
    stages = prepared.table["conversations"].dropna().to_dict()
    made = [row for c in chats for row in encode(normalize(c), tok)] + [([1] * 80, [0] * 60 + [1] * 20)]
    kept = [(i[:64], m[:64]) for i, m in made if sum(m[:64]) >= 2]
    assert stages["read"] == 135 and stages["duplicates"] == 9 and stages["without a row"] == 126 - len(kept)
    assert sorted(rows_in(prepared)) == sorted(kept)
    assert prepared.table.loc["cut", "tokens"] == sum(
        len(i) - 64 for i, m in made if sum(m[:64]) >= 2 and len(i) > 64
    ) and prepared.table.loc["cut", "rows"] == sum(len(i) > 64 for i, m in made if sum(m[:64]) >= 2)
    reasons = prepared.dropped
    assert reasons.loc["no assistant message that answers another", "first"] == "conversation 129"
    assert (
        reasons["count"].sum() == 126 - len(kept)
        and any("narrator" in r for r in reasons.index)
        and any("tools: not JSON" in r for r in reasons.index)
    )
    assert prepared.table.loc["train", "tokens"] == sum(len(i) for i, _ in kept)
    html = prepared._repr_html_()
    assert "narrator" in html and "duplicates" in html and prepared.plot().axes
    assert "NA" not in html.replace("narrator", "") and "trained share" in html  # what a stage does not count is empty


THINKS = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5", "reasoning_content": "One more."},
]


def test_the_summary_names_what_went_and_what_was_left_out(chats, tmp_path, caplog):
    "Of conversations that are kept, too: reasoning without a place in the template, answers to nobody."
    greeting = [{"role": "assistant", "content": "Hello, what is it?"}, *chats[1]["messages"]]
    asks = [*chats[2]["messages"], {"role": "user", "content": "And then?"}]
    tags = [THINKS[0], {"role": "assistant", "content": "<think>One more.</think>5"}]  # rendered as it is
    rows = [*chats[:3], *chats[:2], greeting, THINKS, [*THINKS, *tags], asks, [{"role": "narrator", "content": "x"}]]
    lines = "\n".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) for row in rows)
    (tmp_path / "c.jsonl").write_text(lines)
    caplog.set_level("INFO")
    prepared = prepare_data(tmp_path / "c.jsonl", VERIFIER, tmp_path / "p", num_proc=1)
    assert {reason: list(line) for reason, *line in prepared.omitted.itertuples()} == {
        "reasoning that the chat template leaves out": [2, f"{tmp_path}/c.jsonl, line 7, message 1"],
        "an answer before the first question, which is not trained": [1, f"{tmp_path}/c.jsonl, line 6, message 0"],
        "messages after the last answer": [1, f"{tmp_path}/c.jsonl, line 9, message 4"],
    }
    summary = prepared.summary()
    for words in (
        repr(prepared),
        f"duplicates     2 conversations ({tmp_path}/c.jsonl, line 4; line 5)",
        "  2 conversations: reasoning that the chat template leaves out (first: ",
        "  1 conversation: role 'narrator' is unknown",
    ):
        assert summary.count(words) == 1, summary
    assert "reasoning that the chat template leaves out" in prepared._repr_html_() and repr(prepared) not in caplog.text
    assert "reasoning that" in prepare(rows, AutoTokenizer.from_pretrained(VERIFIER), 64).info.description


def test_many_duplicates_are_named_by_their_first(chats, tmp_path):
    summary = prepare_data(chats[:2] * 20, VERIFIER, tmp_path / "p").summary()
    assert (
        "38 conversations (conversation 2; conversation 3; conversation 4; conversation 5; conversation 6; …)"
        in summary
    )


@pytest.mark.parametrize(
    "limits, lengths, dropped, cut",
    [
        (dict(max_length=6), [6, 3], {}, 4),
        (dict(max_length=6, too_long="drop"), [3], {"longer than 6 tokens": 1}, 0),
        (dict(max_length=4), [3], {"no trained token in the first 4": 1}, 0),
        (dict(max_length=6, min_trained=2), [6, 3], {}, 4),
        (dict(max_length=5, min_trained=2), [3], {"fewer than 2 trained tokens in the first 5": 1}, 0),
    ],
)
def test_too_long_is_dropped_or_cut(tmp_path, limits, lengths, dropped, cut):
    rows = [{"input_ids": np.arange(n), "loss_mask": np.arange(n) >= first} for n, first in ((10, 4), (3, 1))]
    prepared = prepare_data(rows, VERIFIER, tmp_path / "p", shuffle=False, val_fraction=0, **limits)
    assert prepared.lengths.tolist() == lengths and prepared.dropped["count"].to_dict() == dropped
    assert prepared.config["report"]["tokens_cut"] == cut


@pytest.mark.parametrize(
    "good, bad, refused",
    [(9, 1, False), (0, 1, True), (0, 20, True), (100, 10, False), (100, 11, False), (98, 11, True), (2, 9, False)],
)
def test_a_file_of_which_much_is_broken_is_refused(chats, tmp_path, good, bad, refused):
    (tmp_path / "c.jsonl").write_text("\n".join([*map(json.dumps, chats[:good]), *["{"] * bad]))
    if refused:
        with pytest.raises(
            ValueError,
            match=(
                rf"c.jsonl: {bad} of {good + bad} conversations cannot be read.*first is .*c.jsonl, line {good + 1}: "
                r"not JSON"
            ),
        ):
            prepare_data(tmp_path / "c.jsonl", VERIFIER, tmp_path / "p")
        assert not (tmp_path / "p").exists()
    else:
        assert len(prepare_data(tmp_path / "c.jsonl", VERIFIER, tmp_path / "p")) == good


def test_max_samples_is_a_fair_lot(tmp_path):
    chats = [{"input_ids": [i, i], "loss_mask": [0, 1]} for i in range(50)] * 2
    taken = [
        {
            r["input_ids"][0].item()
            for r in prepare_data(chats, bytes_tokenizer(), tmp_path / f"p{s}", max_samples=10, seed=s).rows
        }
        for s in range(12)
    ]
    assert all(len(t) == 10 for t in taken) and taken[0] != taken[1]
    hits = np.bincount([i for t in taken for i in t], minlength=50)
    # 120 draws, half of them expected in either half: 5 standard deviations
    assert hits.max() < 12 and hits[:25].sum() in range(33, 88)
    odd = [{"messages": 5}]  # is none of those to choose from
    again = prepare_data(chats + odd, bytes_tokenizer(), tmp_path / "again", max_samples=10, seed=3)
    assert {r["input_ids"][0].item() for r in again.rows} == taken[3]
    assert again.table.conversations["not chosen"] == 50 - 10
    first = prepare_data(chats, bytes_tokenizer(), tmp_path / "first", max_samples=10, shuffle=False)
    assert [r["input_ids"][0].item() for r in first.rows] == list(range(10))
    assert first.table.loc["read", "conversations"] == 10  # the rest was not even read


@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    turns=st.lists(st.integers(1, 4), min_size=2, max_size=20), fraction=st.floats(0.05, 0.9), seed=st.integers(0, 5)
)
def test_no_conversation_is_on_both_sides(tmp_path_factory, turns, fraction, seed):
    chats = [
        [
            m
            for t in range(n)
            for m in ({"role": "user", "content": f"{i} {t}?"}, {"role": "assistant", "content": f"{i}"})
        ]
        for i, n in enumerate(turns)
    ]
    tok, folder = bytes_tokenizer(), tmp_path_factory.mktemp("s")
    prepared = prepare_data(chats, tok, folder / "p", rows="turn", val_fraction=fraction, seed=seed)
    train, val = (
        [tok.decode(r["input_ids"]).split("\n")[1].split()[0] for r in part] for part in (prepared.train, prepared.val)
    )
    assert (
        not set(train) & set(val)
        and len(train) + len(val) == sum(turns)
        and set(train) | set(val) == {str(i) for i in range(len(turns))}
    )
    assert len(set(val)) == min(len(turns) - 1, max(1, round(fraction * len(turns))))


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_regenerated_conversation_is_on_both_sides(tmp_path, shuffle):
    "The lines of one, of which a later may repeat what an earlier one answers, may be anywhere in the file."
    parts = [
        {"primary_id": f"c{i}", "part": [k, 2], "input_ids": [100 + i, k, 7], "loss_mask": [0, 0, 1]}
        for i in range(20)
        for k in range(2)
    ]
    alone = [{"input_ids": [i, 7], "loss_mask": [0, 1]} for i in range(20)]
    rows = [parts[i] for i in np.random.default_rng(0).permutation(len(parts))] + alone
    prepared = prepare_data(rows, VERIFIER, tmp_path / "p", val_fraction=0.2, shuffle=shuffle)
    train, val = ([int(row["input_ids"][0]) for row in part] for part in (prepared.train, prepared.val))
    assert not set(train) & set(val) and len(set(val)) == 8 and len(train) + len(val) == 60


def test_a_process_that_dies_is_an_error(tmp_path, monkeypatch):
    from speculators_nb.data import prepare

    # as if memory had run out
    monkeypatch.setattr(prepare, "encode_batch", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ChildProcessError, match="smaller num_proc"):
        prepare_data(corpus(700), VERIFIER, tmp_path / "p", num_proc=2)
    assert not (tmp_path / "p").exists()


def stop_after(module, name, pipe, first=False):
    "From now on `module.name` stands still after (or before) it has done its work, and says so."
    function = getattr(module, name)

    def slow(*args, **kwargs):
        out = None if first else function(*args, **kwargs)
        pipe.send("now")
        time.sleep(60)
        return out

    setattr(module, name, slow)


def run_until(where, data, folder, pipe):
    from speculators_nb.core import files as utils
    from speculators_nb.data import prepare

    if where == "tokenise":
        stop_after(prepare, "encode_batch", pipe)
    if where == "write":
        stop_after(prepare.torch, "save", pipe)  # the table is there, the record is not
    if where == "rename":
        stop_after(utils.os, "rename", pipe, first=True)  # complete, under its temporary name
    prepare_data(data, VERIFIER, folder, num_proc=1)


@pytest.mark.parametrize("where", ["tokenise", "write", "rename"])
def test_killed_in_the_middle(chats, tok, tmp_path, where):
    chats = chats[:40]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, chats)))
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=run_until, args=(where, tmp_path / "c.jsonl", tmp_path / "p", there))
    process.start()
    assert here.poll(50) and here.recv() == "now"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "p").exists()  # nothing that could be taken for a result
    left = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert len(left) == (where != "tokenise")
    prepared = prepare_data(tmp_path / "c.jsonl", VERIFIER, tmp_path / "p")
    made = {tuple(i) for c in chats for i, _ in encode(normalize(c), tok)}
    assert len(prepared) == 40 and len({tuple(i) for i, _ in rows_in(prepared)}) == len(made)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".p.lock", "c.jsonl", "p"]


def test_two_at_once_make_one(chats, tmp_path):
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, chats)))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        both = [pool.submit(prepare_data, tmp_path / "c.jsonl", VERIFIER, tmp_path / "p", num_proc=1) for _ in range(2)]
        assert [len(f.result()) for f in both] == [120, 120]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".p.lock", "c.jsonl", "p"]


def upstream_like(folder, freq):
    to_dataset([(np.array([5, 6, 7, 6]), np.array([0, 0, 1, 1])), (np.array([5, 6]), np.array([0, 1]))]).with_format(
        "torch"
    ).save_to_disk(str(folder))
    if freq is not None:
        torch.save(freq, folder / "token_freq.pt")
    return folder


@pytest.mark.parametrize("freq", [{6: 2, 7: 1}, {9: 4}, None])
def test_upstreams_folder(tmp_path, freq):
    prepared = load_prepared(upstream_like(tmp_path, freq))
    assert (
        prepared.token_freq == {6: 2, 7: 1}
        and prepared.lengths.tolist() == [4, 2]
        and prepared.trained.tolist() == [2, 1]
    )
    with pytest.raises(ValueError, match="pass vocab_size"):
        prepared.add_vocab_mapping(2)
    assert prepared.add_vocab_mapping(2, 10)[0].nonzero().flatten().tolist() == [6, 7]
    # and is a source
    assert rows_in(prepare_data(tmp_path, bytes_tokenizer(), tmp_path / "again", shuffle=False)) == rows_in(prepared)


def test_parts_of_different_runs(chats, tmp_path):
    prepare_data(chats, VERIFIER, tmp_path / "p")
    config = tmp_path / "p/data_config.json"
    config.write_text(config.read_text().replace('"train": 114', '"train": 113'))
    with pytest.raises(ValueError, match="counts 119 rows, the table has 120"):
        load_prepared(tmp_path / "p")


def test_secrets_do_not_reach_the_record(chats, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    prepare_data(chats, VERIFIER, tmp_path / "p", template_kwargs={"note": "hf_abcdefghijklmnopqrstuvwxyz"})
    record = json.loads((tmp_path / "p/data_config.json").read_text())
    assert "hf_abcdefghijklmnopqrstuvwxyz" not in json.dumps(record["arguments"])


def test_changes_and_fingerprints(tmp_path):
    assert changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b was 2, is 3", "c was None, is 4"] and changes(
        {"d": 1}, {}
    ) == ["d was 1, is None"]
    rows = [{"input_ids": [1], "loss_mask": [1]}]
    assert fingerprint_data(iter(rows))[0] == fingerprint_data(rows)[0] != fingerprint_data(rows * 2)[0]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    (tmp_path / "b.jsonl").write_text(json.dumps(rows[0]))
    assert fingerprint_data(tmp_path / "a.jsonl")[0] == fingerprint_data([tmp_path / "b.jsonl"])[0]


def test_a_place_under_home_and_what_datasets_cached_beside_a_table(tmp_path, monkeypatch, chats):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Dataset.from_list(chats[:5]).save_to_disk("table")
    prepared = prepare_data("~/table", VERIFIER, "~/p")
    assert (
        prepared.folder == tmp_path / "p" and len(load_prepared("~/p")) == len(list(read_conversations("~/table"))) == 5
    )
    assert {path.name for path in tmp_path.iterdir()} == {"table", "p", ".p.lock"}
    Dataset.load_from_disk("table").map(lambda row: {"n": len(row["messages"])})
    assert len([*Path("table").glob("*.arrow")]) == 2 and len(prepare_data("~/table", VERIFIER, "~/p")) == 5


def test_masks_of_whole_numbers_are_masks(tmp_path):
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 6], "loss_mask": [0, 0, 1, 1], "seq_len": 4}]).with_format(
        "torch"
    )  # upstream stores int64
    rows.save_to_disk(str(tmp_path / "t"))
    prepared = load_prepared(tmp_path / "t")
    assert prepared.token_freq == {6: 1, 7: 1} and prepared.trained.tolist() == [2]


def bad_rows():
    return [row for _, row, _ in bad.MESSAGES + bad.TEXT_ONLY + bad.UNANSWERED + bad.IDS]


def test_one_road(chats, tok, tmp_path):
    """What the table in memory refuses and counts is what the folder refuses and counts, for the same reasons and at
    the same places."""
    (tmp_path / "c.jsonl").write_bytes(
        bad.lines(*chats[:9], *bad_rows(), *[row for _, row, _ in bad.READ[:8]], *chats[9:])
    )
    folder = prepare_data(tmp_path / "c.jsonl", VERIFIER, tmp_path / "p", max_length=100, shuffle=False, dedup=False)
    table = prepare(tmp_path / "c.jsonl", tok, 100)
    assert [(r["input_ids"], [int(m) for m in r["loss_mask"]]) for r in table] == rows_in(folder) and len(table) == 120
    dropped = folder.config["report"]["dropped"]
    said = re.sub(r".*dropped: ", "", table.info.description)
    assert said == "; ".join(f"{r['count']} × {r['reason']} (first: {r['first']})" for r in dropped)
    assert (
        sum(r["count"] for r in dropped) == len(bad_rows()) + 8
        and folder.table.loc["without a row", "conversations"] == len(bad_rows()) + 8
    )
    assert f"{len(bad_rows()) + 8 + 120} conversations, 120 rows" in table.info.description


def test_more_reasons_than_anybody_reads(tmp_path, chats):
    rows = [[{"role": f"role {i}", "content": "x"}] for i in range(80)]
    dropped = prepare_data(chats[:1] + rows, VERIFIER, tmp_path / "p").dropped
    assert len(dropped) == 51 and dropped.loc["other reasons", "count"] == 30 and dropped["count"].sum() == 80


def test_the_report_shows_control_tokens(chats, tmp_path, caplog):
    said = {"messages": [{"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": "<|im_start|>!"}]}
    prepared = prepare_data([*chats[:5], said, said | {"messages": said["messages"] * 2}], VERIFIER, tmp_path / "p")
    table = prepared.control_tokens
    assert table.loc["<|im_end|>"].tolist() == [2, "conversation 5, message 0"] and table.loc[
        "<|im_start|>"
    ].tolist() == [2, "conversation 5, message 1"]
    assert (
        "&lt;|im_end|&gt;" in prepared._repr_html_()
        and "'<|im_end|>' in 2 conversations" in caplog.text
        and len(prepared) == 7
    )
    assert not len(prepare_data(chats[:5], VERIFIER, tmp_path / "q").control_tokens)
    config = tmp_path / "q/data_config.json"  # of a folder that was made before there was such a count
    old = json.loads(config.read_text())
    del old["report"]["control_tokens"]
    config.write_text(json.dumps(old))
    assert not len(load_prepared(tmp_path / "q").control_tokens)


def test_large_conversations_are_done_here_and_in_order(tmp_path, monkeypatch):
    from speculators_nb.data import prepare

    monkeypatch.setattr(prepare, "BATCH", 3000)
    chats = corpus(450)
    for i in (0, 3, 225, 449):
        chats[i] = {
            "messages": [
                *chats[i]["messages"],
                {"role": "user", "content": f"{i} " * 4000},
                {"role": "assistant", "content": "so"},
            ]
        }
    here, encode_here = [], prepare._encode
    monkeypatch.setattr(
        prepare, "_encode", lambda batch, encoder: here.append(len(batch)) or encode_here(batch, encoder)
    )
    one = prepare_data(chats, VERIFIER, tmp_path / "1", num_proc=1, shuffle=False, max_length=64)
    assert len(here) > 50 and here.count(1) >= 4
    here.clear()
    two = prepare_data(chats, VERIFIER, tmp_path / "2", num_proc=2, shuffle=False, max_length=64)
    assert 4 <= len(here) < 20  # those before the eighth batch, and the large ones
    assert rows_in(one) == rows_in(two) and one.config["report"] == two.config["report"]


def peak(path):
    "Rows of a prepared file, and the MB that this process held beyond what it had."
    tokenizer = AutoTokenizer.from_pretrained(VERIFIER)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = prepare_data(path, tokenizer, f"{path}.out", num_proc=1)
    return len(made), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


@pytest.mark.parametrize(
    "kind, most",
    [
        ("a line", 300),
        pytest.param("one word", 700, marks=pytest.mark.nightly),
        pytest.param("an emoji and a text", 1100, marks=pytest.mark.nightly),
        pytest.param("empty objects", 1500, marks=pytest.mark.nightly),
    ],
)
def test_memory_is_bounded_whatever_a_line_holds(tmp_path, kind, most):
    "Peak memory of a process, in MB, beyond what it had. The first took 22 GB."
    good, path = bad.lines(bad.TALK), tmp_path / "c.jsonl.gz"
    million = b"x" * (1 << 20)
    bomb = {
        "a line": (
            b'{"messages": [{"role": "user", "content": "',
            million,
            300,
            b'"}, {"role": "assistant", "content": "x"}]}',
        ),
        "one word": (
            b'{"messages": [{"role": "user", "content": "',
            million,
            31,
            b'"}, {"role": "assistant", "content": "x"}]}',
        ),
        "an emoji and a text": (
            '{"messages": [{"role": "user", "content": "😀'.encode(),
            b"word " * (1 << 18),
            24,
            b'"}, {"role": "assistant", "content": "x"}]}',
        ),
        "empty objects": (b'{"messages": [{}', b",{}" * (1 << 18), 40, b"]}"),
    }[kind]
    path.write_bytes(gzip.compress(good + bomb[0]) + gzip.compress(bomb[1]) * bomb[2] + gzip.compress(bomb[3] + b"\n"))
    assert path.stat().st_size < 1 << 20
    rows, held = forked.ask(functools.partial(peak, path))()
    assert rows == 1 and held < most


GROWTH = """
import resource, sys, tempfile
from pathlib import Path
import numpy as np
from speculators_nb.data.chat_template import ChatTemplate
from speculators_nb.data.prepare import Encoder, Settings, run_pipeline, write_table
from transformers import AutoTokenizer
encoder = Encoder(ChatTemplate(AutoTokenizer.from_pretrained(sys.argv[2])), Settings(1000, dedup=False), 2048)
for n in (1000, 8000):
    rows = ({"input_ids": np.full(1000, i % 2048), "loss_mask": np.ones(1000, bool)} for i in range(n))
    with tempfile.TemporaryFile(dir=sys.argv[1]) as file:
        made = run_pipeline(rows, encoder, file=file)
        (Path(sys.argv[1]) / str(n)).mkdir()
        counts = write_table(Path(sys.argv[1]) / str(n), made, "f")
    print(sum(counts.values()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_rows(tmp_path):
    "Peak memory of a process, in MB: 7 million more tokens are 35 MB in lists, and 29 MB in a table."
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, tmp_path, VERIFIER], capture_output=True, text=True, check=True
    )
    (few, before), (many, after) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert (few, many) == (1_000_000, 8_000_000) and after - before < 25, done.stdout


def test_the_table_is_what_datasets_would_write(tmp_path, monkeypatch):
    "But for the number of rows in a batch; also in parts of fewer conversations."
    from speculators_nb.data import prepare
    from speculators_nb.data.sources import load_table

    monkeypatch.setattr(prepare, "AT_ONCE", 70)
    prepared = prepare_data(corpus(300), VERIFIER, tmp_path / "p", rows="turn", val_fraction=0.1, num_proc=1)
    prepared.rows.save_to_disk(tmp_path / "again")
    assert prepared.rows.data.table == load_table(tmp_path / "again").data.table
    assert len(prepared.rows.data.table["seq_len"].chunks) > 3
    for name in ("dataset_info.json", "state.json"):
        ours, theirs = (json.loads((tmp_path / where / name).read_text()) for where in ("p", "again"))
        assert ours | {"_fingerprint": 0} == theirs | {"_fingerprint": 0}


@pytest.mark.parametrize("name, rows", [("a\udcff.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])])
def test_a_name_that_is_no_text(tmp_path, chats, name, rows):
    "Linux lets a file be named by any bytes; the report names it all the same."
    (tmp_path / name).write_bytes(bad.lines(*chats[:2], *rows))
    prepared = prepare_data(tmp_path / name, VERIFIER, tmp_path / "p")
    assert prepared.dropped["first"].tolist() == [f"{tmp_path}/a\\udcff.jsonl, line 3"]
