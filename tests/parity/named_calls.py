"""One call of each public name of speculators 0.9.0, as a function of the name's value: `record_names.py` makes them of
upstream's, tests/test_upstream_names.py of ours. Answers are plain JSON."""

import random

import torch
from transformers import LlamaConfig, Qwen3Config

V = 6


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(kind=LlamaConfig, **fields):
    sizes = dict(vocab_size=V, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    return kind(**sizes | dict(num_key_value_heads=1, head_dim=4) | fields)


Q, P = numbers(1, 4, V), numbers(1, 4, V, seed=1)
MASK, SLOT = torch.tensor([[1, 0, 1, 1]]), torch.tensor([[0, 1, 0, 1]])
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, -1])
SAMPLE = dict(
    input_ids=torch.arange(4),
    hidden_states=numbers(4, 3),
    verifier_last_hidden_states=numbers(4, 2),
    loss_mask=torch.ones(4),
    lengths=torch.tensor([4]),
    position_ids=torch.arange(4),
)
PAIR = dict(verifier=dict(name_or_path="org/x", architectures=["LlamaForCausalLM"]))


def plain(value):
    "As JSON, numbers rounded."
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return "-inf" if value == float("-inf") else round(value, 5)
    return value


def seeded(call):
    torch.manual_seed(0)
    random.seed(0)
    return call()


def mask_of(mask, q, kv):
    zero = torch.zeros((), dtype=torch.int64)
    found = mask(zero, zero, torch.arange(q)[:, None], torch.arange(kv))
    return found.int()


def loss(f):
    return f(Q, P)


def described(cls, **fields):
    "What a config class makes of fields."
    config = cls(**fields)
    return {name: getattr(config, name) for name in fields if name != "transformer_layer_config"} | dict(
        type=config.speculators_model_type
    )


def shapes(cls, config):
    "The trained tensors of layers."
    return {n: list(w.shape) for n, w in cls(config).state_dict().items() if n.startswith(("layers.", "fc."))}


def dflash_mask(f):
    mask, q, kv = f(DOCUMENTS, 6, torch.tensor([1, 4]), 2)
    return [q, kv, mask_of(mask, q, kv)]


def accuracy(f):
    right = torch.tensor([[True, False, True, True]])
    counts = f(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 0, 4]]), MASK, right)
    return [*counts, right]


def decayed(f):
    return f(Q, P, MASK, SLOT, decay_fn=lambda pos, **_: 0.5**pos, **LOSS)


EAGER = ["kl_div_loss", "reverse_kl_div_loss", "js_div_loss", "ce_loss", "tv_loss", "neg_log_acceptance_loss"]
LOSS = {}  # filled by the caller: loss_fn, an eager one

CALLS = {
    **{f"losses.eager.{name}": loss for name in EAGER},
    "losses.eager.lk_hybrid_loss": lambda f: f(Q, P, eta=2.0),
    "losses.dflash_loss_decay": lambda f: f(torch.arange(4.0), gamma=2.0),
    "losses.exp_loss_decay": lambda f: f(torch.arange(4.0), gamma=0.5),
    "losses.dpace_loss_decay": lambda f: f(SLOT, MASK, 2, 0.5, elementwise_loss=Q[..., 0].abs()),
    "losses.resolve_loss_config": lambda f: {n: w for n, (_, w) in f('{"ce": 0.1, "tv": 0.9}', "eager").items()},
    "losses.loss_function": decayed,
    "losses.compound_loss": lambda f: f(Q, P, MASK, SLOT, {"a": (LOSS["loss_fn"], 0.3), "b": (LOSS["loss_fn"], 2.0)}),
    "models.attention.create_float_mask": lambda f: f(
        lambda b, h, q, kv: q >= kv, Q_LEN=3, KV_LEN=4, dtype=torch.float32
    ),
    "models.eagle3.attention.create_combined_mask_mod": lambda f: mask_of(f(DOCUMENTS, 6), 6, 12),
    "models.eagle3.attention.extend_dense_mask_for_draft_tokens": lambda f: f(torch.ones(1, 1, 3, 3) > 0, 3).int(),
    "models.dflash.attention.create_anchor_block_mask_mod": dflash_mask,
    "models.peagle.attention.create_peagle_mask_mod": lambda f: mask_of(
        f(torch.tensor([0, 1, 2, 3, 4, 5, 0, 3]), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]), DOCUMENTS), 8, 8
    ),
    "models.eagle3.shift_batch": lambda f: f(SAMPLE),
    "models.eagle3.data.shift_batch": lambda f: f(SAMPLE),
    "models.mtp.shift_batch_mtp": lambda f: f(SAMPLE),
    "models.mtp.data.shift_batch_mtp": lambda f: f(SAMPLE),
    "models.mtp.compute_step_weights": lambda f: f(0.5, 4),
    "models.mtp.core.compute_step_weights": lambda f: f(),
    "models.dflash.utils.select_anchors": lambda f: seeded(lambda: list(f(torch.ones(1, 30), 5, 4))),
    "models.dflash.utils.get_base_indices_for_anchored_blocks": lambda f: f(torch.tensor([[1, 7]]), 3),
    "models.peagle.data.generate_cod_sample_indices": lambda f: seeded(lambda: list(f(20, torch.ones(1, 20), 4))),
    "models.metrics.compute_accepted_length_counts": lambda f: list(
        f(torch.tensor([[1, 1, 0], [0, 1, 1]]) > 0, torch.tensor([[1, 1, 1], [1, 1, 0]]) > 0)
    ),
    "models.metrics.compute_accuracy_single_step": accuracy,
    "models.metrics.compute_accuracy_multi_step": lambda f: list(
        f(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 0, 4]]), MASK, SLOT, 2)
    ),
    "models.eagle3.metrics.align_for_step": lambda f: list(f(Q, P, MASK, None, 2)),
    "models.utils.resolve_draft_intermediate_size": lambda f: f(layers()),
    "models.utils.flatten_rope_parameters": lambda f: f(layers()).rope_parameters,
    "models.utils.conditional_torch_compile": lambda f: f(abs)(-3),
    "convert.eagle.utils.find_vocab_size": lambda f: f({"a": {"b": {"vocab_size": 7}}}),
    "convert.eagle.utils.detect_fusion_bias_and_layernorms": lambda f: list(f({"fc.bias": Q})),
    "config.VerifierConfig": lambda C: C(**PAIR["verifier"]).model_dump(),
    "config.SpeculatorsConfig": lambda C: (
        C(
            algorithm="eagle3",
            proposal_methods=[dict(proposal_type="greedy")],
            default_proposal_method="greedy",
            **PAIR,
        ).default_proposal_method
    ),
    "config.SpeculatorModelConfig": lambda C: (
        C.from_dict(
            dict(speculators_model_type="eagle3", draft_vocab_size=V, transformer_layer_config=layers().to_dict())
        ).speculators_model_type
    ),
    "config.reload_schemas": lambda f: f(),
    "model.SpeculatorModel": lambda C: "eagle3" in (C.registry or {}),
    "proposals.base.TokenProposalConfig": lambda C: "greedy" in C.registry,
    "proposals.greedy.GreedyTokenProposalConfig": lambda C: C(speculative_tokens=4).model_dump(),
    **{
        f"models{where}.Eagle3SpeculatorConfig": lambda C: described(
            C, transformer_layer_config=layers(), draft_vocab_size=V, norm_before_residual=True
        )
        for where in ("", ".eagle3", ".eagle3.config")
    },
    **{
        f"models{where}.PEagleSpeculatorConfig": lambda C: described(
            C, transformer_layer_config=layers(), draft_vocab_size=V, mask_token_id=2
        )
        for where in ("", ".peagle", ".peagle.config")
    },
    **{
        f"models{where}.{name}SpeculatorConfig": lambda C: described(
            C, transformer_layer_config=layers(Qwen3Config), draft_vocab_size=V, mask_token_id=2, block_size=4
        )
        for name in ("DFlash", "DSpark")
        for where in ("", f".{name.lower()}", f".{name.lower()}.config")
    },
    **{
        f"models{where}.MTPSpeculatorConfig": lambda C: described(C, transformer_layer_config=layers(Qwen3Config))
        for where in ("", ".mtp", ".mtp.config")
    },
    **{
        f"models{where}.{name}DraftModel": lambda C, fields=fields: shapes(
            C, C.config_class(transformer_layer_config=layers(Qwen3Config), draft_vocab_size=V, **fields)
        )
        for name, fields in dict(
            Eagle3=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
            DFlash=dict(mask_token_id=2, block_size=4, aux_hidden_state_layer_ids=[1, 2]),
            PEagle=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3], mask_token_id=2),
            DSpark=dict(mask_token_id=2, block_size=4, aux_hidden_state_layer_ids=[1, 2]),
        ).items()
        for where in ("", f".{name.lower()}", f".{name.lower()}.core")
    },
}


def call(name, value):
    return plain(CALLS[name](value))
