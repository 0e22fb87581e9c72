"""`evaluate.load`, `evaluate.engine`, `evaluate.guidellm`: every count of a stand-in for vLLM is known beforehand
(fake_engine.expected)."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import expected, installed
from hypothesis import given
from hypothesis import strategies as st

import speculators_nb.evaluate.load as load_module
from speculators_nb.core.http_client import Endpoint, EndpointError
from speculators_nb.decode.generate import Generation, Step
from speculators_nb.evaluate.acceptance import evaluate
from speculators_nb.evaluate.comparison import as_engine_counts, compare_runs, evaluate_as_engine
from speculators_nb.evaluate.engine import EngineEvaluation, evaluate_engine, output_ranges
from speculators_nb.evaluate.guidellm import replies_of, run_guidellm
from speculators_nb.evaluate.load import ask, run_load
from speculators_nb.evaluate.prompts import Prompt, read_prompts
from speculators_nb.evaluate.vllm_metrics import Meter, MetricsError
from speculators_nb.serve.server import Server

HERE = Path(__file__).parent
VERIFIER = Path(__file__).parents[1] / "data/tiny-verifier"
HELDOUT = Path(__file__).parents[1] / "data/corpus/heldout.jsonl"
PROMPTS = [dict(prompt=f"question {i}", domain="ab"[i % 2]) for i in range(6)]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    script = installed(tmp_path / "bin")
    monkeypatch.setenv("SPECULATORS_NB_VLLM", str(script))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    return script


def ngram(**more):
    return dict(method="ngram") | more


@pytest.mark.statement("release-40")
def test_a_sweep(engine, tmp_path):
    found = evaluate_engine(
        VERIFIER,
        PROMPTS,
        k=[1, 2, 3],
        concurrency=[1, 4],
        max_new_tokens=20,
        output_dir=tmp_path / "run",
        method="ngram",
    )
    assert set(zip(found.performance.k, found.performance.concurrency)) == {(k, c) for k in range(4) for c in (1, 4)}
    assert set(found.performance.drafter) == {"n-gram", "no drafter"}
    for k in (1, 2, 3):
        steps, accepted, _ = expected(k, 20)
        for c in (1, 4):
            rows = found.positions[(found.positions.k == k) & (found.positions.concurrency == c)]
            np.testing.assert_allclose(rows.unconditional, np.array(accepted) / steps)
            np.testing.assert_allclose(rows.conditional, np.array(accepted) / np.array([steps, *accepted[:-1]]))
            assert rows.unconditional_low.notna().all()  # each request has counts of its own
            total = found.summary[(found.summary.k == k) & (found.summary.concurrency == c)].set_index("domain")
            assert list(total.index) == ["all", "a", "b"]
            numbers = total.loc["all", ["requests", "tokens", "steps", "proposed", "accepted"]].tolist()
            assert numbers == [6, 120, 6 * steps, 6 * k * steps, 6 * sum(accepted)]
            assert total.loc["b", "steps"] == 3 * steps
            assert total.loc["all", "mean_length"] == pytest.approx(1 + sum(accepted) / steps)
            assert total.loc["all", "tokens_per_step"] == pytest.approx(19 / steps)
    assert found.performance[found.performance.k == 0].speedup.eq(1).all() and found.performance.speedup.gt(0).all()
    alone = found.requests[(found.requests.k == 2) & (found.requests.concurrency == 1)]
    assert (
        alone.prompt.tolist() == list(range(6))
        and all(ids == list(range(20)) for ids in alone.token_ids)
        and alone.pieces.eq(1 + expected(2, 20)[0]).all()
    )
    assert len(found.settings["commands"]) == 4 and found.settings["domains"] == {"a": 3, "b": 3}
    names = {p.name for p in (tmp_path / "run").iterdir()}
    files = "summary.csv positions.csv performance.csv requests.jsonl settings.json acceptance.png speed.png"
    assert {*files.split(), "provenance.json", "server-k0.log"} <= names
    again = EngineEvaluation.read(tmp_path / "run")
    assert (
        again.positions.round(12).equals(found.positions.round(12))
        and again.requests.accepted_at.dropna().tolist() == found.requests.accepted_at.dropna().tolist()
    )
    both = compare_runs({"now": found, "again": tmp_path / "run"})
    assert set(both.table().run) == {"now", "again"} and len(both.table()) == 2 * 6 and "at 3" in both.table()
    assert both.plot()._suptitle.get_text() == "The same acceptance at every position"
    assert "K=" in found.plot()._suptitle.get_text() and "times the tokens" in found.plot_speed()._suptitle.get_text()


@pytest.mark.parametrize("behaviour", ["silent", "odd"])
def test_a_server_without_counts_of_its_requests_is_read_by_its_counters(engine, monkeypatch, behaviour):
    monkeypatch.setenv("FAKE_ENGINE", behaviour)
    given = dict(k=2, max_new_tokens=20, method="ngram", baseline=False, concurrency=[1, 4])
    found = evaluate_engine(VERIFIER, PROMPTS, **given)
    accepted = expected(2, 20)[1]
    assert found.summary.accepted[found.summary.domain == "all"].tolist() == [6 * sum(accepted)] * 2
    # one at a time a request is counted between two readings; intervals need that
    known = found.positions.groupby("concurrency").unconditional_low.count()
    assert known.to_dict() == {1: 2, 4: 0}
    assert found.requests.groupby("concurrency").accepted.count().to_dict() == {1: 6, 4: 0}


def test_counts_of_each_request_at_any_load(engine):
    found = evaluate_engine(VERIFIER, PROMPTS, k=2, max_new_tokens=20, method="ngram", concurrency=4)
    steps, accepted, _ = expected(2, 20)
    rows = found.requests[found.requests.k == 2]
    assert rows.accepted_at.tolist() == [accepted] * 6 and rows.steps.eq(steps).all()
    assert all(sum(n) == sum(accepted) and len(n) == steps for n in rows.step_accepted)
    flags = ["--per-request-spec-decode-metrics detailed" in c for c in found.settings["commands"]]
    assert flags == [False, True]  # vLLM refuses it where nothing is drafted
    ranges = output_ranges(found.requests, edges=(8,))
    assert ranges.steps.sum() == 6 * steps and ranges.accepted.sum() == 6 * sum(accepted)
    assert found.compared_ranges().empty  # 20 tokens are all within the first 128


def test_a_report_of_requests_that_the_user_has_chosen_stays(engine):
    extra = ["--per-request-spec-decode-metrics=none"]
    found = evaluate_engine(VERIFIER, PROMPTS, k=2, max_new_tokens=6, method="ngram", baseline=False, extra=extra)
    assert found.settings["commands"][0].count("--per-request") == 1


def test_sampling_while_a_processor_drafts_is_warned_of(engine, monkeypatch):
    monkeypatch.setattr("speculators_nb.evaluate.engine.accelerated", lambda: False)
    given = dict(k=2, method="ngram", baseline=False, max_new_tokens=4, max_samples=1)
    with pytest.warns(UserWarning, match="unset memory for the temperature"):
        evaluate_engine(VERIFIER, PROMPTS, temperatures=[1.0], **given)


@pytest.mark.statement("release-43")
def test_the_filters_of_sampling_are_sent(engine):
    with Server(["vllm", "serve", "m", "--speculative-config", '{"num_speculative_tokens": 2}']) as server:
        given = dict(temperatures=[0.8], top_p=0.9, top_k=40, min_p=0.05, max_new_tokens=4, max_samples=1)
        found = evaluate_engine(server.url, PROMPTS, **given)
        last = Endpoint(server.url).get("/last")
    assert last.items() >= dict(temperature=0.8, top_p=0.9, top_k=40, min_p=0.05).items()
    assert (found.settings["top_p"], found.settings["top_k"]) == (0.9, 40)
    with pytest.raises(ValueError, match="top_p=0.9: has no effect with temperatures"):
        evaluate_engine("http://127.0.0.1:1", PROMPTS, top_p=0.9)


def test_a_server_that_runs(engine):
    with Server(["vllm", "serve", "m", "--speculative-config", '{"num_speculative_tokens": 2}']) as server:
        found = evaluate_engine(server.url, PROMPTS, max_new_tokens=9, max_samples=1, name="mine")
        assert (
            found.summary.drafter.eq("mine").all()
            and found.positions.k.eq(2).all()
            and found.summary.iloc[0].requests == 2
        )
        assert found.performance.speedup.isna().all()  # nothing to compare with
        with pytest.raises(ValueError, match="runs already"):
            evaluate_engine(server.url, PROMPTS, dtype="float32")
        with pytest.raises(EndpointError, match="400: too long"):
            evaluate_engine(server.url, PROMPTS, max_new_tokens=501)
    with Server(["vllm", "serve", "m"]) as server:
        found = evaluate_engine(server.url, PROMPTS, max_new_tokens=9)
        assert found.positions.empty and found.summary.empty and found.performance.k.eq(0).all()
        with pytest.raises(ValueError, match="nothing was drafted"):
            found.plot()


def test_a_model_without_a_chat_template_is_asked_in_token_ids(engine, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", "base")
    with Server(["vllm", "serve", "m", "--speculative-config", '{"num_speculative_tokens": 2}']) as server:
        ids = [dict(prompt=[5, 6]), dict(prompt=[7, 8, 9])]
        assert evaluate_engine(server.url, ids, max_new_tokens=9).summary.requests[0] == 2
    with pytest.raises(EndpointError, match="chat template"), Server(["vllm", "serve", "m"]) as server:
        evaluate_engine(server.url, PROMPTS, max_new_tokens=9)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_prompt_that_the_server_does_not_take_is_skipped_and_named(engine, tmp_path, concurrency):
    prompts = [*PROMPTS[:2], dict(prompt="beyond the context", domain="a"), PROMPTS[3]]
    with Server(["vllm", "serve", "m", "--speculative-config", '{"num_speculative_tokens": 2}']) as server:
        found = evaluate_engine(server.url, prompts, max_new_tokens=9, concurrency=concurrency, output_dir=tmp_path)
        without = evaluate_engine(server.url, [*prompts[:2], prompts[3]], max_new_tokens=9, concurrency=concurrency)
    assert found.requests.prompt.tolist() == [0, 1, 3] and found.skipped.prompt.tolist() == [2]
    assert "skipped.csv" in {file.name for file in tmp_path.iterdir()}
    assert "400: too long" in found.skipped.why[0] and EngineEvaluation.read(tmp_path).settings["skipped"]
    assert found.summary.equals(without.summary) and found.positions.equals(without.positions)


@pytest.mark.parametrize(
    "behaviour, error, words, concurrency",
    [
        ("foreign", MetricsError, "somebody else", 1),
        ("foreign", MetricsError, "somebody else", 3),
        ("restart", MetricsError, "started again", 1),
        ("broken", EndpointError, "the engine is dead", 1),
        ("die", EndpointError, r"(GET|POST) http://127.0.0.1:\d+/.*1 try", 1),
        ("broken", EndpointError, "the engine is dead", 3),
    ],
)
def test_what_cannot_be_attributed_is_no_number(engine, monkeypatch, behaviour, error, words, concurrency):
    monkeypatch.setenv("FAKE_ENGINE", behaviour)
    with Server(["vllm", "serve", "m", "--speculative-config", '{"num_speculative_tokens": 2}']) as server:
        endpoint = Endpoint(server.url, tries=1)
        with pytest.raises(error, match=words):
            run_load(endpoint, read_prompts(PROMPTS), concurrency, 12)


def test_counters_that_never_come_are_waited_for_and_given_up(engine):
    with Server(["vllm", "serve", "m"]) as server:
        meter = Meter(Endpoint(server.url, tries=1), patience=0.3)
        with pytest.raises(MetricsError, match="counts 0 finished requests, 1 were answered"):
            meter.stop(1)


def test_a_request_begins_after_the_one_before_is_counted(engine, monkeypatch):
    "else its first steps would be counted for another"
    events, real_ask, real_stop = [], load_module.ask, Meter.stop
    monkeypatch.setattr(load_module, "ask", lambda *a, **k: (events.append("ask"), real_ask(*a, **k))[1])
    monkeypatch.setattr(
        Meter, "stop", lambda *a, **k: (time.sleep(0.05), real_stop(*a, **k), events.append("counted"))[1]
    )
    with Server(["vllm", "serve", "m", "--speculative-config", '{"num_speculative_tokens": 2}']) as server:
        run_load(Endpoint(server.url, tries=1), read_prompts(PROMPTS), 1, 6)
    assert events == ["ask"] + ["ask", "counted"] * 6  # the first is not measured


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_prompt_whose_picture_is_damaged_is_left_out(engine, tmp_path, concurrency):
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    content = [{"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}]
    prompts = [Prompt("a", text="1"), Prompt("a", messages=[dict(role="user", content=content)]), Prompt("a", text="2")]
    with Server(["vllm", "serve", "m"]) as server:
        load = run_load(Endpoint(server.url, tries=1), prompts, concurrency, 6)
    assert load.numbers == [0, 2] and "a.png: no picture in a format that is known" in load.refused[1]


def test_the_clock_of_several_requests_leaves_out_the_reading_of_counters(engine, monkeypatch):
    late, start = [0.0], Meter.start
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0], sleep=time.sleep)
    monkeypatch.setattr(load_module, "time", clock)

    def slow(meter):
        late[0] += 1000
        return start(meter)

    monkeypatch.setattr(Meter, "start", slow)
    with Server(["vllm", "serve", "m"]) as server:
        load = run_load(Endpoint(server.url, tries=1), read_prompts(PROMPTS), 3, 6)
    assert late[0] > 2000 and max(load.seconds.values()) < 1000


def test_one_answer(engine, monkeypatch):
    monkeypatch.setenv("FAKE_PAUSE", "0.05")
    with Server(["vllm", "serve", "m", "--speculative-config", '{"num_speculative_tokens": 3}']) as server:
        endpoint = Endpoint(server.url, tries=1)
        for prompt in (
            Prompt("a", messages=[dict(role="user", content="hi")]),
            Prompt("a", text=[1, 2, 3]),
            Prompt("a", text="hi"),
        ):
            reply = ask(endpoint, "m", prompt, 12)
            pieces = expected(3, 12)[2]
            assert (reply.tokens, reply.pieces, reply.finish_reason) == (12, len(pieces), "length")
            assert reply.token_ids == list(range(12))
            assert reply.first < reply.seconds  # by how much is up to how busy the machine is
            assert reply.between == pytest.approx((reply.seconds - reply.first) / 11)


def test_suffix_decoding_starts_anew_for_every_load(engine):
    "it remembers answers, so a second load of the same prompts would be another measurement"
    found = evaluate_engine(VERIFIER, PROMPTS, k=2, concurrency=[1, 2], max_new_tokens=6, method="suffix")
    assert len(found.settings["commands"]) == 3 and set(found.summary.drafter) == {"suffix"}


def test_a_wrong_setting_is_said_before_any_server_starts(engine, tmp_path):
    with pytest.raises(ValueError, match="load='wrk'"):
        evaluate_engine(VERIFIER, PROMPTS, load="wrk")
    with pytest.raises(ValueError, match="is not known"):
        evaluate_engine(VERIFIER, PROMPTS, k=2, method="magic", output_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="no prompts"):
        evaluate_engine(VERIFIER, [], k=2, method="ngram")
    for name in ("temperatures", "concurrency"):
        with pytest.raises(ValueError, match="1 is there twice; give each value once"):
            evaluate_engine(VERIFIER, PROMPTS, k=2, method="ngram", **{name: [1, 1]})
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------------------------- in process
@given(st.integers(1, 4), st.integers(1, 30), st.data())
def test_steps_are_counted_that_begin_before_the_limit(k, limit, data):
    kept, begins, tokens, steps = [], 1, 1, []
    while tokens < limit + k:
        n = min(data.draw(st.integers(0, k)), limit + k - tokens - 1)
        steps.append(Step(min(k, limit + k - tokens), list(range(k)), n, list(range(n + 1))))
        if begins < limit:
            kept.append(n)
        begins, tokens = begins + n + 1, tokens + n + 1
    row = as_engine_counts(Generation([0], list(range(tokens)), steps, "length"), k, limit)
    by_position = [sum(n >= i for n in kept) for i in range(1, k + 1)]
    assert row.tolist() == [len(kept), len(kept), k * len(kept), sum(kept), *by_position]
    assert all(s.requested == k for s, _ in zip(steps, kept))  # there was room for k everywhere, as in the engine


def test_both_evaluations_have_the_same_columns_and_agree_where_no_limit_is_near(tmp_path):
    from speculators_nb.decode.ngram import NgramDrafter
    from speculators_nb.lab.experiment import heldout_setting

    verifier, prompts, domains, eos = heldout_setting({}, 3)
    there = evaluate(
        verifier, {"n-gram": NgramDrafter()}, prompts, k=2, max_new_tokens=200, eos_token_ids=eos, domains=domains
    )
    here = evaluate_as_engine(
        verifier, {"n-gram": NgramDrafter()}, prompts, k=2, max_new_tokens=200, eos_token_ids=eos, domains=domains
    )
    assert [c for c in here.summary if c not in ("k", "concurrency")] == list(there.summary) and [
        c for c in here.positions if c not in ("k", "concurrency")
    ] == list(there.positions)
    assert here.positions[list(there.positions)].equals(there.positions)  # every answer ended by itself
    merged = (
        here.summary.set_index("domain")
        .loc[there.summary.domain, list(there.summary.columns.drop("domain"))]
        .reset_index(drop=True)
    )
    assert merged.astype(object).equals(there.summary.drop(columns="domain").astype(object))
    both = compare_runs({"a": there, "b": here.save(tmp_path / "run")})
    assert not (tmp_path / "run/speed.png").exists()  # nothing was timed
    assert both.table().groupby("run").size().tolist() == [1, 1] and set(both.summary.k) == {2}
    saved = {"a": there.save(tmp_path / "a"), "b": there.save(tmp_path / "b")}
    own = compare_runs(saved).table()  # folders of in-process evaluations
    assert own.mean_length.tolist() == both.table().mean_length.tolist()
    assert own.difference.isna().tolist() == [True, False] and own.difference_high[1] == 0
    others = evaluate(verifier, {"n-gram": NgramDrafter()}, prompts[::-1], k=2, max_new_tokens=200, eos_token_ids=eos)
    assert "difference" not in compare_runs({"a": there, "b": others}).table()  # other prompts of the same numbers
    with pytest.raises(ValueError, match="counts otherwise than an engine"):
        compare_runs(saved | {"c": tmp_path / "run"})
    with pytest.raises(ValueError, match="runs is empty"):
        compare_runs({})


def test_names_of_a_saved_run_stay_text(tmp_path):
    from speculators_nb.decode.ngram import NgramDrafter
    from speculators_nb.lab.experiment import heldout_setting

    verifier, prompts, *_ = heldout_setting({}, 2)
    run = evaluate(verifier, {"1": NgramDrafter()}, prompts, max_new_tokens=16, domains=["NA", "2"])
    both = compare_runs({"a": run.save(tmp_path / "a"), "b": run.save(tmp_path / "b")})
    assert both.summary.domain.tolist() == ["all", "2", "NA"] * 2
    assert both.plot().legends[0].get_texts()[0].get_text() == "a: 1" and both.table().difference[1] == 0
    for words, drafters, domains in (("drafters is empty", {}, None), ("1 domains", {"1": NgramDrafter()}, ["a"])):
        with pytest.raises(ValueError, match=words):
            evaluate_as_engine(verifier, drafters, prompts, domains=domains)


# ------------------------------------------------------------------------------------------------------------- GuideLLM
def test_prompts_of_files_keep_order_and_domain(tmp_path):
    prompts = read_prompts(HELDOUT, 2)
    assert len(prompts) == 12 and len({p.domain for p in prompts}) == 6 and prompts[0].messages[-1]["role"] == "user"
    assert [p.domain for p in read_prompts({"x": [dict(prompt="a")], "y": [dict(prompt=[1, 2])]})] == ["x", "y"]
    mixed = [dict(prompt="a"), dict(prompt="b", domain="x")]  # "all" is what all of them are together
    assert [p.domain for p in read_prompts(mixed)] == ["other", "x"]
    with pytest.raises(ValueError, match="row 1"):
        read_prompts([dict(messages=[dict(role="assistant", content="hi")])])


def test_guidellm_report(tmp_path):
    "A request that failed, or was not sent, is no number."
    report = json.loads((HERE / "fixtures/guidellm_report.json").read_text())
    requests = report["benchmarks"][0]["requests"]
    tokens = [r["output_tokens"] for r in requests["successful"]]
    assert [r.tokens for r in replies_of(report["benchmarks"][0])] == tokens
    failed = requests | dict(errored=requests["successful"][:1], successful=requests["successful"][1:])
    texts = {
        "5 requests were to be sent, 4 were answered, 0 have failed": json.dumps(report),
        "3 were answered, 1 have failed": json.dumps({"benchmarks": [{"requests": failed}]}),
        "no benchmarks": "{}",
        "cut off": '{"bench',
    }
    for words, text in texts.items():
        (tmp_path / "r.json").write_text(text)
        with pytest.raises((ValueError, RuntimeError), match=words):
            run_guidellm(["true"], tmp_path / "r.json", 5)


@pytest.mark.statement("release-38")
def test_guidellm_as_the_load(engine, tmp_path, monkeypatch):
    "a program that reads the prompts as GuideLLM does, asks the server, and leaves the recorded report"
    program = tmp_path / "bin/guidellm"
    program.write_text(f"""#!{sys.executable}
import json, sys, urllib.request
of = dict(zip(sys.argv[1:], sys.argv[2:]))
backend, data, out = (json.loads(of[name]) for name in ("--backend", "--data", "--output"))
report = json.load(open({str(HERE / "fixtures/guidellm_report.json")!r}))
for line in open(data["path"]):
    body = dict(json.loads(line), max_tokens=backend["max_tokens"], **backend["extras"]["body"])
    asked = urllib.request.Request(backend["target"] + "/v1/chat/completions", json.dumps(body).encode())
    urllib.request.urlopen(asked).read()
json.dump(report, open(out["path"], "w"))
""")
    program.chmod(0o755)
    monkeypatch.setenv("SPECULATORS_NB_GUIDELLM", str(program))
    found = evaluate_engine(VERIFIER, PROMPTS, k=2, concurrency=2, max_new_tokens=8, load="guidellm", method="ngram")
    steps, accepted, _ = expected(2, 8)
    np.testing.assert_allclose(found.positions.unconditional, np.array(accepted) / steps)
    assert found.performance[(found.performance.k == 2) & (found.performance.domain == "a")].requests.item() == 4
    assert found.requests.prompt.isna().all()  # GuideLLM does not say which prompt was answered
    with pytest.raises(ValueError, match="token ids, tools and pictures cannot"):
        evaluate_engine(VERIFIER, [dict(prompt=[5, 6])], k=2, load="guidellm", method="ngram")
    program.write_text("#!/bin/sh\necho no tokenizer here >&2; exit 3\n")
    with pytest.raises(RuntimeError, match="code 3:\nno tokenizer here"):
        evaluate_engine(VERIFIER, PROMPTS, k=2, load="guidellm", method="ngram", baseline=False)
