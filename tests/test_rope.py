"""Every RoPE type of transformers, partial rotation and parameters by layer type: against transformers' own modules, in
training and in drafting."""

import copy

import pytest
import torch
import transformers
from blocks import dense_states
from matrix import DRAFTERS, H, V, batch_for, drafter, train_step, verifier
from packaging.version import Version
from test_dflash2 import block_rows
from test_lilicorr import block_rows as lattice_rows
from test_xpress import block_distributions
from transformers import LlamaConfig, Phi3Config, Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.attention import attention, causal
from speculators_nb.nn.layers import DecoderLayer, Rotary, draft_layer_config, rotate

D, SHORT = 8, 16  # channels of a head; what the models were trained for: rows and documents here are longer
BASE = dict(rope_theta=100.0)
TYPES = {
    "default": {},
    "linear": dict(factor=2.0),
    "dynamic": dict(factor=3.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=4, beta_fast=2.0, beta_slow=0.25),
    "longrope": dict(
        factor=2.0,
        short_factor=[1.0, 1.5, 2.0, 2.5],
        long_factor=[3.0, 2.0, 4.0, 5.0],
        original_max_position_embeddings=SHORT,
    ),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8),
    "proportional": dict(partial_rotary_factor=0.5),
}
ROPES = {kind: BASE | dict(rope_type=kind) | given for kind, given in TYPES.items()}
HALF = {
    f"{kind}, half": rope
    | dict(partial_rotary_factor=0.5)
    | (
        {k: [1.0, 4.0] if "short" in k else [3.0, 6.0] for k in ("short_factor", "long_factor")}
        if kind == "longrope"
        else {}
    )
    for kind, rope in ROPES.items()
    if kind != "proportional"
}
NESTED = {
    "by layer type": dict(
        full_attention=BASE | dict(rope_type="default"),
        sliding_attention=dict(rope_type="linear", rope_theta=7.0, factor=2.0),
    )
}
EVERY = ROPES | HALF | NESTED
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=D,
    num_hidden_layers=1,
    vocab_size=64,
    max_position_embeddings=SHORT,
    attn_implementation="eager",
)
# what a drafter can get wrong: angles that depend on the length, a part of a head, parameters by layer type
ALWAYS = ["dynamic", "longrope, half", "by layer type"]
WITH_ATTENTION = ["eagle", "eagle3", "eagle3 qwen3", "peagle", "dflash", "dflash2", "dspark vanilla", "xpress"]
WITH_ATTENTION += ["domino", "lilicorr", "mtp"]


def layer_config(rope, cls=LlamaConfig, **sizes):
    config = cls(**SIZES | sizes)
    config.rope_parameters = copy.deepcopy(rope)
    return config


def flat(name):
    "What draft layers make of the parameters: those of sliding layers, where they are by layer type."
    return EVERY[name].get("sliding_attention", EVERY[name])


def test_every_type_is_here():
    assert set(ROPES) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("length", [3, SHORT, SHORT + 1, 60])
@pytest.mark.parametrize("name", [*ROPES, *NESTED])
def test_the_table_is_transformers(name, length):
    """Cosines and sines of a whole row, of parts of it given its length, and in another order of calls: to 1e-6 of a
    fresh module of transformers."""
    x, at, ours = torch.zeros(1, length, 32), torch.arange(length), Rotary(layer_config(EVERY[name]))
    theirs = LlamaRotaryEmbedding(layer_config(flat(name)))(x, at[None])
    for _ in range(2):
        for mine, want in zip(ours(x, at), theirs):
            torch.testing.assert_close(mine, want[0], rtol=1e-6, atol=1e-6)
        for mine, want in zip(ours(x, at[::2], ours.length(at)), theirs):
            torch.testing.assert_close(mine, want[0, ::2], rtol=1e-6, atol=1e-6)
        ours(x, torch.arange(200))  # a longer text in between leaves nothing behind
    assert ours.length(at) == (length if name in ("dynamic", "longrope") else None)
    assert [t.shape for t in ours(x, at[:0])] == [(0, D)] * 2


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"),
    reason="transformers 5.16 rotates the whole head for these types",
)
@pytest.mark.parametrize("length", [SHORT, 40])
@pytest.mark.parametrize("name", HALF)
def test_half_a_head(name, length):
    """With partial_rotary_factor the first channels are rotated, as in Phi-3's layers and by the frequencies of
    Qwen3-Next's module, and the rest stays."""
    config = layer_config(EVERY[name], Qwen3NextConfig)
    x, at, q = torch.zeros(1, length, 32), torch.arange(length), torch.randn(1, 4, length, D)
    theirs, ours = Qwen3NextRotaryEmbedding(config)(x, at[None]), Rotary(layer_config(EVERY[name]))(x, at)
    for mine, want in zip(ours, theirs):
        torch.testing.assert_close(mine, want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotate(q[0], ours), apply_rotary_pos_emb(q, q, *theirs)[0][0], rtol=1e-5, atol=1e-6)
    assert torch.equal(rotate(q[0], ours)[..., D // 2 :], q[0, ..., D // 2 :])
    assert Phi3Config().model_type == "phi3"


def test_text_positions_of_a_family_with_three_coordinates():
    "Qwen3.5 counts time, height and width; for text the three are equal, and its interleaved sections are plain RoPE."
    rope = BASE | dict(rope_type="default", partial_rotary_factor=0.5, mrope_section=[1, 1, 0])
    x, at = torch.zeros(1, 30, 32), torch.arange(30)
    theirs = Qwen3_5TextRotaryEmbedding(layer_config(rope, Qwen3_5TextConfig))(x, at.expand(3, 1, -1))
    for mine, want in zip(Rotary(layer_config(rope))(x, at), theirs):
        torch.testing.assert_close(mine, want[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", [*ROPES, *NESTED])
def test_the_layer_is_transformers(name, family):
    "A decoder layer with the same weights, on a text that is longer than what it was trained for."
    cls, layer, table = dict(
        llama=(LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
        qwen3=(Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
    )[family]
    torch.manual_seed(0)
    theirs, ours = layer(layer_config(flat(name), cls), 0).eval(), DecoderLayer(layer_config(EVERY[name], cls))
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.1, 0.2)
    ours.load_state_dict(theirs.state_dict())
    x, at = torch.randn(1, 40, 32), torch.arange(40)
    rope, (z, residual) = Rotary(layer_config(EVERY[name], cls))(x, at), ours.inputs(x[0])
    heads = attention(
        ours.self_attn.query(z, rope)[None], *(t[None] for t in ours.self_attn.key_value(z, rope)), causal()
    )[0]
    bias = torch.full((40, 40), float("-inf")).triu(1)[None, None]
    want = theirs(x, attention_mask=bias, position_embeddings=table(layer_config(flat(name), cls))(x, at[None]))
    torch.testing.assert_close(
        ours.finish(heads, residual), (want if torch.is_tensor(want) else want[0])[0], rtol=1e-5, atol=1e-5
    )


def with_rope(name, rope):
    "A drafter of the matrix whose draft layers have these parameters; MTP's layer is its verifier's."
    family = "qwen3" if name == "mtp" else "llama"
    given = dict(rope_parameters=copy.deepcopy(EVERY[rope]), max_position_embeddings=SHORT)
    if name != "mtp":
        return drafter(name, family, **given), family
    model = drafter(name, family)
    config = copy.deepcopy(model.config)
    for key, value in given.items():
        setattr(config.transformer_layer_config, key, value)
    other = type(model)(config)
    other.load_state_dict(
        {n: w for n, w in model.state_dict().items() if not n.startswith("target_head.")}, strict=False
    )
    other.target_head, other.verifier_layers = model.target_head, model.verifier_layers
    return other, family


def each_with(names):
    "(drafter, rope): each drafter with `ALWAYS`; every other type, whose table is tested above, with some drafter."
    others = [rope for rope in EVERY if rope not in ALWAYS]
    return [(name, rope) for i, name in enumerate(names) for rope in (*ALWAYS, *others[i :: len(names)])]


@pytest.mark.parametrize("name,rope", each_with(WITH_ATTENTION))
def test_training(name, rope):
    """Packed rows, several steps or blocks, subsets of rows: the lean step is the definition; a second call on the same
    batch gives the same bits, whatever was called in between; a row without supervision has loss 0; and the parameters
    matter."""
    model, family = with_rope(name, rope)
    batch = batch_for(model, family)
    loss, grad = train_step(model, batch, name)
    dense, dense_grad = train_step(model, batch, name, lean=False)
    assert loss == pytest.approx(dense, rel=1e-5) and (grad - dense_grad).norm() <= 1e-4 * dense_grad.norm()
    train_step(model, batch_for(model, family, 30), name)
    again, again_grad = train_step(model, batch, name)
    assert again == loss and torch.equal(again_grad, grad)
    nothing, zeros = train_step(model, batch | dict(loss_mask=torch.zeros_like(batch["loss_mask"])), name)
    assert nothing == 0 and not zeros.any()
    if rope != "default":
        plain, _ = with_rope(name, "default")
        assert train_step(plain, batch, name)[0] != pytest.approx(loss, rel=1e-6)


# distributions of a block's slots, the tokens in front being those of a text
BLOCK_ROWS = {"dflash2": block_rows, "lilicorr": lattice_rows, "xpress": block_distributions}
TOKENS = torch.randint(V - 1, (26,), generator=torch.Generator().manual_seed(3))


def drafted(model, k):
    """Log-probabilities [k, V] of a chain of zeros behind TOKENS, read in three parts as a decoder does, drafting in
    between."""
    agent, (_, target, _), n = model.drafter(), verifier("qwen3"), len(TOKENS)
    out = target(TOKENS[None], want_logits=False, use_cache=False).hidden_states[0]
    features = torch.cat([out[:, i * H : (i + 1) * H] for i in agent.aux_layer_ids], -1)
    for start, stop in ((0, 9), (9, 17)):
        with torch.no_grad(), agent.grow(TOKENS[: stop + 1], features[start:stop], k) as law:
            law(torch.tensor([-1]), TOKENS[:0], TOKENS[:0])
    with torch.no_grad(), agent.grow(TOKENS, features[17 : n - 1], k) as law:
        rows = [
            law(torch.tensor([i]), torch.zeros(i + 1, dtype=torch.long), torch.arange(-1, i)) for i in range(-1, k - 1)
        ]
    return torch.cat(rows), features


def dense(model, name, features, k):
    "The same by the definition, on a row that is the text."
    n, zero = len(TOKENS), torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        if name == "mtp":
            hidden = model.dense_hidden(
                TOKENS,
                features,
                zero.expand(n),
                torch.arange(n),
                k,
                True,
                length=model.rotary.length(torch.arange(n - 1)),
            )
            return torch.stack([model.lm_head(h[n - 2]) for h in hidden]).log_softmax(-1)
        if name == "dflash":
            row = torch.cat([features[: n - 1], torch.zeros_like(features[:1])])
            states = dense_states(model, TOKENS, row, torch.tensor([n - 1]), zero.expand(n), torch.arange(n))
            return model.lm_head(states[0, -k:]).log_softmax(-1)
        if name in BLOCK_ROWS:
            row = torch.cat([TOKENS, zero.expand(k)])
            return BLOCK_ROWS[name](model, row, features[: n - 1], n - 1, k).log()
        if name == "peagle":
            ids = torch.cat([TOKENS[1:], zero.expand(k - 1)])
            rows = torch.cat([features[: n - 1], torch.zeros(k - 1, features.shape[1])])
            anchor = torch.cat([torch.arange(n - 1), torch.full((k - 1,), n - 2)])
            depth = torch.cat([zero.expand(n - 1), torch.arange(1, k)])
            states = model.dense_rollouts(ids, rows, zero.expand(len(ids)), anchor, depth)
            return model.lm_head(states[n - 2 :]).log_softmax(-1)
        first = model.target_head.norm(features[: n - 1]) if name == "eagle" else features[: n - 1]
        hidden = model.dense_hidden(TOKENS[1:], first, zero.expand(n - 1), torch.arange(1, n), k)
        head = model.logits if name == "eagle" else model.lm_head
        return torch.stack([head(h[-1]) for h in hidden]).log_softmax(-1)


@pytest.mark.parametrize("name,rope", each_with([n for n in WITH_ATTENTION if n not in ("domino", "dspark vanilla")]))
def test_drafting(name, rope):
    """What is drafted step by step, with a cache that was begun when the text was shorter, is the definition on the
    whole text."""
    model, _ = with_rope(name, rope)
    k = 3
    got, features = drafted(model.eval(), k)
    torch.testing.assert_close(got, dense(model, name, features, k), rtol=1e-4, atol=1e-4)
    if rope != "default":
        plain, _ = with_rope(name, "default")
        assert (drafted(plain.eval(), k)[0].exp() - got.exp()).abs().max() > 1e-4


def test_frequencies_stay_float32():
    "A model in bfloat16 keeps the angles of float32: at position 4,000 eight bits would be off by whole turns."
    model = drafter("eagle3", "llama")
    want = model.rotary.inv_freq.clone()
    model.to(torch.bfloat16)
    assert (
        model.fc.weight.dtype == torch.bfloat16
        and model.rotary.inv_freq.dtype == torch.float32
        and torch.equal(model.rotary.inv_freq, want)
    )
    assert "rotary.inv_freq" not in model.state_dict()
    with torch.device("meta"):
        assert not type(model)(model.config).rotary.inv_freq.is_meta


@pytest.mark.parametrize("kind", ["longrope", "nested", "proportional"])
def test_draft_layers_for_a_verifier(kind):
    """Draft layers take a verifier's RoPE: longrope with the part of a head that its factors are made for, of
    parameters by layer type those of their own type."""
    if kind == "longrope":
        config = draft_layer_config(
            Phi3Config(
                **{k: v for k, v in SIZES.items() if k != "head_dim"},
                rope_parameters=HALF["longrope, half"],
                original_max_position_embeddings=SHORT,
            )
        )
        assert Rotary(config).inv_freq.shape == (2,)
    elif kind == "nested":
        text = layer_config(NESTED["by layer type"], Qwen3Config, num_hidden_layers=2)
        assert (
            draft_layer_config(text).rope_parameters["rope_theta"] == 100.0
            and draft_layer_config(text, full_attention_indices=()).rope_parameters["rope_theta"] == 7.0
        )
    else:
        assert Rotary(draft_layer_config(layer_config(ROPES["proportional"]))).inv_freq.shape == (D // 2,)
    assert SpeculatorModel.registered_class(DRAFTERS["eagle3"][0]).__name__ == "Eagle3DraftModel"
