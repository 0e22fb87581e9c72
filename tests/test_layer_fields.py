"""Every field of the configs that draft layers can have: honoured as transformers' layers do, refused by name, or
without effect on the numbers."""

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from speculators_nb.models.mtp_families import FAMILIES
from speculators_nb.nn.attention import attention, causal, sliding_window
from speculators_nb.nn.layers import LATENT_SIZES, DecoderLayer, Rotary, layer_window, refuse_dropout

HONOURED = {  # by the layer, or by what is around it: sizes, head's and embedding's vocabulary, initial weights, RoPE
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "vocab_size",
    "max_position_embeddings",
    "initializer_range",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "model_type",
}
REFUSED = {"attention_dropout"}
WITHOUT_EFFECT = {  # on what a draft layer computes
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "use_cache",
    "pretraining_tp",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
}
OF_THE_VERIFIERS_LAYER = {  # MTP's layer is transformers' own, made from this config
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "decoder_sparse_step",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts_per_tok",
    "num_experts",
    "norm_topk_prob",
    "output_router_logits",
    "router_aux_loss_coef",
    "mlp_only_layers",
    "partial_rotary_factor",
    "full_attention_interval",
}
OF_LATENT_ATTENTION = {*LATENT_SIZES, "rope_interleave", "qk_head_dim"}
OF_EXPERTS = {  # draft layers are dense
    "moe_intermediate_size",
    "n_shared_experts",
    "n_routed_experts",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "norm_topk_prob",
    "output_router_logits",
    "num_mtp_layers",
    "num_nextn_predict_layers",
}
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=2,
    vocab_size=64,
    attn_implementation="eager",
)
FAMILY = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}


@pytest.mark.parametrize(
    "config", [LlamaConfig, Qwen3Config, Qwen3NextConfig, Qwen3_5TextConfig], ids=lambda c: c.__name__
)
def test_every_field_has_a_place(config):
    "A field that a later transformers adds must be looked at."
    known = (
        HONOURED
        | REFUSED
        | WITHOUT_EFFECT
        | (set() if config in (LlamaConfig, Qwen3Config) else OF_THE_VERIFIERS_LAYER)
    )
    assert set(config().to_dict()) - known == set()
    assert config in (LlamaConfig, Qwen3Config) or config.model_type in FAMILIES


def test_every_field_of_latent_attention_has_a_place():
    known = HONOURED | REFUSED | WITHOUT_EFFECT | OF_LATENT_ATTENTION | OF_EXPERTS
    assert set(DeepseekV3Config().to_dict()) - known == set()


@pytest.mark.statement("release-52")
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize(
    "change",
    [
        {},
        dict(hidden_act="gelu"),
        dict(hidden_act="relu"),
        dict(rms_norm_eps=0.1),
        dict(attention_bias=True),
        dict(mlp_bias=True),
        dict(head_dim=16),
        dict(num_key_value_heads=1),
        dict(num_key_value_heads=4),
        dict(num_attention_heads=2, head_dim=4),
        dict(intermediate_size=20),
        dict(layer_types=["full_attention", "sliding_attention"], sliding_window=4, use_sliding_window=True),
        dict(sliding_window=4),
    ],
    ids=str,
)
def test_honoured_as_transformers_does(family, change):
    """A layer with this field set, with transformers' weights, computes what transformers' layer does (1e-5); the
    second layer, which may slide."""
    if family == "qwen3" and "mlp_bias" in change:
        pytest.skip("Qwen3's MLP has no bias: refused, see tests/bad/numbers.py")
    cls, layer, table = FAMILY[family]
    config = cls(**SIZES | change)
    torch.manual_seed(0)
    theirs, ours = layer(config, 1).eval(), DecoderLayer(config, 1)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.1, 0.2)
    ours.load_state_dict(theirs.state_dict())
    x, at = torch.randn(1, 12, 32), torch.arange(12)
    rope, (z, residual), window = Rotary(config)(x, at), ours.inputs(x[0]), layer_window(config, 1)
    mask = causal() if window is None else causal() & sliding_window(window)
    heads = attention(
        ours.self_attn.query(z, rope)[None], *(t[None] for t in ours.self_attn.key_value(z, rope)), mask, "eager"
    )[0]
    bias = torch.zeros(12, 12).masked_fill(~mask.dense(12, 12), float("-inf"))[None, None]
    want = theirs(x, attention_mask=bias, position_embeddings=table(config)(x, at[None]))
    torch.testing.assert_close(
        ours.finish(heads, residual), (want if torch.is_tensor(want) else want[0])[0], rtol=1e-5, atol=1e-5
    )
    assert (window == 4) == ("layer_types" in change)


@pytest.mark.parametrize("family", FAMILY)
def test_dropout_is_refused(family):
    "Flex attention, which trains on CUDA, has none: half of the runs would leave it out in silence."
    for given in (0.1, 0.5):
        with pytest.raises(ValueError, match=f"attention_dropout={given}: .*set it to 0"):
            DecoderLayer(FAMILY[family][0](**SIZES, attention_dropout=given))
    refuse_dropout(FAMILY[family][0](**SIZES, attention_dropout=0.0))
