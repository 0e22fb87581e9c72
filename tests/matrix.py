"""Drafters x losses x verifier families, tiny: what the tests of precision, RoPE and configs build."""

import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from speculators_nb.data.packing import collate
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.nn.losses import LOSSES
from speculators_nb.verifier.tapped_model import Verifier

V, H = 96, 32
PLAIN = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=64,
    initializer_range=0.2,
)
SIZES = PLAIN | dict(num_key_value_heads=2, head_dim=8)
HYBRID = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
PARTIAL = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
# plain RMS norm; the same with other layers; (1 + w) norm and soft-cap; layer norm with a scale on the logits; layer
# norm with a bias; hybrids for MTP
VERIFIERS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=8, final_logit_softcapping=10.0),
    "cohere": CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logit_scale=0.5),
    "gpt_neox": GPTNeoXConfig(**PLAIN),
    "qwen3_next": Qwen3NextConfig(**SIZES, **HYBRID, **MOE, rope_parameters=dict(PARTIAL)),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **HYBRID, rope_parameters=PARTIAL | dict(mrope_section=[1, 1, 0])),
}
BLOCK = dict(block_size=4, mask_token_id=V - 1, draft_arch="qwen3", num_layers=2)
DRAFTERS = {  # name -> (algorithm, arguments of from_training_args, of get_trainer_kwargs)
    "eagle": ("eagle", {}, dict(noise_std=0.0)),
    "hass": ("eagle", dict(layernorms=True), dict(noise_std=0.0, forward_num_total=3)),
    "hass plain": ("eagle", dict(fusion_bias=True), dict(noise_std=0.0, forward_num_total=2)),
    "eagle3": ("eagle3", dict(norm_before_fc=True), dict(ttt_steps=3, ttt_step_loss_decay=0.8)),
    "eagle3 qwen3": (
        "eagle3",
        dict(draft_arch="qwen3", num_layers=2, norm_output=True, fc_norm=True, embed_requires_grad=True),
        dict(ttt_steps=2),
    ),
    "eagle3 latent": (
        "eagle3",
        dict(draft_arch="deepseek_v3", num_layers=2, fc_norm=True, norm_output=True),
        dict(ttt_steps=3),
    ),
    "peagle": ("peagle", dict(mask_token_id=V - 1, num_depths=4), dict(num_depths=4)),
    "peagle latent": (
        "peagle",
        dict(draft_arch="deepseek_v3", num_layers=2, mask_token_id=V - 1, num_depths=4),
        dict(num_depths=4),
    ),
    "dflash": ("dflash", BLOCK, dict(max_anchors=16, per_position_loss_weight="fixed-exp-decay")),
    **{
        f"dspark {kind}": ("dspark", BLOCK | dict(markov_rank=8, markov_head_type=kind), dict(max_anchors=16))
        for kind in ("vanilla", "gated", "rnn")
    },
    "dflash2": ("dflash2", BLOCK | dict(selector_rank=8, selector_top_k=5), dict(max_anchors=16)),
    "xpress": ("xpress", BLOCK | dict(xpress_rank=8), dict(max_anchors=16)),
    "domino": ("domino", BLOCK | dict(emb_dim=8, gru_hidden_dim=8), dict(max_anchors=16)),
    "lilicorr": (
        "lilicorr",
        BLOCK | dict(lilicorr_hidden_size=8, lilicorr_factor_dim=8, lilicorr_num_heads=2),
        dict(max_anchors=16),
    ),
    "query_only": ("query_only", {}, dict(ttt_steps=3)),
    "mtp": ("mtp", dict(fresh_head=True), {}),
    "mlp": ("mlp", dict(num_heads=3, intermediate_size=H), {}),
    "medusa": ("medusa", dict(num_heads=3), {}),
}
MIXTURE = {"kl_div": 0.5, "jsd": 0.3, "tv": 0.2}
TOKEN_LOSS = ("mtp", "mlp", "medusa")  # trained on the data's tokens, with cross-entropy alone
DOCUMENTS = (21, 14, 29)


KEYS = "llama", "qwen3"  # verifiers whose keys a query-only drafter makes again


def fits(name, family):
    "Whether a drafter can be made for a verifier."
    return name != "query_only" or family in KEYS


def family_of(name):
    "A verifier for a drafter."
    return "qwen3" if name == "mtp" else "llama"


@lru_cache(None)
def verifier(family):
    "A random verifier on disk, and the samples that it makes: (folder, Verifier, samples)."
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(VERIFIERS[family], dtype=torch.float32)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # norms and biases off their initial values
    folder = tempfile.mkdtemp(prefix=f"{family}-")
    model.save_pretrained(folder)
    verifier, samples = Verifier(model, range(5)), []
    for n in DOCUMENTS:
        ids = torch.randint(V - 1, (1, n))
        out = verifier(ids, want_logits=False, use_cache=False)  # of layers 0 to 4, each H wide
        samples.append(
            dict(
                input_ids=ids[0],
                loss_mask=torch.arange(n) >= n // 4,
                hidden_states=out.hidden_states[0],
                verifier_last_hidden_states=out.last_hidden_states[0],
            )
        )
    return Path(folder), verifier, samples


def drafter(name, family, spread=0.05, **layer):
    "A drafter for a random verifier, moved off its initial weights; `layer` overrides entries of its layers' config."
    algorithm, make, _ = DRAFTERS[name]
    folder, target, _ = verifier(family)
    make = dict(make)
    config = draft_layer_config(target.model.config, make.pop("draft_arch", "llama"), make.pop("num_layers", 1))
    for key, value in layer.items():
        setattr(config, key, value)
    torch.manual_seed(1)
    model = SpeculatorModel.registered_class(algorithm).from_training_args(
        config, verifier_name_or_path=str(folder), **make
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += spread * torch.randn_like(p)
    return model


def rows_for(model, family):
    "The samples of a random verifier with the features of the layers that the drafter reads."

    def chosen(x):
        return torch.cat([x[:, i * H : (i + 1) * H] for i in model.drafter().aux_layer_ids], -1)

    return [s | dict(hidden_states=chosen(s["hidden_states"])) for s in verifier(family)[2]]


def batch_for(model, family, length=72):
    "One packed row with padding at its end."
    return collate(rows_for(model, family), length, shift=model.shift)


def losses_of(name):
    return [None] if DRAFTERS[name][0] in TOKEN_LOSS else [*LOSSES, MIXTURE]


def full_gradient(p):
    "The gradient of a parameter, dense and gathered from all ranks where it is sharded; zeros where it has none."
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    if hasattr(grad, "full_tensor"):
        grad = grad.full_tensor()
    return grad.to_dense() if grad.is_sparse else grad


def train_step(model, batch, name, loss=None, autocast=None, seed=0, **kwargs):
    "(loss, gradient of every trained parameter as one vector) of a step, under autocast to a dtype where one is given."
    given = DRAFTERS[name][2] | ({} if loss is None else dict(loss_fn=loss))
    call = model.get_trainer_kwargs(**given)[0] | kwargs
    model.train().zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        value = model(**batch, **call)[1]
    value.backward()
    grads = [full_gradient(p) for p in model.parameters() if p.requires_grad]
    return value.item(), torch.cat([g.flatten().double() for g in grads])
