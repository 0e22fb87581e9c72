"""SpeculativeConfig against the record of vLLM's own class, and on our decoder. The record is made by
tests/vllm/check_speculative_config.py."""

import copy
import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_verifier import small_verifier

from speculators_nb.decode import acceptance_rules as accept
from speculators_nb.decode.draft_model import DraftModel
from speculators_nb.decode.generate import HiddenStates, NoDrafter, generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.decode.suffix import SuffixDrafter
from speculators_nb.decode.tree import Sampling, TokenTree
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.serve.speculative_config import (
    SpeculativeConfig,
    length_to_rates,
    parse_token_tree,
    speculate,
)
from speculators_nb.serve.vllm_methods import (
    DOCUMENTED_SAMPLING,
    ENGINES,
    METHODS,
    MTP_FAMILIES,
    Engine,
    method_of_types,
    mtp_head,
    served_architecture,
)
from speculators_nb.verifier.tapped_model import Verifier

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/vllm"))
import check_speculative_config as vllm  # noqa: E402  (needs no vLLM to be imported)
from speculative_dictionaries import CASES, LLAMA, MODELS, OMNI_WRONG, ROWS, explained, mtp_config, place, rows_of  # noqa: E402

RECORDS = {version: json.loads(file.read_text()) for version, file in vllm.RECORDS.items()}
DRAWN = [(version, i) for version, record in RECORDS.items() for i in range(len(record["drawn"]))]
NGRAM = dict(method="ngram", num_speculative_tokens=3)
PAGE = (ROOT / "nbs/serve/01_speculative_config.ipynb").read_text()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "m"
    vllm.write_models(folder)
    return folder


def ours(models, case, engine_version=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vllm.ours(case, models, engine_version)


@pytest.fixture(scope="module")
def answers(models):
    "Ours to every recorded dictionary: version -> [(dictionary, vLLM's answer, ours)]."
    pairs = {
        version: [(CASES[name], said) for name, said in record["cases"].items()]
        + [(row["case"], row["said"]) for row in record["drawn"]]
        for version, record in RECORDS.items()
    }
    found = {version: [] for version in pairs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for version, of_version in pairs.items():
            for case, said in of_version:
                mine = json.loads(json.dumps(vllm.our_answer(case, models, version)))
                found[version].append((case, said, mine))
    return found


@pytest.mark.parametrize("version", RECORDS)
def test_the_record_is_of_these_cases(version):
    record = RECORDS[version]
    assert record["version"].startswith(version)
    assert set(record["cases"]) == set(CASES), "record it again"
    assert set(record["mtp"]) == {w for f in MTP_FAMILIES for w in f.words}, "record it again"
    assert len(CASES) >= 200 and len(record["drawn"]) == 300
    accepted = [said["accepted"] for said in record["cases"].values()]
    assert 60 < sum(accepted) < len(accepted) - 60
    accepted = [row["said"]["accepted"] for row in record["drawn"]]
    assert 60 < sum(accepted) < 240


@pytest.mark.statement("vllm-05", "vllm-07", "vllm-18", "vllm-51", "vllm-58", "vllm-64", "vllm-65", "vllm-66")
@pytest.mark.statement("vllm-71", "vllm-72", "vllm-76", "vllm-86", "vllm-87", "vllm-88")
@pytest.mark.parametrize("version", RECORDS)
@pytest.mark.parametrize("name", CASES)
def test_decides_and_resolves_as_vllm_does(answers, name, version):
    _, said, mine = answers[version][list(RECORDS[version]["cases"]).index(name)]
    how = vllm.disagreement(CASES[name], said, mine)
    assert how is None or explained(CASES[name], how), (how, said, mine)
    if not mine["accepted"]:
        words = [w for w in re.split(r"\W+", mine["error"]) if w in SpeculativeConfig.model_fields or w in CASES[name]]
        assert words and "pydantic.dev" not in mine["error"], f"the message names no field: {mine['error']}"


@pytest.mark.parametrize("version,i", DRAWN)
def test_drawn_ones_too(answers, version, i):
    case, said, mine = answers[version][len(CASES) + i]
    how = vllm.disagreement(case, said, mine)
    assert how is None or explained(case, how), (case, how, said, mine)


@pytest.mark.parametrize("version", RECORDS)
def test_the_table_explains_little(answers, version):
    "Of the drawn dictionaries 19 of 20 have the same answer, value by value, and of all of them as many."
    differ = [bool(vllm.disagreement(*row)) for row in answers[version]]
    assert sum(differ[len(CASES) :]) <= 300 / 20
    assert sum(differ) <= len(differ) / 20


@pytest.mark.parametrize("title", ROWS)
def test_every_difference_is_real_and_on_the_page(answers, title):
    "Each row of the table explains a dictionary that no other row explains, by each of its conditions."
    assert len(ROWS) + 1 <= 7 and f"| {title} |" in PAGE
    both = [row for rows in answers.values() for row in rows]
    for how, applies in ROWS[title]:
        of_this = [row for row in both if applies(row[0]) and rows_of(row[0]) == [title]]
        assert how in [vllm.disagreement(*row) for row in of_this], applies.__name__


CONDITIONS = [pytest.param(*part, id=part[1].__name__) for parts in ROWS.values() for part in parts]


@pytest.mark.parametrize("how,applies", CONDITIONS)
def test_a_condition_holds_for_no_dictionary_with_the_same_answer(answers, how, applies):
    "A condition that is too wide would hide faults: where it holds and one of the classes accepts, the two differ."
    for case, said, mine in (row for rows in answers.values() for row in rows):
        if applies(case) and (said["accepted"] or mine["accepted"]):
            found = vllm.disagreement(case, said, mine)
            assert found == how or (found is not None and explained(case, found)), (case, said, mine)


def test_the_page_has_no_other_differences():
    table = PAGE[PAGE.index("| where | what ours does | why |") :]
    rows = re.findall(r'"\| ([^|]+) \|', table[: table.index("\n   ]")])
    assert rows[1:] == [*ROWS, HASH]


HASH = "the hash"


@pytest.mark.parametrize("version", RECORDS)
def test_configs_that_share_vllms_graph_share_ours(answers, version):
    "vLLM counts the draft's own graph as well: ours is coarser, and never tells apart what vLLM does not."
    ours_of = {}
    for _, said, mine in answers[version]:
        if said["accepted"] and mine["accepted"] and said["values"] == mine["values"]:
            ours_of.setdefault(said["hash"], set()).add(mine["hash"])
    assert len(ours_of) > 20 and {len(found) for found in ours_of.values()} == {1}
    assert 3 <= len({h for found in ours_of.values() for h in found}) < len(ours_of)


def pair(config):
    "(verification, draft, rates): strict is standard on an argmax draft"
    return (
        DOCUMENTED_SAMPLING.get(config.rejection_sample_method, (config.rejection_sample_method,))[0],
        config.draft_sample_method,
        config.synthetic_acceptance_rates,
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_json_says_the_same_when_read_back(models, engine):
    read_back = 0
    for name, case in CASES.items():
        try:
            config = ours(models, case)
            text = config.to_json(engine)
        except ValueError as e:
            assert "NaN" not in str(e)
            continue
        _, target, devices = place(case, models)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = SpeculativeConfig(
                **json.loads(text),
                target_model_config=target,
                target_parallel_config=dict(tensor_parallel_size=devices),
            )
        assert again.to_json(engine) == text and pair(again) == pair(config), name
        assert again.compute_hash() == config.compute_hash(), name
        assert {"strict", "probabilistic"}.isdisjoint(
            [json.loads(text).get("rejection_sample_method")]
        ) or engine == "documented"
        assert engine != "documented" or "draft_sample_method" not in json.loads(text)
        read_back += 1
    assert read_back > 60


@pytest.mark.parametrize("name", ["block, drawn", "block drop", "dspark", "custom class by its method"])
def test_what_the_documented_line_has_no_word_for(models, name):
    with pytest.raises(ValueError, match="no equivalent|not of the documented line|is not served by the documented"):
        ours(models, CASES[name]).to_json("documented")


@pytest.mark.parametrize(
    "name", ["fly", "xpress", "quantized head", "hashes without lookahead", "medusa", "medusa, found"]
)
def test_one_line_has_what_the_other_has_not(models, name):
    "Without a version, whatever some line has; the JSON for a line is held to its rules."
    case = CASES["medusa by config" if name == "medusa, found" else name]
    has, lacks = ("0.32", "0.33") if "medusa" in name else ("0.33", "0.32")
    config = ours(models, case)
    assert json.loads(config.to_json(has)) and ours(models, case, has).to_json() == config.to_json(has)
    for refused in (lambda: config.to_json(lacks), lambda: ours(models, case, lacks)):
        with pytest.raises(ValueError, match=f"vLLM {lacks}"):
            refused()


def test_the_fields_of_fly(models):
    "Token 1 in doubt, then 0 twice: a window of 2 is the default of a draft of 3."
    tree, likeliest = TokenTree.chain([1, 0, 0]), torch.eye(3)[[0] * 4]
    raw = torch.tensor([[0.5, 0.3, 0.2], *[[0.9, 0.05, 0.05]] * 3])
    for fields, kept in (
        ({}, 3),
        (dict(fly_window_size=1), 3),
        (dict(fly_entropy_threshold=1.1), 0),
        (dict(fly_entropy_threshold=0.8, fly_entropy_top_k=2), 0),
    ):
        config = SpeculativeConfig(**NGRAM, rejection_sample_method="fly", **fields)
        assert not config.rule().lossless
        assert len(config.rule().decide(tree, likeliest, None, raw)[0]) == kept
    with pytest.warns(UserWarning, match="fly_window_size=2 has no effect without"):
        SpeculativeConfig(**NGRAM, fly_window_size=2)
    with pytest.warns(UserWarning, match="kv_cache_dtype='fp7' is unknown to vLLM 0.33, unless the platform has it"):
        SpeculativeConfig(**NGRAM, kv_cache_dtype="fp7")


def test_an_xpress_draft_has_one_length(models):
    with pytest.raises(ValueError, match="num_speculative_tokens=2 must be 3: vLLM reads the mixture"):
        ours(models, CASES["xpress, two tokens"], "0.33")
    with pytest.raises(ValueError, match="a Qwen3XPressModel, which vLLM 0.32 does not have; vLLM 0.33 has"):
        ours(models, CASES["xpress"], "0.32")


@pytest.mark.parametrize("version", RECORDS)
def test_words_of_fields_are_vllms(version):
    from speculators_nb.serve import vllm_methods

    words, engine = RECORDS[version]["words"], ENGINES[version]
    assert sorted(vllm_methods.LOAD_FIELDS) == words["LOAD_FIELDS"]
    assert sorted(vllm_methods.QUANTIZATIONS) == words["QUANTIZATIONS"]
    for field in engine.backends:
        assert sorted(engine.backends[field]) == words[f"{field.upper()}S"]
    served = {name for names in engine.architectures.values() for name in names}
    kinds = {name for name in words["drafts"] if re.search("^Eagle|Eagle3$|^DFlash|^LiLi", name)}
    assert kinds == served
    assert all(name in words["drafts"] for name in engine.found_by_architecture if "Glimmer" not in name)


def test_a_line_differs_where_its_table_says():
    "What 0.33 has changed, in one place: every field of its row that is not 0.32's."
    old, new = ENGINES["0.32"], ENGINES["0.33"]
    changed = {name for name in Engine.__dataclass_fields__ if getattr(old, name) != getattr(new, name)}
    assert changed == Engine.__dataclass_fields__.keys() - {"defaults", "aux_families"}
    assert old.served - new.served == {"medusa"} and not new.served - old.served


@pytest.mark.statement("vllm-36", "vllm-37", "vllm-38", "vllm-39", "vllm-40", "vllm-41", "vllm-42", "vllm-43")
@pytest.mark.statement("vllm-44", "vllm-45", "vllm-46", "vllm-47", "vllm-48", "vllm-50")
@pytest.mark.parametrize("version", RECORDS)
@pytest.mark.parametrize("word", RECORDS["0.33"]["mtp"])
def test_mtp_table_is_vllms(word, version):
    said, found = RECORDS[version]["mtp"][word], mtp_head(mtp_config(word), version)
    assert (found and list(found)) == said and mtp_head(mtp_config(word))  # another line has it
    if said is not None:
        assert mtp_head(dict(model_type=said[0]), version)[0] == said[0]  # a head's own config


def test_words_of_the_lines():
    drawn = SpeculativeConfig(
        model="org/small", method="draft_model", num_speculative_tokens=2, rejection_sample_method="probabilistic"
    )
    assert json.loads(drawn.to_json()) == dict(
        model="org/small", method="draft_model", num_speculative_tokens=2, draft_sample_method="probabilistic"
    )
    assert json.loads(drawn.to_json("documented"))["rejection_sample_method"] == "probabilistic"
    assert json.loads(SpeculativeConfig(**NGRAM).to_json()).keys() == {
        "method",
        "num_speculative_tokens",
        "prompt_lookup_min",
        "prompt_lookup_max",
    }
    with pytest.raises(ValueError, match="engine_version='0.1' is unknown; write one of documented, 0.32, 0.33"):
        drawn.to_json("0.1")
    for method, engine in (("dspark", "documented"), ("mlp_speculator", "0.32"), ("medusa", "0.33")):
        with pytest.raises(ValueError, match=f"method='{method}' is not served by .*{engine}"):
            SpeculativeConfig(method=method, model="org/x", num_speculative_tokens=3).to_json(engine)


def test_a_checkpoint_of_ours_says_what_it_is(models):
    raw = MODELS["trained-eagle3"] | dict(speculators_model_type="peagle")
    (models / "EAGLE-neutral").mkdir(exist_ok=True)
    (models / "EAGLE-neutral/config.json").write_text(json.dumps(raw))
    # vLLM would go by the name, and take it for an EAGLE-1
    config = SpeculativeConfig(model=str(models / "EAGLE-neutral"))
    assert (config.method, config.parallel_drafting) == ("eagle3", True)
    assert (config.num_speculative_tokens, config.max_num_new_slots_for_drafting) == (3, 2)
    with pytest.raises(ValueError, match="method='medusa' does not fit"):
        SpeculativeConfig(model=str(models / "EAGLE-neutral"), method="medusa")


def test_every_type_of_ours_is_served_as_something(tmp_path):
    "One that is served by nothing is refused."
    registered, served = SpeculatorModel.registered_classes(), method_of_types()
    assert len(served) > 8 and {method for method, _ in served.values()} <= METHODS.keys()
    for kind in registered.keys() - served:
        assert any("does not serve" in line for line in SpeculatorModel.registered_class(kind).serving_violations({}))
        (tmp_path / "config.json").write_text(json.dumps(dict(speculators_model_type=kind)))
        with pytest.raises(ValueError, match=f"speculators_model_type='{kind}', which vLLM does not serve"):
            SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=2)


def test_an_mlp_speculator_of_ours(tmp_path):
    "Its type is `mlp`: recognised, run by our decoder, and refused for vLLM with the reason that it has no such model."
    from speculators_nb.serve.serve_command import serve_command
    from speculators_nb.train.train_drafter import new_drafter

    home = ROOT / "data/tiny-verifier"
    new_drafter("mlp", home, num_heads=2).save_pretrained(tmp_path / "heads")
    config = SpeculativeConfig(model=str(tmp_path / "heads"))
    assert (config.method, config.num_speculative_tokens, config.parallel_drafting) == ("mlp_speculator", 2, False)
    target, prompt = Verifier.from_pretrained(str(home), [6]), torch.tensor([5, 6, 7, 8])
    done = speculate(target, dict(model=str(tmp_path / "heads")), prompt, max_new_tokens=9)
    assert (
        done.tokens == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=9).tokens
        and max(len(s.draft) for s in done.steps) == 2
    )
    with pytest.raises(ValueError, match="vLLM cannot serve it as it is.*vLLM 0.32 does not serve method='mlp_spec"):
        serve_command(tmp_path / "heads", engine_version="0.32")
    with pytest.raises(ValueError, match="method='mlp_speculator' is not served by vLLM 0.32; it is by the documented"):
        config.to_json("0.32")
    with pytest.raises(ValueError, match="method='medusa' does not fit .*served as 'mlp_speculator'"):
        SpeculativeConfig(model=str(tmp_path / "heads"), method="medusa")


def test_a_path_that_vllm_reads_otherwise(models):
    with pytest.warns(UserWarning, match="vLLM reads 'eagle3' out of this path and does not use method='draft_model'"):
        config = SpeculativeConfig(model=str(models / "small_eagle3"), method="draft_model", num_speculative_tokens=3)
    assert config.method == "eagle3"
    assert SpeculativeConfig(model="eagle3-runs/small", num_speculative_tokens=3).method == "eagle3"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpeculativeConfig(model=str(models / "small_eagle3"), num_speculative_tokens=3)
        SpeculativeConfig(model=str(models / "small"), num_speculative_tokens=3)


def test_a_head_in_the_target_is_not_named(models):
    config = SpeculativeConfig(method="mtp", target_model_config=models / "mimo")
    assert config.model == str(models / "mimo") and json.loads(config.to_json()) == dict(
        method="mtp", num_speculative_tokens=1
    )


@pytest.mark.statement("vllm-34", "vllm-35")
def test_mellum_drafts_by_the_transformers_back_end():
    "vLLM 0.33 has no class for its head; its own SpeculativeConfig answers so with transformers 5.20.2."
    target = dict(model_type="mellum", architectures=["MellumForCausalLM"], num_nextn_predict_layers=1, vocab_size=60)
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=2, target_model_config=target)
    assert config.method == "mtp" and config._draft["n_predict"] == 1
    with pytest.raises(NotImplementedError, match="needs a head that predicts further tokens"):
        SpeculativeConfig(method="mtp", num_speculative_tokens=2, target_model_config=target, engine_version="0.32")


def test_hash_is_of_what_the_target_hands_out():
    def of(ids):
        return SpeculativeConfig(
            method="extract_hidden_states",
            num_speculative_tokens=1,
            draft_model_config=dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=ids)),
        ).compute_hash()

    plain = SpeculativeConfig(**NGRAM).compute_hash()
    assert (
        plain
        == SpeculativeConfig(**NGRAM | dict(num_speculative_tokens=7)).compute_hash()
        == SpeculativeConfig(method="medusa", model="x", num_speculative_tokens=3).compute_hash()
    )
    inner = SpeculativeConfig(method="eagle3", model="x", num_speculative_tokens=3).compute_hash()
    assert len({plain, inner, of([1, 3]), of([1, 4])}) == 4 and of([1, 3]) == of([1, 3])


@given(st.integers(1, 12), st.floats(0, 1))
@settings(deadline=None)
def test_length_schedule(n, share):
    length = 1 + share * n
    rates = length_to_rates(length, n)
    assert len(rates) == n and abs(sum(rates) - (length - 1)) < 1e-9
    # two neighbouring lengths only
    assert all(1 >= a >= b >= 0 for a, b in zip(rates, [*rates[1:], 0])) and sum(0 < r < 1 for r in rates) <= 1


paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8)


@pytest.mark.statement("vllm-16", "vllm-78")
@given(paths, st.randoms())
@settings(deadline=None)
def test_token_tree_any_order(leaves, random):
    tree = list({p[:i] for p in leaves for i in range(1, len(p) + 1)})
    random.shuffle(tree)
    parsed = parse_token_tree(str(tree))
    assert (
        parsed == parse_token_tree(tree)
        and set(parsed) == set(tree)
        and [len(p) for p in parsed] == sorted(map(len, tree))
    )
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=len(tree), speculative_token_tree=str(tree))
    assert config.is_chain == (len(tree) == max(map(len, tree)) and all(set(p) == {0} for p in tree))


@pytest.mark.parametrize(
    "text", ["", "[", "()", "{}", "[()]", "[(0)]", "[(0,), (0,)]", "[(0, 0)]", "[(0.5,)]", "[(True,)]"]
)
def test_token_tree_malformed(text):
    with pytest.raises(ValueError, match="speculative_token_tree"):
        parse_token_tree(text)


@pytest.mark.parametrize(
    "rates, message",
    [
        (
            [0.8, 0.4],
            r"synthetic_acceptance_rates=\[0.8, 0.4\] must have one rate for each of num_speculative_tokens=3",
        ),
        ([0.8, 0.4, 0.2, 0.1], "must have one rate for each of num_speculative_tokens=3"),
        ([], "must have one rate for each"),
        ([1.1, 0.4, 0.2], "must lie in"),
        ([0.5, 0.2, -0.1], "must lie in"),
    ],
)
def test_bad_rates_are_named(rates, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**NGRAM, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates)


EIGHT = dict(tensor_parallel_size=8)
LONGROPE = dict(rope_scaling=dict(rope_type="longrope"), original_max_position_embeddings=256)
XPRESS = LLAMA | dict(architectures=["Qwen3XPressModel"], xpress_block_size=16)
FP8 = LLAMA | dict(quantization_config=dict(quant_method="fp8"))
SPARKS = LLAMA | dict(model_type="qwen3", architectures=["Qwen3DSparkModel"])
WHOLE = dict(model_type="llava", architectures=["LlavaForConditionalGeneration"], text_config=LLAMA)
REFUSED = [  # the draft's config.json (None: on no machine of ours), fields, what must be answered
    (
        None,
        dict(kv_cache_dtype="fp7", engine_version="0.32"),
        "kv_cache_dtype='fp7' is unknown to vLLM 0.32; did you mean",
    ),
    (None, dict(attention_backend="flash_atn"), "attention_backend='FLASH_ATN' is unknown .* did you mean FLASH_ATTN?"),
    (None, dict(draft_load_config=dict(load_fromat="dummy")), "load_fromat is no field of it; choose from device"),
    (None, dict(method="eagle3", model=None), "model=None and method='eagle3': give the draft's folder or hub id"),
    (
        None,
        dict(method="eagle3", dspark_draft_topk=20),
        "dspark_draft_topk=20 is for method='dspark', this is 'eagle3'",
    ),
    (None, dict(method="eagle3", xpress_topc=9), "xpress_topc=9 is for an XPress draft, and org/draft is none"),
    (None, dict(rejection_sample_method="fly", fly_window_size=3), "fly_window_size=3 must be smaller than num_spec"),
    (
        None,
        dict(method="eagle3", engine_version="documented", target_model_config=dict(model_type="phi3")),
        "one of llama",
    ),
    (LLAMA, dict(max_model_len=1025), "max_model_len=1025 is longer than the draft's 1024"),
    (LLAMA | LONGROPE, dict(max_model_len=257), "max_model_len=257 is longer than the draft's 256"),
    (LLAMA, dict(target_parallel_config=EIGHT), "draft_tensor_parallel_size=8: the draft has 4 attention heads"),
    (LLAMA, dict(target_parallel_config=EIGHT, draft_tensor_parallel_size=2), "=2 must be 1 or the target's 8"),
    (
        LLAMA,
        dict(target_model_config=LLAMA | dict(vocab_size=1000)),
        "has vocab_size 2048, the target 1000: their token",
    ),
    (LLAMA, dict(quantization="fp7"), "quantization='fp7' is no quantization of vLLM; choose from auto_awq"),
    (FP8, dict(quantization="awq"), "quantization='awq' contradicts the draft's config.json, which has 'fp8'"),
    (
        LLAMA | dict(model_type="phi3", architectures=["Phi3ForCausalLM"]),
        dict(method="eagle3"),
        "as Eagle3Phi3ForCausalLM",
    ),
    (WHOLE, dict(method="eagle3"), "is a whole multimodal model, and no draft for method='eagle3'; give a draft"),
    (dict(hidden_size=8), {}, "has a config.json without model_type, .* or write method='medusa' if"),
    (LLAMA, dict(use_heterogeneous_vocab=True, draft_sample_method="probabilistic"), "matches single tokens, so they"),
    (
        LLAMA,
        dict(use_local_argmax_reduction=True, enable_adaptive_verification=True),
        "verification=True needs all logits",
    ),
    (SPARKS, dict(dspark_draft_topk=2049), "dspark_draft_topk=2049 is more than the draft's 2048 tokens; lower it"),
    (
        XPRESS,
        dict(method="dflash", num_speculative_tokens=15, xpress_topc=2049),
        "lie between 0 and the draft's 2048 tok",
    ),
    (XPRESS, dict(method="dflash", num_speculative_tokens=7), "num_speculative_tokens=7 must be 15: vLLM reads"),
]


@pytest.mark.parametrize("draft,fields,message", REFUSED, ids=[row[-1][:40] for row in REFUSED])
def test_what_is_refused_is_named(tmp_path, draft, fields, message):
    "Field, value and remedy, in one line; all else of the dictionary is right."
    if draft is not None:
        (tmp_path / "config.json").write_text(json.dumps(draft))
    right = dict(model=str(tmp_path) if draft else "org/draft", num_speculative_tokens=3)
    with pytest.raises(ValueError, match=message) as refused:
        SpeculativeConfig(**(right | fields))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("where", [dict, lambda stored: dict(text_config=LLAMA | stored)])
def test_a_draft_in_its_target_is_quantised_as_that(where):
    "By its config.json, its text part included; a word of the same layout may be given, and no other."
    target = LLAMA | dict(model_type="deepseek_v3", num_nextn_predict_layers=1)
    stored = target | where(dict(quantization_config=dict(quant_method="fp8")))
    given = dict(method="mtp", num_speculative_tokens=1)
    assert SpeculativeConfig(**given, target_model_config=target).quantization is None
    assert SpeculativeConfig(**given, target_model_config=target, quantization="fp8").quantization == "fp8"
    assert SpeculativeConfig(**given, target_model_config=stored).quantization == "fp8"
    assert SpeculativeConfig(**given, target_model_config=stored, quantization="humming").quantization == "humming"
    with pytest.raises(ValueError, match="quantization='awq' contradicts the draft's config.json, which has 'fp8'"):
        SpeculativeConfig(**given, target_model_config=stored, quantization="awq")


def test_drafting_beyond_the_trained_depth(tmp_path):
    """A head that predicts two tokens drafts two, or a multiple; heads drafted beyond their number propose what they
    have, and say so."""
    from speculators_nb.train.train_drafter import new_drafter

    (tmp_path / "mlp").mkdir()
    (tmp_path / "mlp/config.json").write_text('{"model_type": "mlp_speculator", "n_predict": 2}')
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens=3 must be at most the 2 tokens that the draft predicts"
    ):
        SpeculativeConfig(model=str(tmp_path / "mlp"), num_speculative_tokens=3)
    home = ROOT / "data/tiny-verifier"
    new_drafter("medusa", home, num_heads=2).save_pretrained(tmp_path / "heads")
    target, prompt = Verifier.from_pretrained(str(home), [6]), torch.tensor([5, 6, 7, 8])
    with pytest.warns(UserWarning, match="k=5 drafts more than the 2 tokens"):
        done = speculate(
            target, dict(model=str(tmp_path / "heads"), num_speculative_tokens=5), prompt, max_new_tokens=9
        )
    assert (
        done.tokens == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=9).tokens
        and max(len(s.draft) for s in done.steps) == 2
    )


def test_token_tree_size_and_use():
    with pytest.raises(ValueError, match="has branches, and method='ngram' drafts chains"):
        SpeculativeConfig(**NGRAM, speculative_token_tree="[(0,), (1,), (0, 0)]").drafter(None)
    with pytest.raises(ValueError, match="has branches, and rejection_sample_method='block'"):
        SpeculativeConfig(
            **NGRAM, speculative_token_tree="[(0,), (1,), (0, 0)]", rejection_sample_method="block"
        ).rule()


@pytest.mark.parametrize("word", ["strict", "probabilistic"])
def test_a_tree_by_config(verifier, tmp_path, word):
    """The verifier's own copy drafts it: greedily the likeliest words, under "probabilistic" with drawn siblings that
    carry their laws. The text is the verifier's."""
    verifier.model.save_pretrained(tmp_path / "same")
    config = SpeculativeConfig(
        model=str(tmp_path / "same"),
        num_speculative_tokens=5,
        speculative_token_tree="[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]",
        rejection_sample_method=word,
    )
    assert config.depth == 3
    drafter, tokens = config.drafter(verifier), torch.tensor([1, 2, 3])
    for temperature in (0.0, 1.0):
        tree = drafter.propose(tokens, None, 3, Sampling(temperature, torch.Generator().manual_seed(0)))
        assert tree.parents.tolist() == [-1, -1, 0, 1, 2] and (tree.probs is not None) == (
            word == "probabilistic" and temperature > 0
        )
    done = speculate(verifier, config, [[1, 2, 3], [4]], max_new_tokens=30)
    plain = generate(verifier, NoDrafter(), [[1, 2, 3], [4]], k=0, max_new_tokens=30)
    assert [g.tokens for g in done] == [g.tokens for g in plain] and all(
        s.accepted == min(3, s.requested) for g in done for s in g.steps
    )


def test_a_draft_in_the_engines_own_format(tmp_path):
    from speculators_nb.models.convert import export_native
    from speculators_nb.train.train_drafter import new_drafter

    home = ROOT / "data/tiny-verifier"
    new_drafter("medusa", home).save_pretrained(tmp_path / "heads")
    export_native(tmp_path / "heads", tmp_path / "native", "medusa")
    config = SpeculativeConfig(model=str(tmp_path / "native"), num_speculative_tokens=5, target_model_config=home)
    assert config.method == "medusa"
    target, prompt = Verifier.from_pretrained(str(home), [6]), torch.tensor([5, 6, 7, 8])
    tokens, states = torch.tensor([5, 6, 7, 8]), torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    ours = SpeculativeConfig(model=str(tmp_path / "heads"), target_model_config=home).drafter(target)
    assert torch.equal(
        config.drafter(target).propose(tokens, states, 5, Sampling()).tokens,
        ours.propose(tokens, states, 5, Sampling()).tokens,
    )
    assert (
        speculate(target, config, prompt, max_new_tokens=8).tokens
        == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=8).tokens
    )


@pytest.mark.statement("vllm-63")
def test_hidden_states_are_handed_out(verifier):
    config = SpeculativeConfig(
        method="extract_hidden_states",
        num_speculative_tokens=1,
        draft_model_config=dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=[1])),
    )
    tapped = Verifier(verifier.model, [0, 1])
    assert config.drafter(tapped).aux_layer_ids == (1,)
    prompts = [[1, 2, 3], [4], [5, 6]]
    for limit in (1, 6):
        for g in speculate(tapped, config, prompts, max_new_tokens=limit):
            text = torch.tensor([[*g.prompt, *g.tokens[:-1]]])
            torch.testing.assert_close(g.hidden_states, tapped(text).hidden_states[0, :, 32:], rtol=1e-4, atol=1e-5)
    plain = speculate(tapped, NGRAM, prompts, max_new_tokens=6)
    assert all(g.hidden_states is None for g in plain)
    with pytest.raises(ValueError, match=r"reads layers \[5\], the verifier taps \[0, 1\]"):
        speculate(
            tapped,
            dict(
                method="extract_hidden_states",
                num_speculative_tokens=1,
                draft_model_config=dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=[5])),
                target_model_config=None,
            ),
            prompts,
        )


@pytest.fixture(scope="module")
def verifier():
    return small_verifier(
        [0], vocab_size=20, hidden_size=32, intermediate_size=32, num_hidden_layers=1, max_position_embeddings=512
    )


def test_drafters(verifier, tmp_path):
    n = SpeculativeConfig(**NGRAM, prompt_lookup_min=2, prompt_lookup_max=4).drafter(verifier)
    assert isinstance(n, NgramDrafter) and (n.min_n, n.max_n) == (2, 4)
    s = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=4,
        suffix_decoding_max_tree_depth=9,
        suffix_decoding_max_cached_requests=5,
        suffix_decoding_max_spec_factor=2,
        suffix_decoding_min_token_prob=0.3,
    ).drafter(verifier)
    assert isinstance(s, SuffixDrafter) and (s.answers.depth, s.max_requests, s.factor, s.min_prob) == (9, 5, 2, 0.3)
    assert isinstance(
        SpeculativeConfig(method="extract_hidden_states", num_speculative_tokens=1).drafter(verifier), HiddenStates
    )
    verifier.model.save_pretrained(tmp_path / "same")
    draft = dict(model=str(tmp_path / "same"), num_speculative_tokens=3)
    sampling = Sampling(1.0, torch.Generator().manual_seed(0))
    tokens = torch.tensor([1, 2, 3])
    for words, drawn in (
        ({}, False),
        (dict(draft_sample_method="probabilistic", rejection_sample_method="standard"), True),
    ):
        d = SpeculativeConfig(**draft, **words).drafter(verifier)
        assert d.greedy is not drawn
        assert (d.propose(tokens, None, 3, sampling).probs is not None) == drawn
    with pytest.raises(ValueError, match="engine's own format, and the verifier has no folder"):
        SpeculativeConfig(**draft, method="medusa").drafter(verifier)


def test_a_greedy_draft_without_a_limit(verifier, tmp_path):
    "Neither config says how long a text may be: every length is drafted for, and greedily at any temperature."
    verifier.model.save_pretrained(tmp_path / "draft")
    file = tmp_path / "draft/config.json"
    fields = json.loads(file.read_text())
    del fields["max_position_embeddings"]
    file.write_text(json.dumps(fields))
    config = SpeculativeConfig(model=str(tmp_path / "draft"), num_speculative_tokens=3)
    drafter = config.drafter(verifier)
    assert (config.draft_max_model_len, drafter.greedy, drafter.longest) == (None, True, None)
    plain = DraftModel.from_pretrained(str(tmp_path / "draft"), verifier)
    for tokens in (torch.arange(3), torch.arange(600) % 20):
        tree = drafter.propose(tokens, None, 3, Sampling(1.0, torch.Generator().manual_seed(0)))
        assert tree.probs is None and len(tree) == 3
        assert torch.equal(tree.tokens, plain.propose(tokens, None, 3, Sampling()).tokens)
    twin = copy.deepcopy(drafter)
    assert twin.drafter is not drafter.drafter and twin.context_length == drafter.context_length


@pytest.mark.statement("vllm-25", "vllm-26")
@pytest.mark.parametrize("word", ["strict", "probabilistic", "standard", "block"])
def test_lossless_rules_greedy(verifier, word):
    prompts = [[1, 2, 3, 1, 2], [4, 4, 4]]
    plain = generate(verifier, NoDrafter(), prompts, k=0, max_new_tokens=40)
    for fields in (NGRAM | dict(prompt_lookup_min=1), dict(method="suffix", num_speculative_tokens=4)):
        done = speculate(verifier, fields | dict(rejection_sample_method=word), prompts, max_new_tokens=40)
        assert [g.tokens for g in done] == [g.tokens for g in plain] and sum(s.accepted for g in done for s in g.steps)


def test_rules():
    assert {
        SpeculativeConfig(**NGRAM, rejection_sample_method=w).rule() is accept.RULES[r]
        for w, r in (("strict", "strict"), ("standard", "standard"), ("probabilistic", "standard"), ("block", "block"))
    } == {True}
    rule = SpeculativeConfig(**NGRAM, rejection_sample_method="synthetic", synthetic_acceptance_length=2.5).rule()
    g = torch.Generator().manual_seed(0)
    tree = TokenTree.chain(torch.tensor([0, 1, 2]))
    target = torch.full((4, 5), 0.2)
    kept = [len(rule.decide(tree, target, g)[0]) for _ in range(2000)]
    assert set(kept) == {1, 2} and abs(sum(kept) / 2000 - 1.5) < 4 * 0.5 / 2000**0.5  # four standard errors
    assert not rule.lossless


@pytest.mark.statement("vllm-25", "vllm-26")
def test_probabilistic_accepts_more_of_one_distribution():
    "Of drawn drafts: strict accepts where the verifier draws the same token, probabilistic with min(p, q)."
    p, q, n = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4]), 4000
    for word, expected in (("strict", p @ q), ("probabilistic", torch.minimum(p, q).sum())):
        rule = SpeculativeConfig(method="ngram", num_speculative_tokens=1, rejection_sample_method=word).rule()
        g = torch.Generator().manual_seed(1)
        drafts = torch.multinomial(q, n, replacement=True, generator=g)
        trees = [TokenTree.chain(draft[None], q[None]) for draft in drafts]
        done = [rule.decide(tree, p.expand(2, -1), g) for tree in trees]
        first = torch.stack([draft if path else torch.tensor(token) for draft, (path, token) in zip(drafts, done)])
        accepted = sum(bool(path) for path, _ in done) / n
        assert abs(accepted - expected) < 4 * 0.5 / n**0.5  # four standard errors: 0.03 of 0.32 and 0.80
        assert (torch.bincount(first, minlength=3) / n - p).abs().max() < 4 * 0.5 / n**0.5


def test_strict_and_standard_have_one_law():
    # an argmax draft is kept with p(x) by either; the residual of the one is what the other drew
    tree, p, n = TokenTree.chain(torch.tensor([0])), torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), 4000
    law = {}
    for word in ("strict", "standard"):
        rule = SpeculativeConfig(method="ngram", num_speculative_tokens=1, rejection_sample_method=word).rule()
        g = torch.Generator().manual_seed(1)
        first = [0 if path else token for path, token in (rule.decide(tree, p, g) for _ in range(n))]
        law[word] = torch.bincount(torch.tensor(first), minlength=3) / n
    for word in law:
        assert (law[word] - p[0]).abs().max() < 4 * 0.5 / n**0.5  # four standard errors


@pytest.mark.statement("vllm-80")
def test_a_long_text_is_written_without_drafts(verifier, tmp_path):
    """`max_model_len`, or the shorter context of draft and target: beyond it nothing is drafted, and the text is still
    the verifier's."""
    verifier.model.save_pretrained(tmp_path / "same")
    draft = dict(model=str(tmp_path / "same"), num_speculative_tokens=3)
    plain = generate(verifier, NoDrafter(), [1, 2, 3], k=0, max_new_tokens=40)
    short = verifier.config.to_dict() | dict(max_position_embeddings=64)
    assert SpeculativeConfig(**draft, target_model_config=short).draft_max_model_len == 64
    with pytest.raises(ValueError, match="max_model_len=65"):
        SpeculativeConfig(**draft, max_model_len=65, target_model_config=short)
    for fields, longest in ((dict(max_model_len=20), 20), ({}, 512)):
        config = SpeculativeConfig(**draft, **fields, target_model_config=verifier.config)
        assert config.draft_max_model_len == longest
        done = speculate(verifier, config, [1, 2, 3], max_new_tokens=40)
        length, seen = 3 + 1, []
        for step in done.steps:
            fits = length + 3 <= longest
            assert bool(step.draft) == (fits and step.requested > 0)
            seen.append(fits)
            length += len(step.tokens)
        assert done.tokens == plain.tokens and all(seen) == (longest == 512)
    listed = speculate(verifier, dict(draft, max_model_len=20), [[1, 2, 3], [4] * 30], max_new_tokens=40)
    assert listed[0].tokens == plain.tokens and not any(step.draft for step in listed[1].steps)


def test_a_drafter_of_hidden_states_stops_for_good(tmp_path):
    "Near the end of a text fewer tokens are asked for; a drafter that has missed hidden states is not asked again."
    from speculators_nb.train.train_drafter import new_drafter

    home = ROOT / "data/tiny-verifier"
    new_drafter("eagle3", home).save_pretrained(tmp_path / "drafter")
    target, prompt = Verifier.from_pretrained(str(home), [1, 3, 4]), torch.tensor([5, 6, 7, 8])
    ids = SpeculativeConfig(model=str(tmp_path / "drafter")).aux_layer_ids
    target = Verifier.from_pretrained(str(home), list(ids) or [1, 3, 4])
    config = dict(model=str(tmp_path / "drafter"), max_model_len=12, num_speculative_tokens=3)
    done = speculate(target, config, prompt, max_new_tokens=14)
    assert done.tokens == generate(target, NoDrafter(), prompt, k=0, max_new_tokens=14).tokens
    drafted = [bool(step.draft) for step in done.steps]
    assert drafted == sorted(drafted, reverse=True) and any(drafted) and not all(drafted)


def test_a_schedule_drafts_less_for_many(verifier):
    schedule = [(1, 1, 3), (2, 2, 1), (3, 9, 0)]
    config = SpeculativeConfig(
        **NGRAM, prompt_lookup_min=1, num_speculative_tokens_per_batch_size=schedule, target_model_config=None
    )
    prompt = [1, 2, 1, 2, 1, 2]
    for requests, most in ((1, 3), (2, 1), (3, 0)):
        done = speculate(verifier, config, [prompt] * requests, max_new_tokens=12)
        assert max(step.requested for g in done for step in g.steps) == most
        assert len({tuple(g.tokens) for g in done}) == 1
    for one in (prompt, [*np.array(prompt)]):
        assert max(step.requested for step in speculate(verifier, config, one, max_new_tokens=12).steps) == 3
    assert config.uses_dynamic_speculative_decoding()


def test_tokens_for_a_batch_is_vllms_lookup():
    "Between two ranges and after the last one: the number of the one before; never more than num_speculative_tokens."
    config = SpeculativeConfig(**NGRAM, num_speculative_tokens_per_batch_size=[(9, 16, 2), (1, 4, 5), (32, 64, 0)])
    found = {size: config.tokens_for(size, 3) for size in (1, 4, 5, 8, 9, 16, 17, 31, 32, 65)}
    assert found == {1: 3, 4: 3, 5: 3, 8: 3, 9: 2, 16: 2, 17: 2, 31: 2, 32: 0, 65: 0}


@pytest.mark.statement("vllm-85")
def test_the_family_is_that_of_the_text_model():
    for kind, text in (("llava", "llama"), ("internvl", "qwen3"), ("mistral3", "phi3")):
        target = dict(model_type=kind, text_config=dict(model_type=text))
        fields = dict(model="org/x", method="eagle3", num_speculative_tokens=3, target_model_config=target)
        config = SpeculativeConfig(**fields)  # vLLM 0.32 serves EAGLE-3 for Phi-3 too, the documented line does not
        assert config.use_eagle() and config.to_json()
        if text == "phi3":
            with pytest.raises(ValueError, match="documented line has none of model_type='phi3'"):
                config.to_json("documented")
        else:
            assert config.to_json("documented")


@pytest.mark.statement("vllm-53")
def test_a_head_needs_a_target_that_is_known():
    for method in ("mtp", "dspark"):
        with pytest.raises(ValueError, match=f"method='{method}' without a model.*target_model_config must be present"):
            SpeculativeConfig(method=method, num_speculative_tokens=1)
        config = SpeculativeConfig(method=method, num_speculative_tokens=1, target_model_config="org/not-here")
        assert json.loads(config.to_json()).keys() <= {"method", "num_speculative_tokens", "parallel_drafting"}


@pytest.mark.statement("vllm-54")
def test_deepseek_v32_runs_its_head_eagerly_in_the_documented_line():
    target = dict(model_type="deepseek_v32", num_nextn_predict_layers=1, vocab_size=10)
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=1, target_model_config=target)
    assert json.loads(config.to_json("documented"))["enforce_eager"] is True
    assert config.enforce_eager is None and "enforce_eager" not in json.loads(config.to_json())
    assert SpeculativeConfig(
        method="mtp", num_speculative_tokens=1, target_model_config=target | dict(model_type="deepseek_v3")
    ).to_json("documented") == json.dumps(dict(num_speculative_tokens=1, method="mtp"))
    with pytest.raises(ValueError, match="method='mtp' is not what a deepseek_v41 target carries; write 'dspark'"):
        SpeculativeConfig(
            method="mtp", num_speculative_tokens=1, target_model_config=target | dict(model_type="deepseek_v41")
        )


@pytest.mark.statement("vllm-67", "vllm-68")
def test_layers_that_run_again_are_reported(models):
    with pytest.warns(UserWarning, match="mimo_mtp has 1 layer.s. that predict, which run again"):
        SpeculativeConfig(method="mtp", num_speculative_tokens=2, target_model_config=models / "mimo")
    with pytest.warns(UserWarning, match="longcat_flash_mtp has 1 layer"):
        SpeculativeConfig(method="mtp", num_speculative_tokens=2, target_model_config=dict(model_type="longcat_flash"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpeculativeConfig(method="mtp", num_speculative_tokens=2, target_model_config=models / "two-heads")


@pytest.mark.statement("vllm-73", "vllm-79")
def test_an_mlp_speculator_runs_on_one_device(models):
    with pytest.warns(UserWarning, match="draft_tensor_parallel_size=1: an MLP speculator runs on one device"):
        config = SpeculativeConfig(model=str(models / "mlp"), target_parallel_config=dict(tensor_parallel_size=2))
    assert (config.draft_tensor_parallel_size, config.num_lookahead_tokens, config.num_speculative_tokens) == (1, 3, 3)


@pytest.mark.statement("vllm-81")
def test_devices_of_the_draft(models):
    target = dict(tensor_parallel_size=2, pipeline_parallel_size=3, enable_expert_parallel=True)
    made = {
        name: SpeculativeConfig(
            model=str(models / name), num_speculative_tokens=2, target_parallel_config=target
        ).draft_parallel_config
        for name in ("small", "latent")
    }
    assert [made["small"].enable_expert_parallel, made["latent"].enable_expert_parallel] == [False, True]
    assert {(d.tensor_parallel_size, d.pipeline_parallel_size) for d in made.values()} == {(2, 1)}
    assert SpeculativeConfig(**NGRAM, target_parallel_config=target).draft_parallel_config.pipeline_parallel_size == 3
    assert SpeculativeConfig(**NGRAM).draft_parallel_config is None
    with pytest.raises(ValueError, match="target_parallel_config.tensor_parallel=2"):
        SpeculativeConfig(**NGRAM, target_parallel_config=dict(tensor_parallel=2))


def test_engine_only_settings_are_no_drafter_of_ours(models, verifier):
    with pytest.raises(ValueError, match="use_heterogeneous_vocab=True is for the engine"):
        ours(models, CASES["other vocabulary"]).drafter(verifier)
    with pytest.raises(ValueError, match="method='custom_class' names a Python class of the engine, proposers.Mine"):
        ours(models, CASES["custom class by its method"]).drafter(verifier)


@pytest.mark.statement("vllm-89")
def test_shown_as_vllm_shows_it():
    assert repr(SpeculativeConfig(**NGRAM)) == "SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3)"
    config = SpeculativeConfig(model="org/EAGLE-x", num_speculative_tokens=2)
    assert str(config) == "SpeculativeConfig(method='eagle', model='org/EAGLE-x', num_spec_tokens=2)"


@pytest.mark.statement("vllm-49")
def test_mistral_large_is_served_by_its_eagle_class():
    served = served_architecture("eagle", dict(architectures=["MistralLarge3ForCausalLM"]))
    assert served == "EagleMistralLarge3ForCausalLM" and served in ENGINES["0.33"].architectures["eagle"]


@pytest.mark.statement("vllm-19", "vllm-62")
def test_the_config_of_the_draft_is_made(models):
    "The draft's own; the target's where nothing is loaded, with what is stated for hidden states; none for suffixes."
    target = json.loads((models / "mimo/config.json").read_text())
    given = dict(num_speculative_tokens=2, target_model_config=models / "mimo")
    made = {m: SpeculativeConfig(method=m, **given).draft_model_config for m in ("ngram", "ngram_gpu", "suffix", "mtp")}
    assert made["ngram"] == made["ngram_gpu"] == dict(model=str(models / "mimo"), hf_config=target, max_model_len=None)
    assert made["suffix"] is None
    assert made["mtp"]["hf_config"] == target and made["mtp"]["max_model_len"] == target["max_position_embeddings"]
    config = SpeculativeConfig(model=str(models / "short"), **given)
    assert (
        config.draft_model_config["hf_config"] == MODELS["short"] and config.draft_model_config["max_model_len"] == 512
    )
    stated = dict(hf_config=dict(eagle_aux_hidden_state_layer_ids=[1]))
    config = SpeculativeConfig(method="extract_hidden_states", draft_model_config=stated, **given)
    assert config.draft_model_config["hf_config"] == target | stated["hf_config"]
    assert json.loads(config.to_json())["draft_model_config"] == stated
    parallel = SpeculativeConfig(**NGRAM, target_parallel_config=dict(tensor_parallel_size=2)).draft_parallel_config
    assert parallel.tensor_parallel_size == 2


@pytest.mark.statement("vllm-70")
def test_a_draft_that_is_of_no_such_method(models):
    "NotImplementedError as in vLLM, and a ValueError as all refusals here are."
    for error in (NotImplementedError, ValueError):
        for method in ("mtp", "mlp_speculator"):
            with pytest.raises(error, match=f"method='{method}' needs"):
                SpeculativeConfig(model=str(models / "small"), method=method, num_speculative_tokens=2)
    with pytest.raises(ValueError) as refused:
        SpeculativeConfig(method="oracle", num_speculative_tokens=2)
    assert not isinstance(refused.value, NotImplementedError)


def test_what_has_no_effect_is_reported(models):
    with pytest.warns(UserWarning, match="parallel_drafting=True is nothing that method='ngram' can do"):
        SpeculativeConfig(**NGRAM, parallel_drafting=True)
    shallow = dict(method="suffix", num_speculative_tokens=3, suffix_decoding_max_tree_depth=1)
    with pytest.warns(UserWarning, match="suffix_decoding_max_tree_depth=1 leaves no place"):
        config = SpeculativeConfig(**shallow)
    with pytest.raises(ValueError, match="suffix_decoding_max_tree_depth=1 drafts nothing; write 2 or more"):
        config.drafter(None)


def test_a_dotted_folder_is_read_as_a_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.draft").mkdir()
    with pytest.warns(
        UserWarning, match="is read as a Python class, though there is such a folder; write './my.draft'"
    ):
        assert SpeculativeConfig(model="my.draft", num_speculative_tokens=2).method == "custom_class"
    assert SpeculativeConfig(model="./my.draft", num_speculative_tokens=2).method == "draft_model"


def test_a_dspark_draft_for_omni(models):
    with pytest.raises(ValueError, match="(?s)markov_rank=0 in the config.json of .*needs a positive number"):
        ours(models, CASES[f"omni wrong {OMNI_WRONG.index(dict(markov_rank=0))}"])


@pytest.mark.statement("vllm-56", "vllm-77")
def test_methods_without_a_checkpoint_are_their_own_model():
    for method in ("ngram", "ngram_gpu", "suffix", "extract_hidden_states"):
        config = SpeculativeConfig(method=method, num_speculative_tokens=3)
        assert config.model == method and config.is_chain and config.depth == 3
