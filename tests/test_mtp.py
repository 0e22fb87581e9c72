"""MTP heads: the lean path against the dense definition and that against transformers' own layers, extraction and
stitching. (Upstream's recorded numbers: test_recorded.py.)"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from blocks import check_lean
from recorded import cases, load_case
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

from speculators_nb.core.config import SpeculatorsConfig, VerifierConfig
from speculators_nb.core.registry import GreedyTokenProposalConfig
from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.mtp import MTPDraftModel, MTPSpeculatorConfig, documents_of, mtp_supervision, prefix_rows
from speculators_nb.models.mtp_native import extract_mtp, stitch_mtp
from speculators_nb.serve.vllm_contract import check_vllm_contract
from speculators_nb.verifier.tapped_model import Verifier

FIXTURES = Path(__file__).parent / "fixtures"
CASES = cases("mtp")
VERIFIERS = sorted(p.name for p in FIXTURES.glob("mtp_verifier_*"))


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    "Logits of every step and row to 1e-4 absolute (they reach 30); the weights of the steps are upstream's."
    model, batch, kwargs, info, folder = load_case(name)
    weights = MTPDraftModel.get_trainer_kwargs(**info["training_args"])[0]["step_weights"]
    assert weights == pytest.approx(info["call_kwargs"]["step_weights"], rel=1e-6)
    want = load_file(folder / "outputs.safetensors")
    with torch.no_grad():
        logits, *_ = model(**batch, **kwargs, cross_document_targets=True, lean=False)
    for s, z in enumerate(logits):
        torch.testing.assert_close(z, want[f"returned.{s}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [c for c in CASES if c != "mtp"])
def test_extraction_is_upstreams(name, monkeypatch):
    """from_training_args finds the verifier's head, sharded or not, experts one by one or fused; its config is
    upstream's."""
    monkeypatch.chdir(FIXTURES)
    _, _, _, info, folder = load_case(name)
    args = info["training_args"]
    model = MTPDraftModel.from_training_args(AutoConfig.from_pretrained(args["verifier_name_or_path"]), **args)
    want = load_file(folder / "state_dict.safetensors")
    state = {n: w for n, w in model.state_dict().items() if not n.startswith("target_head.")}
    assert state.keys() == want.keys() and all(torch.equal(state[n], want[n]) for n in want)
    assert model.drafter().aux_layer_ids == (4,) and model.config.num_speculative_steps == args["num_speculative_steps"]


@pytest.mark.parametrize("name", [c for c in CASES if c != "mtp"])
def test_upstreams_checkpoint_loads(name, tmp_path, monkeypatch):
    "config.json and tensors as upstream saves them; the verifier gives the rest. The recorded loss comes out."
    monkeypatch.chdir(FIXTURES)
    _, batch, kwargs, info, folder = load_case(name)
    shutil.copy(folder / "saved_pretrained/config.json", tmp_path)
    state = load_file(folder / "state_dict.safetensors")
    keys = json.loads((folder / "saved_pretrained_keys.json").read_text())
    save_file({n: state[n] for n in keys}, tmp_path / "model.safetensors")
    model = SpeculatorModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert model(**batch, **kwargs, cross_document_targets=True)[1].item() == pytest.approx(info["loss"], rel=1e-5)


# ------------------------------------------------------------------------------------------------ definitions
SMALL = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
HYBRID = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 0]),
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
NEXT = {**HYBRID, "rope_parameters": {k: v for k, v in HYBRID["rope_parameters"].items() if k != "mrope_section"}}
LAYERS = {
    "qwen3": lambda kv: Qwen3Config(**SMALL, intermediate_size=40, num_key_value_heads=kv),
    "qwen3_next": lambda kv: Qwen3NextConfig(**SMALL, **MOE, **NEXT, num_key_value_heads=kv),
    "qwen3_5_text": lambda kv: Qwen3_5TextConfig(**SMALL, **HYBRID, intermediate_size=40, num_key_value_heads=kv),
    "qwen3_5_moe_text": lambda kv: Qwen3_5MoeTextConfig(**SMALL, **MOE, **HYBRID, num_key_value_heads=kv),
}


def steps_config(k):
    return SpeculatorsConfig(
        algorithm="mtp",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=k)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )


def random_model(seed, family=None):
    "A head of random family, shape and weights, and a random packed row."
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    layer = LAYERS[family or list(LAYERS)[seed % 4]](pick(1, 2, 4))
    model = MTPDraftModel(
        MTPSpeculatorConfig(
            transformer_layer_config=layer,
            speculators_config=steps_config(pick(1, 2, 3, 5)),
            verifier_norm=pick(True, False),
        )
    )
    with torch.no_grad():
        for p in [*model.parameters(), model.target_head.norm.weight]:
            p.copy_(torch.randn(p.shape, generator=g) * (0.2 if p.ndim > 1 else 0.1) + (p.ndim == 1))
    model.target_head.set_rows(torch.randn(60, 32, generator=g))
    L = 50
    documents = torch.randint(0, 5, (L,), generator=g).sort().values
    documents[L - int(torch.randint(0, 6, (), generator=g)) :] = -1
    positions = torch.cat(
        [torch.arange(n) for n in torch.unique_consecutive(documents, return_counts=True)[1].tolist()]
    )
    batch = dict(
        input_ids=torch.randint(60, (1, L), generator=g),
        hidden_states=torch.randn(1, L, 32, generator=g),
        document_ids=documents[None],
        loss_mask=((torch.rand(1, L, generator=g) < 0.5) & (documents >= 0)),
        position_ids=positions[None],
    )
    return model, batch


@pytest.mark.parametrize("as_served", [False, True], ids=["per step", "as served"])
@pytest.mark.parametrize("seed", range(12))
def test_lean_is_dense(seed, as_served):
    """Over families, shapes and packings: loss, metrics and gradients of the lean path are those of the definition, to
    1e-5."""
    model, batch = random_model(seed)
    check_lean(model, batch, step_weight_beta=0.7, as_served=as_served)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("seed", range(8))
def test_definition_from_loops(seed):
    """One document at a time through transformers' own decoder layer, and targets by counting: independent of masks,
    packing and row selection."""
    model, batch = random_model(seed)
    layer = model.mtp_layers[0]
    config = model.config.transformer_layer_config
    steps = model.config.num_speculative_steps
    config._attn_implementation = "sdpa"
    x, total, counts = {k: v[0] for k, v in batch.items()}, [0.0] * steps, [0] * steps
    with torch.no_grad():
        _, loss, metrics = model(**batch, step_weights=[0.5 + s for s in range(steps)])
        for doc in range(int(x["document_ids"].max()) + 1):
            rows = (x["document_ids"] == doc).nonzero()[:, 0]
            ids, mask, hidden = x["input_ids"][rows], x["loss_mask"][rows], model.features(x["hidden_states"][rows])
            n = len(ids)
            for s in range(steps):
                m = n - 2 - s  # rows whose target lies in the document
                if m < 1:
                    break
                mixed = torch.cat(
                    [
                        layer.token_layernorm(model.embed_tokens(ids[1 + s : 1 + s + m])),
                        layer.hidden_layernorm(hidden[:m]),
                    ],
                    -1,
                )
                h = layer.input_proj(mixed)[None]
                rope = tuple(t[None] for t in model.rope(torch.arange(m)))
                causal = torch.ones(m, m).tril().bool()[None, None]
                h = (
                    h
                    + layer.self_attn(
                        hidden_states=layer.input_layernorm(h), position_embeddings=rope, attention_mask=causal
                    )[0]
                )
                hidden = layer.final_layernorm(h + layer.mlp(layer.post_attention_layernorm(h)))[0]
                ce = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[2 + s :], reduction="none")[
                    mask[2 + s :]
                ]
                total[s] += ce.sum().item()
                counts[s] += len(ce)
    for s in range(steps):
        assert int(metrics[f"loss_step_{s}_total"]) == counts[s]
        assert metrics[f"loss_step_{s}_sum"].item() == pytest.approx((0.5 + s) * total[s], rel=1e-4, abs=1e-5)
    assert loss.item() == pytest.approx(
        sum((0.5 + s) * t / max(1, c) for s, (t, c) in enumerate(zip(total, counts))), rel=1e-4
    )


def test_accuracies_count_runs():
    "full_acc: of the runs that begin at a supervised row, the share right in every step so far."
    model, batch = random_model(4)
    model.config.speculators_config = steps_config(3)
    with torch.no_grad():
        logits, _, metrics = model(**batch, lean=False)
    x = {k: v[0] for k, v in batch.items()}
    right, runs = [0] * 3, [0] * 3
    for t in range(50):
        for s in range(3):
            at = t + 2 + s
            if at >= 50 or not x["loss_mask"][at] or x["document_ids"][at] != x["document_ids"][t]:
                break
            runs[s] += 1
            good = all(int(logits[j][0, t].argmax()) == int(x["input_ids"][t + 2 + j]) for j in range(s + 1))
            right[s] += good
    for s in range(3):
        assert (int(metrics[f"full_acc_{s}_sum"]), int(metrics[f"full_acc_{s}_total"])) == (right[s], runs[s])


def test_supervision_stays_in_its_document():
    documents = torch.tensor([0] * 5 + [1] * 4 + [-1] * 2)
    mask = torch.ones(11, dtype=torch.bool)
    inside = mtp_supervision(mask, documents, 3)
    assert inside.int().tolist() == [
        [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    across = mtp_supervision(mask, documents, 3, cross_document=True)
    assert across[:, :7].all() and not across[:, 7:].any()  # L - K - 1 rows at every step
    assert prefix_rows(inside, documents).int().sum(-1).tolist() == [5, 3, 1]
    assert documents_of(torch.tensor([0, 1, 2, 0, 1, 0, 0, 3])).tolist() == [0, 0, 0, 1, 1, 2, 3, 4]


def test_rows_too_short_for_all_steps():
    "Upstream takes fewer steps then; here the missing ones have no rows. Two tokens have no target at all."
    model, batch = random_model(0, "qwen3")
    model.config.speculators_config = steps_config(5)
    for n in (2, 3, 5):
        short = {k: v[:, :n] for k, v in batch.items()} | dict(
            document_ids=torch.zeros(1, n, dtype=torch.long), loss_mask=torch.ones(1, n, dtype=torch.bool)
        )
        for options in ({}, dict(as_served=True), dict(cross_document_targets=True), dict(lean=False)):
            assert (model(**short, **options)[1] > 0) == (n > 2)


def test_a_mask_shows_what_a_step_attends_to():
    "The past of its own step, or as served that of the first step and its own later keys."
    model, batch = random_model(0, "qwen3")
    L = len(batch["input_ids"][0])
    packed = dict(document_ids=torch.zeros(1, L, dtype=torch.long))
    assert model.training_mask(packed).keys == L
    assert model.training_mask(packed, as_served=True).keys == model.config.num_speculative_steps * L


# ------------------------------------------------------------------------------------------------ drafting
@pytest.mark.parametrize("seed", range(8))
def test_drafting_is_what_as_served_trains(seed):
    """The drafter's key-value cache, fed in two parts, gives the logits of training's unrolled steps on the row that it
    drafted itself."""
    model, _ = random_model(seed)
    model.config.speculators_config = steps_config(3)
    drafter, g = model.eval().drafter(), torch.Generator().manual_seed(seed)
    n, k = 12, 3
    tokens, features = torch.randint(60, (n,), generator=g), torch.randn(n - 1, 32, generator=g)
    drafter.propose(tokens[:7], features[:6], k, Sampling())
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, g))
    row = torch.cat([tokens, tree.tokens])
    with torch.no_grad():
        hidden = model.dense_hidden(
            row,
            torch.cat([features, torch.zeros(k + 1, 32)]),
            torch.zeros(len(row), dtype=torch.long),
            torch.arange(len(row)),
            k,
            as_served=True,
        )
        for s, law in enumerate(tree.probs):
            torch.testing.assert_close(law, model.lm_head(hidden[s][n - 2]).softmax(-1), rtol=1e-4, atol=1e-5)


def tiny_verifier(folder, head=True, sharded=False, family="qwen3", dtype=torch.float32):
    "A whole tiny verifier with transformers' own class, with or without MTP tensors."
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LAYERS[family](2), dtype=dtype)
    model.save_pretrained(folder, max_shard_size="16KB" if sharded else "5GB")
    if head:
        config = MTPSpeculatorConfig(transformer_layer_config=LAYERS[family](2), speculators_config=steps_config(3))
        drafter = MTPDraftModel(config)
        with torch.no_grad():
            for p in drafter.mtp_layers.parameters():
                p.copy_(torch.randn(p.shape) * 0.2 + (p.ndim == 1))
        drafter.save_pretrained(folder / "head", dtype=dtype)
        stitch_mtp(folder / "head", folder, folder.with_name(folder.name + "+mtp"))
        shutil.rmtree(folder)
        folder.with_name(folder.name + "+mtp").rename(folder)
        shutil.rmtree(folder / "head")
    return folder


def test_sampled_drafts_come_with_their_laws(tmp_path):
    """Each drafted token is drawn from the law that is reported for it: over many draws the first token's frequencies
    match, within 5 standard deviations."""
    model, _ = random_model(0, "qwen3")
    drafter, g = model.eval().drafter(), torch.Generator().manual_seed(0)
    tokens, features, n = torch.randint(60, (6,), generator=g), torch.randn(5, 32, generator=g), 1000
    counts = torch.zeros(60)
    for _ in range(n):
        drafter.reset()
        tree = drafter.propose(tokens, features, 1, Sampling(1.0, g))
        counts[tree.tokens[0]] += 1
    p = tree.probs[0]
    assert ((counts / n - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()


# --------------------------------------------------------------------------------------------- extraction and stitching
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("family", LAYERS)
def test_stitching_inverts_extraction(tmp_path, family, sharded):
    """Out of the verifier, through a checkpoint of ours, and back in: every tensor of the verifier is the same to the
    bit, and a changed head arrives whole."""
    folder = tiny_verifier(tmp_path / "v", sharded=sharded, family=family, dtype=torch.bfloat16)
    before = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    assert len(list(folder.glob("*.safetensors"))) > 1 or not sharded
    MTPDraftModel.from_training_args(verifier_name_or_path=str(folder)).save_pretrained(tmp_path / "d")
    stitch_mtp(tmp_path / "d", folder, tmp_path / "out")
    after = {n: t for f in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    assert before.keys() == after.keys() and all(
        torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before
    )
    assert sorted(f.name for f in folder.iterdir()) == sorted(f.name for f in (tmp_path / "out").iterdir())
    assert (folder / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()
    model = SpeculatorModel.from_pretrained(tmp_path / "d")
    with torch.no_grad():
        for p in model.mtp_layers.parameters():
            p.add_(torch.randn_like(p)).copy_(p.bfloat16())
    model.save_pretrained(tmp_path / "d2")
    stitch_mtp(tmp_path / "d2", folder, tmp_path / "out2", link=True)
    got, want = extract_mtp(tmp_path / "out2"), dict(model.saved_state().items())
    assert got.keys() == want.keys() and all(torch.equal(got[n].float(), want[n]) for n in want)
    after = {n: t for f in (tmp_path / "out2").glob("*.safetensors") for n, t in load_file(f).items()}
    assert all(torch.equal(before[n], after[n]) == (not n.startswith("mtp.")) for n in before)
    shared = [f for f in folder.glob("*.safetensors") if (tmp_path / "out2" / f.name).stat().st_ino == f.stat().st_ino]
    assert shared or not sharded
    assert {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}.keys() == before.keys()


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("family", LAYERS)
def test_a_verifier_gets_its_first_head(tmp_path, family, sharded):
    "A fresh head is entered in the index and announced in config.json; the verifier still loads, and so does its head."
    folder = tiny_verifier(tmp_path / "v", head=False, sharded=sharded, family=family)
    torch.manual_seed(1)
    model = MTPDraftModel.from_training_args(verifier_name_or_path=str(folder), fresh_head=True)
    model.save_pretrained(tmp_path / "d")
    before = (folder / "config.json").read_bytes(), {f.name: f.read_bytes() for f in folder.glob("*")}
    stitch_mtp(tmp_path / "d", folder, tmp_path / "out", link=True)
    assert before == ((folder / "config.json").read_bytes(), {f.name: f.read_bytes() for f in folder.glob("*")})
    again = MTPDraftModel.from_training_args(verifier_name_or_path=str(tmp_path / "out"))
    assert all(torch.equal(w, again.state_dict()[n]) for n, w in model.saved_state().items())
    old, new = (json.loads((d / "config.json").read_text()) for d in (folder, tmp_path / "out"))
    added = {"qwen3": {}, "qwen3_next": {"num_nextn_predict_layers": 1}}.get(family, {"mtp_num_hidden_layers": 1})
    assert new == old | added
    if sharded:
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(
            t.nbytes for f in (tmp_path / "out").glob("*.safetensors") for t in load_file(f).values()
        )
    assert Verifier.from_pretrained(str(tmp_path / "out"), [2])


def test_composite_configs_learn_of_their_head_inside(tmp_path):
    "In a multimodal verifier the language model's config is nested; the rest of its files come along."
    shutil.copytree(FIXTURES / "mtp_verifier_qwen3_5_moe", tmp_path / "v")
    tensors = load_file(tmp_path / "v/model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("mtp.")}, tmp_path / "v/model.safetensors")
    (tmp_path / "v/chat_template.jinja").write_text("hello")
    model = MTPDraftModel.from_training_args(verifier_name_or_path=str(tmp_path / "v"), fresh_head=True)
    model.save_pretrained(tmp_path / "d")
    stitch_mtp(tmp_path / "d", tmp_path / "v", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1 and "mtp_num_hidden_layers" not in config
    assert (tmp_path / "out/chat_template.jinja").read_text() == "hello"


def test_stitching_is_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = tiny_verifier(tmp_path / "v")
    MTPDraftModel.from_training_args(verifier_name_or_path=str(folder)).save_pretrained(tmp_path / "d")
    with monkeypatch.context() as m, pytest.raises(OSError, match="disk full"):
        m.setattr(
            "speculators_nb.models.mtp_native.save_tensors", lambda *a: (_ for _ in ()).throw(OSError("disk full"))
        )
        stitch_mtp(tmp_path / "d", folder, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "v"]
    stitch_mtp(tmp_path / "d", folder, tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists already"):
        stitch_mtp(tmp_path / "d", folder, tmp_path / "out")


def test_an_incomplete_head_of_the_verifier_is_its_own_fault(tmp_path):
    folder = tiny_verifier(tmp_path / "v")
    MTPDraftModel.from_training_args(verifier_name_or_path=str(folder)).save_pretrained(tmp_path / "d")
    (file,) = folder.glob("*.safetensors")
    save_file({n: t for n, t in load_file(file).items() if n != "mtp.fc.weight"}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"verifier '.*' lacks mtp\.fc\.weight of its own MTP head; fetch or save it"):
        stitch_mtp(tmp_path / "d", folder, tmp_path / "out")


def test_a_foreign_head_is_refused(tmp_path):
    folder = tiny_verifier(tmp_path / "v")
    for name, config in (
        ("wide", Qwen3Config(**SMALL | dict(hidden_size=48), intermediate_size=40, num_key_value_heads=2)),
        ("gated", LAYERS["qwen3_next"](2)),
    ):
        MTPDraftModel(
            MTPSpeculatorConfig(transformer_layer_config=config, speculators_config=steps_config(3))
        ).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match="trained for another verifier"):
            stitch_mtp(tmp_path / name, folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    MTPDraftModel.from_training_args(verifier_name_or_path=str(folder)).save_pretrained(tmp_path / "d")
    state = load_file(tmp_path / "d/model.safetensors")
    name = next(n for n in state if n.endswith("k_norm.weight"))
    for weight, said in (
        (state[name].to(torch.int8), "holds torch.int8"),
        (state[name] * torch.nan, "holds NaN or infinity"),
    ):
        save_file(state | {name: weight}, tmp_path / "d/model.safetensors")
        with pytest.raises(ValueError, match=f"tensor {name} {said}"):
            stitch_mtp(tmp_path / "d", folder, tmp_path / "out")
    shutil.copytree(FIXTURES / "eagle3/saved_pretrained", tmp_path / "e")
    save_file(load_file(FIXTURES / "eagle3/state_dict.safetensors"), tmp_path / "e/model.safetensors")
    with pytest.raises(ValueError, match="type 'eagle3'"):
        stitch_mtp(tmp_path / "e", folder, tmp_path / "out")


# ------------------------------------------------------------------------------------------------ what can go wrong
def test_errors(tmp_path):
    model, batch = random_model(0)
    model.config.speculators_config = steps_config(3)
    with pytest.raises(ValueError, match="step_weights has 2 entries for 3 steps"):
        model(**batch, step_weights=[0.5, 0.5])
    with pytest.raises(ValueError, match="num_nextn_predict_layers=2"):
        MTPSpeculatorConfig(num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match="draft_vocab_size=30 of 60"):
        MTPSpeculatorConfig(transformer_layer_config=LAYERS["qwen3"](2), draft_vocab_size=30)
    with pytest.raises(ValueError, match="speculators_config is missing"):
        _ = MTPSpeculatorConfig().num_speculative_steps
    for layer in (LlamaConfig(**SMALL), MTPSpeculatorConfig().transformer_layer_config):
        with torch.device("meta"), pytest.raises(ValueError, match="MTP heads are known for qwen3, qwen3_next"):
            MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer))
    with pytest.raises(ValueError, match="full_attention layer"):
        config = Qwen3NextConfig(
            **SMALL, **MOE, **NEXT | dict(layer_types=["linear_attention"] * 2), num_key_value_heads=2
        )
        MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=config, speculators_config=steps_config(3)))
    folder = tiny_verifier(tmp_path / "v", head=False)
    with pytest.raises(ValueError, match="has no MTP head.*fresh_head=True"):
        MTPDraftModel.from_training_args(verifier_name_or_path=str(folder))
    with pytest.raises(ValueError, match="draft_vocab_size=30 of 60"):
        MTPDraftModel.from_training_args(verifier_name_or_path=str(folder), fresh_head=True, draft_vocab_size=30)
    deep = load_file(FIXTURES / "mtp_verifier_qwen3/model.safetensors")
    shutil.copytree(FIXTURES / "mtp_verifier_qwen3", tmp_path / "deep")
    save_file(
        deep | {n.replace("layers.0", "layers.1"): t.clone() for n, t in deep.items() if n.startswith("mtp.layers.0")},
        tmp_path / "deep/model.safetensors",
    )
    with pytest.raises(ValueError, match="mtp.layers.1.*not a tensor of an MTP head of one layer"):
        MTPDraftModel.from_training_args(verifier_name_or_path=str(tmp_path / "deep"))


def test_an_experts_head_starts_with_finite_weights():
    "transformers leaves a mixture's experts uninitialised; a fresh head must not."
    torch.manual_seed(0)
    model = MTPDraftModel(
        MTPSpeculatorConfig(transformer_layer_config=LAYERS["qwen3_5_moe_text"](2), speculators_config=steps_config(3))
    )
    for name, p in model.mtp_layers.named_parameters():
        if p.ndim > 1:
            assert 0.01 < p.std() < 0.03, name


def test_serving_needs_stitching(tmp_path):
    folder = tiny_verifier(tmp_path / "v", family="qwen3_5_text")
    MTPDraftModel.from_training_args(verifier_name_or_path=str(folder)).save_pretrained(tmp_path / "d")
    found = check_vllm_contract(tmp_path / "d")
    assert len(found) == 2 and "stitch_mtp" in found[0] and "verifier_norm" in found[1]
    MTPDraftModel.from_training_args(verifier_name_or_path=str(folder), verifier_norm=True).save_pretrained(
        tmp_path / "n"
    )
    assert len(check_vllm_contract(tmp_path / "n")) == 1
    assert SpeculatorModel.from_pretrained(tmp_path / "n").config.verifier_norm


@pytest.mark.statement("models-38", "models-39")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("as_served", [False, True], ids=["per step", "as served"])
def test_a_batch_is_its_texts(side, as_served):
    "Logits of each text of a padded batch are those of the text alone; the loss is that of the packed row."
    model, _ = random_model(5)
    model.config.speculators_config = steps_config(2)
    lengths, L = (9, 12, 5), 12
    g = torch.Generator().manual_seed(0)
    ids, hidden = torch.randint(60, (3, L), generator=g), torch.randn(3, L, 32, generator=g)
    at = torch.arange(L)
    real = torch.stack([at >= L - n if side == "left" else at < n for n in lengths])
    wanted = real & (torch.rand(3, L, generator=g) < 0.7)
    options = dict(step_weights=[0.6, 0.4], as_served=as_served)
    with torch.no_grad():
        logits, loss, _ = model(ids, hidden, wanted, attention_mask=real.long(), lean=False, **options)
        lean = model(ids, hidden, wanted, attention_mask=real.long(), **options)[1]
        texts = [(ids[b, real[b]][None], hidden[b, real[b]][None]) for b in range(3)]
        packed = model(
            torch.cat([text for text, _ in texts], 1),
            torch.cat([states for _, states in texts], 1),
            wanted[real][None],
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            **options,
        )[1]
        for b, n in enumerate(lengths):
            alone, _, _ = model(*texts[b], lean=False, **options)
            first = L - n if side == "left" else 0
            for s in range(2):
                rows = n - 1 - s  # a later row reads a token behind the text
                torch.testing.assert_close(logits[s][b, first : first + rows], alone[s][0, :rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lean, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed, loss, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="cross_document_targets"):
        model(ids, hidden, wanted, attention_mask=real.long(), cross_document_targets=True)
