"""EAGLE-3 against upstream's recorded numbers, and the lean path against the dense definition."""

import pytest
import torch
from blocks import check_lean
from recorded import cases, load_case
from safetensors.torch import load_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3ForCausalLM

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle3 import Eagle3Drafter, Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators_nb.nn.attention import attention_back_end
from speculators_nb.nn.supervision import ttt_supervision

CASES = cases("eagle3")


@pytest.mark.statement("release-67")
@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    "Draft logits of every step and the targets, all rows, to 1e-4 absolute (they reach 30)."
    model, batch, kwargs, _, folder = load_case(name)
    want, x = load_file(folder / "outputs.safetensors"), {k: v[0] for k, v in batch.items()}
    with torch.no_grad():
        hidden = model.dense_hidden(
            x["input_ids"], x["hidden_states"], x["document_ids"], x["position_ids"], kwargs["ttt_steps"]
        )
        for t, h in enumerate(hidden):
            torch.testing.assert_close(model.lm_head(h), want[f"lm_head_out.{t}"][0], rtol=0, atol=1e-4)
        torch.testing.assert_close(
            model.target_head(x["verifier_last_hidden_states"]), want["verifier_lm_head_out.0"][0], rtol=0, atol=1e-4
        )
        tokens, *_ = model(**batch, **kwargs, cross_document_targets=True, lean=False)
    for t, row in enumerate(tokens):
        kept = row.shape[1] - t  # upstream's returned ids are draft ids; the last t rows have no target
        mine = row if model.d2t is None else torch.searchsorted(model.to_verifier(torch.arange(len(model.d2t))), row)
        assert torch.equal(mine[:, :kept], want[f"returned.{t}"][:, :kept])


def random_model(seed, windows=True):
    "A drafter of random shape with random weights, and a random packed row."
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    layers, heads, kv = pick(1, 2, 3), 4, pick(1, 2, 4)
    types = [pick("full_attention", "sliding_attention" if windows else "full_attention") for _ in range(layers)]
    layer = pick(LlamaConfig, Qwen3Config)(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=8,
        vocab_size=60,
        layer_types=types,
        sliding_window=5,
        use_sliding_window=True,
    )
    norms = pick({}, {"norm_before_fc": True}, {"fc_norm": True})
    aux = pick([1], [1, 2], [1, 2, 4])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=pick(40, 60),
        eagle_aux_hidden_state_layer_ids=aux,
        norm_output=pick(True, False),
        norm_before_residual=pick(True, False),
        embed_requires_grad=pick(True, False),
        **norms,
    )
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.2 if p.ndim > 1 else 0.1) + (p.ndim == 1))
    model.target_head.set_rows(torch.randn(config.draft_vocab_size, 32, generator=g))
    L = 50
    documents = torch.randint(0, 5, (L,), generator=g).sort().values
    documents[L - int(torch.randint(0, 6, (), generator=g)) :] = -1
    batch = dict(
        input_ids=torch.randint(60, (1, L), generator=g),
        hidden_states=torch.randn(1, L, 32 * len(aux), generator=g),
        document_ids=documents[None],
        loss_mask=((torch.rand(1, L, generator=g) < 0.5) & (documents >= 0)),
        verifier_last_hidden_states=torch.randn(1, L, 32, generator=g),
        position_ids=torch.arange(1, L + 1)[None],
    )
    return model, batch, pick(1, 2, 4)


@pytest.mark.statement("release-32")
@pytest.mark.parametrize("seed", range(16))
def test_lean_is_dense(seed):
    """Over random shapes, windows, norms and packings: loss, metrics and gradients of the lean path are those of the
    definition, to 1e-5."""
    model, batch, steps = random_model(seed)
    check_lean(model, batch, ttt_steps=steps, ttt_step_loss_decay=0.7, loss_config={"kl_div": 1.0, "tv": 0.5})
    assert (model.embed_tokens.weight.grad is not None) == model.config.embed_requires_grad


def test_targets_stay_in_their_document():
    """A later document's last states are no target of the earlier one: what the loss says to the earlier one's features
    does not change with them. Upstream's rule lets them in."""
    model, batch, _ = random_model(3)
    documents = torch.tensor([0] * 20 + [1] * 30)
    batch |= dict(document_ids=documents[None], loss_mask=torch.ones(1, 50, dtype=torch.bool))
    batch["loss_mask"][0, 24:] = False  # of document 1, the first rows alone
    other = batch | dict(verifier_last_hidden_states=batch["verifier_last_hidden_states"].clone())
    other["verifier_last_hidden_states"][0, 20:24] += 1
    for cross, same in ((False, True), (True, False)):
        supervised = ttt_supervision(batch["loss_mask"][0], documents, 3, cross)
        assert (
            bool((supervised[1:, 18:20] & (torch.arange(18, 20) + torch.arange(1, 3)[:, None] >= 20)).any()) is not same
        )
        reach = []
        for b in (batch, other):
            states = b["hidden_states"].detach().requires_grad_(True)
            model(**b | dict(hidden_states=states), ttt_steps=3, cross_document_targets=cross)[1].backward()
            reach.append(states.grad[0])
        first, second = documents == 0, documents == 1
        assert reach[0][first].abs().sum() > 0
        assert torch.allclose(reach[0][first], reach[1][first], rtol=1e-5, atol=1e-9) is same
        assert not torch.allclose(reach[0][second], reach[1][second])  # document 1 itself is trained either way


@pytest.mark.statement("release-14")
def test_embeddings_really_train():
    model, batch, _ = random_model(5)
    model.embed_tokens.weight.requires_grad_(True)
    model(**batch, ttt_steps=2)[1].backward()
    used = torch.zeros(60, dtype=torch.bool)
    used[batch["input_ids"][batch["document_ids"] >= 0]] = True
    moved = model.embed_tokens.weight.grad.abs().sum(-1) > 0
    assert moved.any() and not (moved & ~used).any()


@pytest.mark.parametrize("seed", range(6))
def test_drafting_is_what_was_trained(seed):
    """The drafter's key-value cache, fed in two parts, gives the logits of training's unrolled steps on the row that it
    drafted itself. Full attention only: a sliding window moves on while drafting, as in the serving engine, but stays
    at its row in training, as upstream."""
    model, _, _ = random_model(seed, windows=False)
    model.d2t = model.t2d = None
    model.config.speculators_config = None
    drafter, config = Eagle3Drafter.__new__(Eagle3Drafter), model.config
    drafter.model = model.eval()
    drafter.reset()
    g = torch.Generator().manual_seed(seed)
    n, k, vd = 12, 3, config.draft_vocab_size
    tokens, features = torch.randint(vd, (n,), generator=g), torch.randn(n - 1, 32 * config.num_aux, generator=g)
    drafter.propose(tokens[:7], features[:6], k, Sampling())
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, g))
    row = torch.cat([tokens[1:], tree.tokens])
    with torch.no_grad():
        hidden = model.dense_hidden(
            row,
            torch.cat([features, torch.zeros(k, features.shape[1])]),
            torch.zeros(len(row), dtype=torch.long),
            torch.arange(1, len(row) + 1),
            k,
        )
        for t, law in enumerate(tree.probs):
            torch.testing.assert_close(law, model.lm_head(hidden[t][n - 2]).softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_own_tokens_are_what_is_drafted(seed):
    """use_off_policy_tokens=False: later steps read what the drafter itself drafts. The last row's tokens are the
    drafter's chain; lean is dense in loss, metrics and gradients."""
    model, batch, steps = random_model(seed, windows=False)
    steps = max(steps, 2)
    model.eval()
    g = torch.Generator().manual_seed(seed)
    if model.d2t is not None:
        chosen = torch.randperm(60, generator=g)[: len(model.d2t)].sort().values
        model.d2t.copy_(chosen - torch.arange(len(chosen)))
    tokens, features = torch.randint(60, (12,), generator=g), torch.randn(11, 32 * model.config.num_aux, generator=g)
    drafter = Eagle3Drafter.__new__(Eagle3Drafter)
    drafter.model = model
    drafter.reset()
    row = tokens[None, 1:], features[None], torch.zeros(1, 11, dtype=torch.long)
    drafted, loss, metrics = model(row[0], row[1], row[2], ttt_steps=steps, use_off_policy_tokens=False)
    assert [int(t[0, -1]) for t in drafted] == drafter.propose(tokens, features, steps, Sampling()).tokens.tolist()
    assert loss is None and metrics == {}
    results = []
    for lean in (True, False):
        model.zero_grad()
        _, loss, metrics = model(**batch, ttt_steps=steps, lean=lean, use_off_policy_tokens=False)
        loss.backward()
        results.append((loss, metrics, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (a, ma, ga), (b, mb, gb) = results
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for key in ma:
        torch.testing.assert_close(ma[key], mb[key], rtol=1e-5, atol=1e-5)
    for key in ga:
        assert (ga[key] - gb[key]).norm() <= 1e-5 * gb[key].norm() + 1e-6, key
    assert loss != model(**batch, ttt_steps=steps)[1]
    first = model(**batch, ttt_steps=1, use_off_policy_tokens=False)[1]
    torch.testing.assert_close(first, model(**batch, ttt_steps=1)[1])  # one step reads no drafted token


def test_off_policy_in_training_alone():
    "As documented where the argument is given; where it is not, evaluation is measured as training is."
    given, evaluated = Eagle3DraftModel.get_trainer_kwargs(use_off_policy_tokens=True)
    assert (given["use_off_policy_tokens"], evaluated["use_off_policy_tokens"]) == (True, False)
    given, evaluated = Eagle3DraftModel.get_trainer_kwargs(use_off_policy_tokens=False)
    assert (given["use_off_policy_tokens"], evaluated["use_off_policy_tokens"]) == (False, False)
    given, evaluated = Eagle3DraftModel.get_trainer_kwargs()
    assert given == evaluated and given["use_off_policy_tokens"]
    assert "use_off_policy_tokens" not in SpeculatorModel.registered_class("peagle").training_arguments()


def test_forward_without_targets():
    "No verifier states: draft tokens and no loss, as the definition drafts them; no loss mask: every real position."
    model, batch, _ = random_model(4)
    model.eval()
    want = model(**batch, ttt_steps=2, lean=False).tokens
    given = {k: batch[k] for k in ("input_ids", "hidden_states", "document_ids")}
    out = model(**given, ttt_steps=2)
    assert out.loss is None and out.metrics == {} and all(map(torch.equal, out.tokens, want))
    everywhere = batch | dict(loss_mask=batch["document_ids"] >= 0)
    no_mask = {k: v for k, v in batch.items() if k != "loss_mask"}
    assert torch.equal(model(**no_mask)[1], model(**everywhere)[1])


SHAPE = dict(
    hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=60
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=4)).save_pretrained(folder)
    return str(folder)


def test_unsorted_layers(verifier):
    "vLLM reads layers in ascending order whatever the config says: so does the drafter."
    layer = LlamaConfig(**SHAPE, num_hidden_layers=1)
    model = Eagle3DraftModel.from_training_args(layer, verifier_name_or_path=verifier, target_layer_ids=[3, 1, 2])
    assert model.config.eagle_aux_hidden_state_layer_ids == model.target_layer_ids == [1, 2, 3]
    assert model.drafter().aux_layer_ids == (1, 2, 3)
    read = Eagle3SpeculatorConfig.from_dict(model.config.to_dict() | dict(eagle_aux_hidden_state_layer_ids=[2, 3, 1]))
    assert read == model.config


def test_verifier_config_is_the_layers_config(verifier):
    layer = LlamaConfig(**SHAPE, num_hidden_layers=1)
    named = Eagle3DraftModel.from_training_args(verifier_config=layer, verifier_name_or_path=verifier)
    assert named.config == Eagle3DraftModel.from_training_args(layer, verifier_name_or_path=verifier).config
    with pytest.raises(TypeError, match="verifier_config is missing"):
        Eagle3DraftModel.from_training_args(verifier_name_or_path=verifier)


@pytest.mark.parametrize("family", [MistralConfig, Qwen2Config])
def test_layers_like_llamas(family, verifier, tmp_path):
    "Trained and stored; vLLM's EAGLE-3 does not serve them, which the check says."
    layer = family(**SHAPE, num_hidden_layers=2)
    model = Eagle3DraftModel.from_training_args(layer, verifier_name_or_path=verifier)
    batch = random_model(0)[1]
    states = torch.randn(1, 50, 96, generator=torch.Generator().manual_seed(0))
    row = batch | dict(hidden_states=states)
    a, b = (model.eval()(**row, lean=lean)[1] for lean in (True, False))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path)
    again = SpeculatorModel.from_pretrained(tmp_path).eval()
    assert again.config == model.config and torch.equal(again(**row)[1], a)
    raw = model.config.to_dict()
    (said,) = (s for s in model.serving_violations(raw) if "model_type" in s)
    assert f"'{family.model_type}'" in said


def test_attention_named_by_the_layers():
    "`_attn_implementation` is the default; the argument `attn_impl` has the last word."
    cpu, layer = torch.device("cpu"), LlamaConfig(**SHAPE)
    for name, lean, dense in (
        (None, "blocked", "sdpa"),
        ("eager", "blocked", "eager"),
        ("sdpa", "blocked", "sdpa"),
        ("simple_flex_attention", "flex", "flex"),
        ("flex_attention", "flex", "flex"),
    ):
        layer._attn_implementation = name
        assert [attention_back_end(None, cpu, on, layer) for on in (True, False)] == [lean, dense]
        assert attention_back_end("eager", cpu, False, layer) == "eager"
    model, batch, _ = random_model(1)
    model.config.transformer_layer_config._attn_implementation = "simple_flex_attention"
    if torch.__version__ >= "2.11":  # before, torch computes it with a matrix of all scores
        with pytest.raises(ValueError, match="attn_impl='flex' has no backward on a CPU"):
            model(**batch)
    assert model(**batch, attn_impl="blocked").loss.isfinite()
