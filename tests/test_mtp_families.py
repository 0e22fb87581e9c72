"""Native MTP heads of every family: a tiny random checkpoint with the tensor names that vLLM's loader of the family
expects, taken out, computed, trained, put back. The reference is transformers' own decoder layer."""

import json
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.mtp import MTPDraftModel
from speculators_nb.models.mtp_families import FAMILIES
from speculators_nb.models.mtp_layer import MTPLayer
from speculators_nb.models.mtp_native import extract_mtp, stitch_mtp
from speculators_nb.serve.vllm_contract import check_vllm_contract
from speculators_nb.serve.vllm_methods import mtp_head

V, H, LAYERS = 60, 32, 2
SMALL = dict(vocab_size=V, hidden_size=H, num_hidden_layers=LAYERS, intermediate_size=40)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
LATENT = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
EXPERTS = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, mscale_all_dim=1.0)
SLIDES = dict(sliding_window=4, sliding_window_pattern="LG", layer_types=["sliding_attention", "full_attention"])
ROPE = dict(rope_type="default", rope_theta=1e4)
HEAD = dict(num_nextn_predict_layers=1)

# family -> config of its language model
CONFIGS = {
    "deepseek_v3": dict(SMALL, **LATENT, **EXPERTS, **HEAD, rope_parameters=YARN, max_position_embeddings=256),
    "glm4_moe": dict(SMALL, **ATTENTION, **EXPERTS, **HEAD, use_qk_norm=True, attention_bias=True),
    "glm4_moe_lite": dict(SMALL, **LATENT, **EXPERTS, **HEAD, mlp_layer_types=["dense", "sparse"]),
    "glm_ocr_text": dict(
        SMALL, **ATTENTION, **HEAD, rope_parameters=dict(ROPE, partial_rotary_factor=1.0, mrope_section=[2, 1, 1])
    ),
    "mimo": dict(SMALL, num_attention_heads=4, num_key_value_heads=2, **HEAD),
    "ernie4_5_moe": dict(SMALL, **ATTENTION, **HEAD, moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
    "exaone4": dict(SMALL, **ATTENTION, **SLIDES, **HEAD),
    "exaone_moe": dict(
        SMALL, **ATTENTION, **SLIDES, **HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "longcat_flash": dict(
        {k: v for k, v in SMALL.items() if k not in ("num_hidden_layers", "intermediate_size")},
        **LATENT,
        head_dim=4,
        num_layers=1,
        ffn_hidden_size=40,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
    "nemotron_h": dict(
        SMALL,
        **ATTENTION,
        **HEAD,
        layers_block_type=["moe", "full_attention"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        moe_latent_size=8,
    ),
}
# families whose language model is a part of a multimodal one: its model_type
COMPOSITE = {"exaone4": "exaone4_5", "glm_ocr_text": "glm_ocr"}
# our name of the four tensors around the layer -> the checkpoint's, as vLLM reads it
AROUND = {
    **dict.fromkeys(
        ("exaone4", "exaone_moe"), ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    ),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe", "glm4_moe_lite"),
        tuple(f"model.layers.2.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    ),
    "glm_ocr_text": tuple(
        f"model.language_model.layers.2.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    ),
    "mimo": tuple(
        f"model.mtp_layers.0.{name}"
        for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ),
    "ernie4_5_moe": ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0"),
    "longcat_flash": (
        "model.mtp.layers.0.enorm.m",
        "model.mtp.layers.0.hnorm.m",
        "model.mtp.layers.0.eh_proj",
        "model.mtp.norm",
    ),
    "nemotron_h": ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm"),
}
OURS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
# where the layer's own tensors are
INSIDE = {
    "exaone4": "mtp.layers.0.",
    "exaone_moe": "mtp.layers.0.",
    "deepseek_v3": "model.layers.2.",
    "glm4_moe": "model.layers.2.",
    "glm4_moe_lite": "model.layers.2.",
    "glm_ocr_text": "model.language_model.layers.2.",
    "mimo": "model.mtp_layers.0.",
    "ernie4_5_moe": "model.mtp_block.0.",
    "longcat_flash": "model.mtp.layers.0.",
    "nemotron_h": "mtp.layers.",
}


def test_every_family_has_a_test():
    "Those of Qwen are in test_mtp.py, with upstream's recorded numbers."
    assert FAMILIES.keys() - CONFIGS.keys() == {"qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}


def config_of(family):
    return AutoConfig.for_model(family, **CONFIGS[family])


def class_of(family, name):
    folder, prefix = FAMILIES[family].module, FAMILIES[family].prefix
    return getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), prefix + name)


# --------------------------------------------------------------------------------------------- transformers' own layers
class LongCatBlock(nn.Module):
    "LongCat's head has one attention and one MLP; transformers' layer two of each."

    def __init__(self, config):
        super().__init__()
        norm = class_of("longcat_flash", "RMSNorm")
        self.input_layernorm, self.post_attention_layernorm = norm(H), norm(H)
        self.self_attn = class_of("longcat_flash", "MLA")(config, 0)
        self.mlp = class_of("longcat_flash", "MLP")(config)

    def forward(self, x, **kwargs):
        x = x + self.self_attn(self.input_layernorm(x), **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class NemotronPair(nn.ModuleList):
    def forward(self, x, attention_mask, position_embeddings):
        return self[1](self[0](x, attention_mask=attention_mask))


def reference_layer(family, config):
    "The layer that vLLM builds for the head, by transformers' class."
    config._attn_implementation = "eager"
    if getattr(config, "_experts_implementation", "") is None:
        config._experts_implementation = "eager"
    if family == "ernie4_5_moe":  # vLLM takes Llama's layer
        llama = LlamaConfig(**SMALL, **ATTENTION, rms_norm_eps=config.rms_norm_eps, attn_implementation="eager")
        return import_module("transformers.models.llama.modeling_llama").LlamaDecoderLayer(llama, 0)
    if family == "longcat_flash":
        return LongCatBlock(config)
    if family == "nemotron_h":
        blocks = AutoConfig.for_model(family, **CONFIGS[family] | dict(layers_block_type=["full_attention", "moe"]))
        blocks._attn_implementation = "eager"
        blocks._experts_implementation = "eager"
        return NemotronPair([class_of(family, "Block")(blocks, i) for i in (0, 1)])
    if family == "exaone_moe":
        config.mlp_layer_types = ["dense", "dense"]
    index = {"deepseek_v3": 2, "glm4_moe": 2, "glm4_moe_lite": 1}.get(family, 0)
    name = "TextDecoderLayer" if family == "glm_ocr_text" else "DecoderLayer"
    return class_of(family, name)(config, index)


def rope_of(family, config, n):
    "cos and sin by the family's own class."
    if family == "nemotron_h":
        return None
    name = "TextRotaryEmbedding" if family == "glm_ocr_text" else "RotaryEmbedding"
    if family == "ernie4_5_moe":
        config = LlamaConfig(**SMALL, **ATTENTION, rope_parameters=config.rope_parameters)
        rotary = import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding(config)
    else:
        rotary = class_of(family, name)(config)
    positions = torch.arange(n)[None]
    if family == "glm_ocr_text":
        positions = positions.expand(3, 1, n)
    return rotary(torch.zeros(1), positions)


def randomize(module, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *(b for n, b in module.named_buffers() if "correction" in n)]:
            tensor.copy_(torch.randn(tensor.shape, generator=g) * 0.2 + (tensor.ndim == 1))


def one_by_one(state):
    "Experts as checkpoints store them, written out."
    out = {}
    for name, tensor in state.items():
        head, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for e, w in enumerate(tensor):
                out[f"{head}.{e}.gate_proj.weight"], out[f"{head}.{e}.up_proj.weight"] = w.chunk(2)
        elif head.endswith("experts") and part in ("up_proj", "down_proj"):
            out |= {f"{head}.{e}.{part}.weight": w for e, w in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


class Case:
    "A family's layer with random weights, and its checkpoint."

    def __init__(self, family, folder, head=True):
        self.family, self.folder, config = family, folder, config_of(family)
        torch.manual_seed(0)
        text = AutoConfig.for_model(
            {"glm_ocr_text": "glm4"}.get(family, family), **CONFIGS[family] | dict(pad_token_id=0)
        )
        verifier = AutoModelForCausalLM.from_config(text)
        state = {n: w.clone() for n, w in one_by_one(verifier.state_dict()).items()}
        if family == "nemotron_h":  # the names of its checkpoints; transformers' own are different
            state = {n.replace("model.", "backbone."): w for n, w in state.items()}
            state["model.embed_tokens.weight"] = state.pop("backbone.embeddings.weight")
        self.embed, self.lm_head = state["model.embed_tokens.weight"], state["lm_head.weight"]
        raw = config_of(family).to_diff_dict() | dict(architectures=[type(verifier).__name__], model_type=family)
        if family in COMPOSITE:
            state = {n.replace("model.", "model.language_model."): w for n, w in state.items()}
            raw = dict(model_type=COMPOSITE[family], text_config=raw, vision_config={}, **HEAD)
        if not head:
            raw.pop("num_nextn_predict_layers", None)
        self.layer = reference_layer(family, config)
        randomize(self.layer, 1)
        self.around = nn.ModuleDict({name: nn.RMSNorm(H, eps=1e-6) for name in OURS if name != "input_proj"})
        self.around["input_proj"] = nn.Linear(2 * H, H, bias=False)
        randomize(self.around, 2)
        self.native = {}
        for name, tensor in one_by_one(self.layer.state_dict()).items():
            inside = name
            if family == "longcat_flash" and name.startswith("mlp."):
                inside = "transformer_layer." + name
            self.native[INSIDE[family] + inside] = tensor.clone()
        for ours, theirs in zip(OURS, AROUND[family]):
            self.native[theirs + ".weight"] = self.around[ours].weight.detach().clone()
        self.copies = {}
        if AROUND[family][-1].endswith("shared_head.norm"):
            self.copies[INSIDE[family] + "embed_tokens.weight"] = self.embed.clone()
            self.copies[INSIDE[family] + "shared_head.head.weight"] = self.lm_head.clone()
        self.other = state | self.copies
        self.config, self.stored = config, self.other | (self.native if head else {})
        self.write(raw)

    def write(self, raw):
        "Three shards with an index; the head is spread over them."
        self.folder.mkdir()
        names, total, index = sorted(self.stored), 0, {}
        for shard in range(3):
            file = f"model-{shard + 1:05}-of-00003.safetensors"
            part = {name: self.stored[name].contiguous() for name in names[shard::3]}
            save_file(part, self.folder / file, {"format": "pt"})
            index |= dict.fromkeys(part, file)
            total += sum(w.nbytes for w in part.values())
        (self.folder / "model.safetensors.index.json").write_text(
            json.dumps(dict(metadata=dict(total_size=total), weight_map=index))
        )
        (self.folder / "config.json").write_text(json.dumps(raw, default=str))

    def reference(self, ids, states):
        "What vLLM's module computes: logits of one step for row t, which reads state t and token t + 1."
        n = len(states)
        embeds = self.embed[ids[1 : n + 1]].clone()
        if self.family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_ocr_text", "mimo", "ernie4_5_moe"):
            embeds[0] = 0
        eps = 1e-5 if self.family in ("nemotron_h", "longcat_flash") else self.config.rms_norm_eps
        norms = {
            name: F.rms_norm(x, (H,), self.around[name].weight, eps)
            for name, x in (("token_layernorm", embeds), ("hidden_layernorm", states))
        }
        parts = [norms["token_layernorm"], norms["hidden_layernorm"]]
        x = self.around["input_proj"](torch.cat(parts[::-1] if self.family == "mimo" else parts, -1))
        row, key = torch.arange(n)[:, None], torch.arange(n)
        allowed = key <= row
        if self.family in ("exaone4", "exaone_moe"):
            allowed &= key > row - SLIDES["sliding_window"]
        mask = torch.zeros(n, n).masked_fill(~allowed, -torch.inf)[None, None]
        x = self.layer(x[None], attention_mask=mask, position_embeddings=rope_of(self.family, self.config, n))
        x = (x[0] if isinstance(x, tuple) else x)[0]
        normed = x
        if self.family != "ernie4_5_moe":
            normed = F.rms_norm(x, (H,), self.around["final_layernorm"].weight, eps)
        carried = x if self.family in ("glm4_moe", "glm4_moe_lite", "glm_ocr_text") else normed
        return normed @ self.lm_head.T, carried


def stored_in(folder):
    return {n: w for f in folder.glob("*.safetensors") for n, w in load_file(f).items()}


def drafter_of(case, **args):
    return MTPDraftModel.from_training_args(verifier_name_or_path=str(case.folder), num_speculative_steps=2, **args)


def batch_of(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(V, (n,), generator=g), torch.randn(n, H, generator=g)


@pytest.mark.parametrize("family", CONFIGS)
def test_out_of_the_shards(family, tmp_path):
    "Every tensor by name, to the bit, and neither copies nor anything else of the verifier."
    case = Case(family, tmp_path / "v")
    found = extract_mtp(case.folder)
    expected = {
        f"mtp_layers.0.{ours}.weight": case.native[f"{name}.weight"] for ours, name in zip(OURS, AROUND[family])
    }
    inside = dict(case.layer.state_dict())
    if family == "nemotron_h":
        renamed = {"0.norm": "input_layernorm", "0.mixer": "self_attn", "1.norm": "post_attention_layernorm"}
        renamed["1.mixer"] = "mlp"
        inside = {renamed[n[: n.index(".", 2)]] + n[n.index(".", 2) :]: w for n, w in inside.items()}
    expected |= {f"mtp_layers.0.{name}": w for name, w in inside.items()}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("family", CONFIGS)
def test_forward_is_the_familys(family, tmp_path):
    "Logits of two steps, by transformers' layer and by ours, and the chain that the drafter proposes."
    case = Case(family, tmp_path / "v")
    model = drafter_of(case).eval()
    n = 11
    ids, states = batch_of(n)
    with torch.no_grad():
        logits, carried = case.reference(ids, states[:-1])
        ours, loss, _ = model(ids[None], states[None], lean=False, as_served=True)
        torch.testing.assert_close(ours[0][0], logits, rtol=1e-4, atol=1e-4)
        lean = model(ids[None], states[None], as_served=True)[1]
        torch.testing.assert_close(lean, loss, rtol=1e-5, atol=1e-6)
        own, loss, _ = model(ids[None], states[None], lean=False)
        torch.testing.assert_close(own[0][0], logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids[None], states[None])[1], loss, rtol=1e-5, atol=1e-6)
        hidden = model.dense_hidden(ids, states, torch.zeros(n, dtype=torch.long), torch.arange(n), 2, as_served=True)
    chain = model.drafter().propose(ids[:-1], states[: n - 2], 2, Sampling()).tokens
    first = logits[n - 3].argmax()
    assert chain[0] == first
    with torch.no_grad():  # the second token by a row that ends with the first
        row = torch.cat([ids[:-1], chain])
        longer = torch.cat([states[: n - 2], torch.zeros(3, H)])
        count = torch.arange(len(row))
        steps = model.dense_hidden(row, longer, torch.zeros_like(count), count, 2, as_served=True)
        assert chain[1] == model.lm_head(steps[1][n - 3]).argmax()
    assert carried.shape == hidden[0].shape


@pytest.mark.parametrize("family", CONFIGS)
def test_train_and_stitch(family, tmp_path):
    """A step of training changes the head; back in a copy of the verifier nothing else is different, and vLLM finds the
    head there."""
    case = Case(family, tmp_path / "v")
    model = drafter_of(case, verifier_norm=True).train()
    ids, states = batch_of(24)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        _, loss, _ = model(ids[None], states[None], step_weight_beta=0.6)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, p in model.mtp_layers.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
    model.save_pretrained(tmp_path / "d")
    out = stitch_mtp(tmp_path / "d", case.folder, tmp_path / "out", link=True)
    before, after = case.stored, stored_in(out)
    assert before.keys() == after.keys()
    for name, weight in case.other.items():
        assert torch.equal(after[name], weight) and after[name].dtype == weight.dtype, name
    fixed = {name for name in case.native if "e_score_correction_bias" in name}  # no gradient reaches it
    idle = {name for name in case.native if ".experts." in name}  # one that no token chose
    changed = {name for name in case.native if not torch.equal(after[name], case.native[name])}
    assert case.native.keys() - fixed - idle <= changed and not changed & fixed
    assert (out / "config.json").read_bytes() == (case.folder / "config.json").read_bytes()
    again = extract_mtp(out)
    assert all(torch.equal(w, model.state_dict()[n]) for n, w in again.items())
    violations = check_vllm_contract(tmp_path / "d")
    assert len(violations) == 1 and "stitch_mtp" in violations[0]
    raw = json.loads((out / "config.json").read_text())
    architecture = {"mimo": "MiMoForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}.get(family)
    raw["architectures"] = [architecture or {"glm_ocr_text": "GlmOcrForConditionalGeneration"}.get(family, "")]
    if family == "glm4_moe_lite":
        raw["architectures"] = ["Glm4MoeLiteForCausalLM"]
    assert mtp_head(raw)[1] == 1


@pytest.mark.parametrize("family", ["deepseek_v3", "exaone4", "glm_ocr_text", "mimo", "nemotron_h"])
def test_a_first_head_gets_the_familys_names(family, tmp_path):
    "Where the verifier has none, the stitched checkpoint has the names that vLLM's loader looks for."
    case = Case(family, tmp_path / "v", head=False)
    with pytest.raises(ValueError, match="has no MTP head"):
        drafter_of(case)
    torch.manual_seed(0)
    drafter_of(case, fresh_head=True).save_pretrained(tmp_path / "d")
    out = stitch_mtp(tmp_path / "d", case.folder, tmp_path / "out")
    added = stored_in(out).keys() - case.other.keys()
    assert added == case.native.keys()
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_values_longer_than_queries_are_refused():
    config = AutoConfig.for_model("deepseek_v3", **CONFIGS["deepseek_v3"] | dict(v_head_dim=16))
    with pytest.raises(ValueError, match="v_head_dim=16: must not be above 12"):
        MTPLayer(config)
