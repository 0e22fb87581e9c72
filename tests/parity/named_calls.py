"""One call of each public name of speculators 0.9.0, as a function of the name's value: `record_names.py` makes them of
upstream's, tests/test_upstream_names.py of ours. Answers are plain JSON."""

import random
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_origin

import check_converters
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoConfig, LlamaConfig, Qwen3Config

FIXTURES = Path(__file__).parents[1] / "fixtures"
QWEN3 = FIXTURES / "eagle3_verifier_qwen3"
HEADS = ["qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe"]  # verifiers with an MTP head
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
    parts = ("layers.", "fc.", "mtp_layers.")
    return {n: list(w.shape) for n, w in cls(config).state_dict().items() if n.startswith(parts)}


def dflash_mask(f):
    mask, q, kv = f(DOCUMENTS, 6, torch.tensor([1, 4]), 2)
    return [q, kv, mask_of(mask, q, kv)]


def accuracy(f):
    right = torch.tensor([[True, False, True, True]])
    counts = f(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 0, 4]]), MASK, right)
    return [*counts, right]


def decayed(f):
    return f(Q, P, MASK, SLOT, decay_fn=lambda pos, **_: 0.5**pos, loss_fn=LOSS["loss_fn"])


# ---- blocks of three slots
T, B = 6, 3
BQ, BP, BASE = (numbers(1, T, V, seed=seed) for seed in (2, 3, 4))
SLOTS = torch.tensor([[0, 1, 1, 0, 1, 0]])
LABELS = torch.tensor([[0, 1, 2, 3, 4, 5]])


def mixture():
    return {name: (LOSS[name], weight) for name, weight in (("ce", 0.1), ("tv", 0.9))}


def block_metrics(f):
    row = BQ, BP, SLOTS, B, 2.0, mixture()
    return [f(*row), f(BQ, BP, torch.ones(1, T), B, 2.0, None, "dpace", 0.5, True)]


def acceptance_metrics(f):
    row = BQ, BP, BASE[..., 0], SLOTS, B, mixture(), LOSS["tv"], 2.0
    return [f(*row, sample_from_anchor=False), f(*row[:2], None, *row[3:], per_position_loss_weight="dpace")]


def selector_metrics(f):
    ids, places, found = candidates(None)
    row = BQ, BP, ids, BASE[..., :2], places, found, SLOTS, B, 2
    return f(*row, loss_config=mixture(), tv_loss_fn=LOSS["tv"], gamma=2.0, selector_loss_alpha=0.5)


def candidates(f):
    "The likeliest two; made here where there is no function to call."
    ids, answer = BQ.topk(2, -1).indices, BP.argmax(-1)
    if f is not None:
        return list(f(ids, answer))
    found = (ids == answer[..., None]).any(-1)
    last = torch.where(found, ids[..., 1], answer)
    ids = torch.stack([ids[..., 0], last], -1)
    return ids, (ids == answer[..., None]).int().argmax(-1), found


def refiner_metrics(f):
    row = BQ, [BASE, BP * 0.5], BASE, BP, SLOTS, B, mixture(), 2.0
    plain_row = BQ, [], None, BP, SLOTS, B, mixture()
    return [f(*row, ce_data_labels=LABELS, data_labels=LABELS, base_anchor_full_weight=True), f(*plain_row)]


# ---- modules with the same weights on both sides


def filled(module):
    for seed, (_, weight) in enumerate(sorted(module.named_parameters())):
        weight.data.copy_(numbers(*weight.shape, seed=seed) * 0.3)
    return module


def rope(length, channels=4):
    angles = numbers(1, length, channels // 2, seed=9).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


ADDED = torch.zeros(1, 1, 2, 5).masked_fill(torch.arange(5) > torch.tensor([[3], [4]]), float("-inf"))


def first_layer(family):
    def run(C):
        layer = filled(C(layers(family), 0, norm_before_residual=True))
        causal = torch.full((4, 4), float("-inf")).triu(1)[None, None]
        return layer(numbers(1, 4, 16), attention_mask=causal, position_embeddings=rope(4))

    return run


def block_layer(C):
    given = dict(hidden_states=numbers(1, 2, 8), target_hidden=numbers(1, 3, 8, seed=1))
    found = filled(C(layers(Qwen3Config), 0))(**given, attention_mask=ADDED, position_embeddings=rope(5))
    return found[0] if isinstance(found, tuple) else found


def convolution(C):
    conv = filled(C(8, block_size=B, kernel_size=2, group_size=4))
    read, kernels = conv.prepare(numbers(1, T, 8))
    return [read, conv.finish(numbers(1, T, 8, seed=1), kernels)]


def selector(C):
    head = filled(C(vocab_size=V, hidden_size=8, rank=2, top_k=3))
    return [list(head.select(BQ, numbers(1, T, 8), LABELS)), head.context(numbers(1, T, 8), LABELS)]


SIZES = dict(verifier_vocab_size=V, draft_vocab_size=5, hidden_size=8)
IN_FRONT, STATES = LABELS.view(2, B), numbers(2, B, 8)


def markov(C):
    heads = [filled(C(**SIZES, markov_rank=2, head_type=kind)) for kind in ("vanilla", "gated", "rnn")]
    return [head.block_bias(prev_token_ids=IN_FRONT, hidden_states=STATES) for head in heads]


def refiner(C):
    head = filled(C(**SIZES, block_size=B, rank=2))
    return [head.block_bias(IN_FRONT, STATES), head.block_bias(IN_FRONT, hcache=head.hidden_cache(STATES))]


def class_names(table):
    return {family: [one.__name__ for one in found] for family, found in table.items()}


def head_layers(table):
    "Names of classes but the first, and the tensors of the first."
    found = {}
    for kind in HEADS:
        config = AutoConfig.from_pretrained(FIXTURES / f"mtp_verifier_{kind}").get_text_config()
        parts = table[config.model_type]
        shapes = {name: list(w.shape) for name, w in parts[0](config).state_dict().items()}
        found[config.model_type] = [shapes, *[part.__name__ for part in parts[1:]]]
    return found


def reduced(C):
    "A drafter with a vocabulary mapping."
    drafter = import_module(C.__module__.split(".")[0] + ".models").Eagle3DraftModel
    model = drafter(drafter.config_class(transformer_layer_config=layers(), draft_vocab_size=2))
    C.load_vocab_mappings(model, torch.tensor([0, 1, 0, 0, 1, 0]) > 0, torch.tensor([1, 3]))
    return [
        issubclass(drafter, C),
        model.t2d,
        model.d2t,
        refused(lambda: C.load_vocab_mappings(model, None, model.d2t)),
    ]


# ---- masks, folders


def block_mask(length=4):
    "Causal, and of later steps each position's own."
    return create_block_mask(
        lambda b, h, q, kv: torch.where(kv < length, q >= kv, q == kv - length), 1, 1, length, length, device="cpu"
    )


def longer(f):
    mask = f(block_mask(128))  # upstream counts in blocks of 128
    return [list(mask.shape), mask.to_dense(), mask_of(mask.mask_mod, 128, 256).sum(-1)]


def flex(f):
    states = numbers(1, 2, 4, 4), numbers(1, 1, 4, 4, seed=1), numbers(1, 1, 4, 4, seed=2)
    return f(None, *states, block_mask(), scaling=0.5)[0]


def refused(f):
    try:
        f()
    except (ValueError, OSError) as e:
        return type(e).__name__
    return "taken"


def drafter_of(kind):
    verifier = SimpleNamespace(name_or_path=str(FIXTURES / kind))
    return SimpleNamespace(speculators_config=SimpleNamespace(verifier=verifier))


NORMED = ["eagle3_verifier_qwen3", "mtp_verifier_qwen3_5"]


def cached(f):
    "A hub id that is in a cache."
    with tempfile.TemporaryDirectory() as tmp:
        home, commit = Path(tmp) / "models--org--x", "0" * 40
        (home / "snapshots" / commit).mkdir(parents=True)
        (home / "snapshots" / commit / "config.json").write_text("{}")
        (home / "refs").mkdir()
        (home / "refs/main").write_text(commit)
        return [p.name for p in Path(f("org/x", cache_dir=tmp)).iterdir()]


def converts(kind, how):
    "`how(value, native folder, new folder, verifier, options)` on a foreign checkpoint: the tensors that it makes."

    def run(value):
        case = check_converters.CASES[kind]
        with tempfile.TemporaryDirectory() as tmp:
            native, new = check_converters.source(case, Path(tmp) / "native"), f"{tmp}/new"
            how(value, str(native), new, str(case["verifier"]), case.get("upstream", {}))
            found = check_converters.digest(new)
        tensors = {name: [dtype, shape, digest[:8]] for name, (dtype, shape, digest) in found["tensors"].items()}
        return [tensors, found["tokens"], found["verifier"]]

    return run


def with_class(C, native, new, verifier, options):
    C().convert(native, new, verifier, validate=False, **options)


EAGER = ["kl_div_loss", "reverse_kl_div_loss", "js_div_loss", "ce_loss", "tv_loss", "neg_log_acceptance_loss"]
SMALL = dict(conv_group_size=4, selector_top_k=3)  # of a DFlash2 drafter
LOSS = {}  # filled by `use_losses`


def use_losses(eager):
    "The functions that others get as arguments: of the module `losses.eager` of either side."
    LOSS.update(loss_fn=eager.kl_div_loss, ce=eager.ce_loss, tv=eager.tv_loss)


CALLS = {
    **{f"losses{where}.{name}": loss for where in ("", ".eager", ".utils") for name in EAGER},
    **{f"losses{where}.lk_hybrid_loss": lambda f: f(Q, P, eta=2.0) for where in ("", ".eager", ".utils")},
    **{
        f"losses{where}.{name}": function
        for where in ("", ".utils")
        for name, function in dict(
            LossConfig=lambda kind: [get_origin(kind).__name__, len(get_args(kind))],
            dflash_loss_decay=lambda f: f(torch.arange(4.0), gamma=2.0),
            exp_loss_decay=lambda f: f(torch.arange(4.0), gamma=0.5),
            dpace_loss_decay=lambda f: f(SLOT, MASK, 2, 0.5, elementwise_loss=Q[..., 0].abs()),
            resolve_loss_config=lambda f: {n: w for n, (_, w) in f('{"ce": 0.1, "tv": 0.9}', "eager").items()},
            loss_function=decayed,
            compound_loss=lambda f: f(Q, P, MASK, SLOT, {"a": (LOSS["loss_fn"], 0.3), "b": (LOSS["loss_fn"], 2.0)}),
        ).items()
    },
    "models.attention.ALL_ATTENTION_FUNCTIONS": lambda f: f["simple_flex_attention"].__name__,
    "models.attention.flex_attention_forward": flex,
    **{
        f"models{where}.attention.block_mask_to_dense_attention_mask": lambda f: f(
            block_mask(), torch.device("cpu"), torch.float32
        )
        for where in ("", ".eagle3")
    },
    "models.eagle3.attention.extend_mask_for_draft_tokens": longer,
    "models.base_components.ModelComponents": lambda C: class_names({"": C(int, str, list, dict)}),
    "models.base_components.model_classes": class_names,
    "models.base_components.override_components": lambda f: class_names({"": f("llama", norm_class=dict)}),
    "models.dflash.metrics.compute_metrics": block_metrics,
    "models.dflash.model_definitions.Qwen3DFlashAttention": block_layer,
    "models.dflash.model_definitions.Qwen3DFlashDecoderLayer": block_layer,
    "models.dflash.model_definitions.apply_rotary_pos_emb": lambda f: list(
        f(numbers(1, 2, 2, 4), numbers(1, 1, 5, 4, seed=1), *rope(5))
    ),
    "models.eagle3.rotary_partial.partial_neox_apply_rotary_pos_emb": lambda f: list(
        f(numbers(1, 2, 5, 4), numbers(1, 1, 5, 4, seed=1), *rope(5, 2))
    ),
    "models.dflash2.metrics.compute_metrics": selector_metrics,
    "models.dflash2.metrics.selector_training_candidates": candidates,
    "models.dflash2.metrics.compute_selector_loss": lambda f: f(
        BASE[..., :2], LABELS % 2, SLOTS, B, gamma=2.0, per_position_loss_weight="dpace", dpace_alpha=0.5
    ),
    "models.dflash2.model_definitions.CandidateSelector": selector,
    "models.dflash2.model_definitions.GroupedDynamicCausalConv": convolution,
    "models.dflash2.model_definitions.grouped_dynamic_conv": lambda f: f(
        numbers(1, T, 8), numbers(1, T, 2, 2, seed=1), numbers(2, 8, seed=2), block_size=B, group_size=4
    ),
    "models.dspark.metrics.compute_metrics": acceptance_metrics,
    "models.dspark.model_definitions.MarkovHead": markov,
    "models.dspark.model_definitions.ConfidenceHead": lambda C: filled(C(8))(STATES),
    "models.eagle3.metrics.compute_metrics": lambda f: [
        f(Q, P, MASK, torch.ones(1, 4) > 0, 1, 0.5, mixture()),
        f(Q, P, None, None, 0, 0.5, {"kl_div": (LOSS["loss_fn"], 1.0)}),
    ],
    "models.eagle3.model_definitions.LlamaDecoderEagle3FirstLayer": first_layer(LlamaConfig),
    "models.eagle3.model_definitions.Qwen3DecoderEagle3FirstLayer": first_layer(Qwen3Config),
    "models.eagle3.model_definitions.model_classes": lambda table: {
        family: [first_layer(kind)(table[family][0]), *[one.__name__ for one in table[family][1:]]]
        for family, kind in (("llama", LlamaConfig), ("qwen3", Qwen3Config))
    },
    "models.mtp.model_definitions.mtp_model_classes": head_layers,
    "models.mtp.model_definitions.resolve_model_type": lambda f: [f("qwen3_next"), refused(lambda: f("gpt2"))],
    "models.peagle.metrics.compute_metrics": lambda f: f(
        BQ, BP, SLOTS, torch.tensor([0, 1, 1, 2, 3, 4]), torch.tensor([0, 0, 1, 2, 1, 0]), 3, mixture()
    ),
    "models.xpress.metrics.compute_metrics": refiner_metrics,
    "models.xpress.model_definitions.XPressRefinerHead": refiner,
    "models.utils.GEMMA_STYLE_FINAL_NORM_MODEL_TYPES": lambda names: [
        family in names for family in ("gemma", "gemma2", "gemma3_text", "qwen3_5_text", "llama", "qwen3")
    ],  # ours has families that upstream lacks
    "models.utils.get_verifier_config": lambda f: f(str(QWEN3)).hidden_size,
    "models.utils.resolve_target_layer_ids": lambda f: [
        f([0, 2], str(QWEN3)),
        refused(lambda: f([0, 9], str(QWEN3))),
    ],
    "models.utils.uses_gemma_style_final_norm": lambda f: [f(drafter_of(kind)) for kind in NORMED],
    "models.utils.resolve_verifier_norm_class": lambda f: [f(drafter_of(kind)).__name__ for kind in NORMED],
    "convert.eagle.utils.build_llama_config_dtype_kwarg": lambda f: [f(None), f("bfloat16")],
    "convert.eagle.utils.build_llama_config_rope_kwargs": lambda f: [
        f(5e5),
        f(5e5, {"type": "linear", "factor": 2.0}),
    ],
    **{
        f"convert.{where}{name}Converter": converts(kind, with_class)
        for kind, name, places in (
            ("eagle3", "Eagle3", ("eagle.", "eagle.eagle3_converter.")),
            ("dflash", "DFlash", ("dflash.", "dflash.converter.")),
            ("mtp qwen3", "MTP", ("mtp.", "mtp.converter.")),
        )
        for where in places
    },
    **{
        f"convert.{where}convert_model": converts(
            "mtp qwen3", lambda f, native, new, verifier, options: f(native, verifier, "mtp", new, **options)
        )
        for where in ("", "entrypoints.")
    },
    "convert.entrypoints.maybe_convert_external_checkpoint": converts(
        "dflash", lambda f, native, new, verifier, options: f(native, verifier, output_path=new)
    ),
    "convert.mtp.MTP_EXACT_REMAP": lambda names: names,
    "convert.mtp.MTP_PREFIX_REMAP": lambda names: names,
    "convert.utils.download_checkpoint_from_hub": cached,
    "convert.utils.ensure_checkpoint_is_local": lambda f: [f(str(QWEN3)).name, *cached(f)],
    "convert.utils.load_checkpoint_config": lambda f: f(QWEN3),
    "convert.utils.load_checkpoint_weights": lambda f: {name: list(w.shape) for name, w in f(QWEN3).items()},
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
    "model.DraftVocabMixin": reduced,
    "model.SpeculatorModel": lambda C: "eagle3" in (C.registry or {}),
    **{f"proposals{where}.TokenProposalConfig": lambda C: "greedy" in C.registry for where in ("", ".base")},
    **{
        f"proposals{where}.GreedyTokenProposalConfig": lambda C: C(speculative_tokens=4).model_dump()
        for where in ("", ".greedy")
    },
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
        f"models{where}.{name}SpeculatorConfig": lambda C, fields=fields: described(
            C, transformer_layer_config=layers(Qwen3Config), draft_vocab_size=V, mask_token_id=2, block_size=4, **fields
        )
        for name, fields in dict(DFlash={}, DFlash2=SMALL, DSpark={}, XPress=dict(num_jacobi_passes=2)).items()
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
            DFlash2=dict(mask_token_id=2, block_size=4, aux_hidden_state_layer_ids=[1, 2], **SMALL),
            XPress=dict(mask_token_id=2, block_size=4, aux_hidden_state_layer_ids=[1, 2]),
        ).items()
        for where in ("", f".{name.lower()}", f".{name.lower()}.core")
    },
    **{
        f"models{where}.MTPDraftModel": lambda C: shapes(
            C, C.config_class(transformer_layer_config=layers(Qwen3Config))
        )
        for where in ("", ".mtp", ".mtp.core")
    },
}


@torch.no_grad()
def call(name, value):
    return plain(CALLS[name](value))
