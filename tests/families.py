"""Verifier families: a tiny random model of each, and what this library does with it. `python tests/families.py` writes
the table of docs/verifiers.md; tests/test_families.py holds it."""

import re
import tempfile
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING

from speculators_nb.data.packing import collate
from speculators_nb.decode.generate import generate
from speculators_nb.decode.tree import TokenTree
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.features.in_process import LiveFeatures, extract_features
from speculators_nb.models.eagle3 import Eagle3DraftModel
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.regenerate.in_process import answer
from speculators_nb.verifier.cache import recurrent_kinds
from speculators_nb.verifier.tapped_model import Verifier, auto_class

BROKEN = "## What does not work\n"
PAGE = Path(__file__).parents[1] / "docs/verifiers.md"
V, H, N, WINDOW, NEW = 64, 32, 4, 8, 12
PLAIN = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=48,
    num_hidden_layers=N,
    num_attention_heads=4,
    max_position_embeddings=128,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
    tie_word_embeddings=False,
)
GROUPED = PLAIN | dict(num_key_value_heads=2)
SIZES = GROUPED | dict(head_dim=8)
SLIDES = SIZES | dict(sliding_window=WINDOW)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
GROUPS = dict(n_group=2, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4)
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=16)
HALF = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
THREE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
IMAGE = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, image_size=16, patch_size=4)
QWEN_IMAGE = dict(
    depth=1,
    hidden_size=16,
    out_hidden_size=H,
    intermediate_size=16,
    num_heads=2,
    patch_size=4,
    temporal_patch_size=1,
    spatial_merge_size=2,
)
QWEN_MARKS = dict(image_token_id=V - 1, video_token_id=V - 2, vision_start_token_id=V - 3)
DEEPSTACK = QWEN_IMAGE | dict(deepstack_visual_indexes=[0], num_position_embeddings=16)
LLAMA4 = SIZES | dict(
    intermediate_size_mlp=48,
    num_local_experts=2,
    num_experts_per_tok=1,
    attention_chunk_size=WINDOW,
)
LLAMA4_IMAGE = IMAGE | dict(intermediate_size=64, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16)
FAMILIES = {  # model_type of transformers -> config
    "llama": SIZES,
    "llama4_text": LLAMA4,
    "llama4": dict(text_config=LLAMA4, vision_config=LLAMA4_IMAGE, image_token_index=V - 1),
    "mistral": SLIDES,
    "mistral3": dict(
        text_config=SLIDES | dict(model_type="mistral"),
        vision_config=IMAGE | dict(model_type="pixtral", head_dim=8, intermediate_size=16),
        image_token_id=V - 1,
    ),
    "ministral": SLIDES | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "mixtral": SLIDES | LOCAL,
    "qwen2": GROUPED | dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen2_5_vl": QWEN_MARKS | dict(text_config=GROUPED | dict(rope_parameters=THREE), vision_config=QWEN_IMAGE),
    "qwen3": SIZES,
    "qwen3_moe": SIZES | EXPERTS,
    "qwen3_vl": QWEN_MARKS | dict(text_config=SIZES | dict(rope_parameters=THREE), vision_config=DEEPSTACK),
    "qwen3_vl_moe": QWEN_MARKS
    | dict(text_config=SIZES | EXPERTS | dict(rope_parameters=THREE), vision_config=DEEPSTACK),
    "gemma": SIZES,
    "gemma2": SLIDES | dict(final_logit_softcapping=10.0),
    "gemma3_text": SLIDES | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma3": dict(
        text_config=SLIDES | dict(layer_types=["sliding_attention", "full_attention"] * 2),
        vision_config=IMAGE | dict(intermediate_size=16),
        mm_tokens_per_image=4,
        image_token_id=V - 1,
    ),
    "gpt_oss": SLIDES | LOCAL,
    "deepseek_v3": SIZES | ROUTED | LATENT | GROUPS,
    "glm4": SIZES,
    "glm4_moe": SIZES | ROUTED,
    "phi3": GROUPED | dict(sliding_window=WINDOW),
    "phimoe": SLIDES | LOCAL,
    "olmo2": GROUPED,
    "olmo3": SLIDES,
    "granite": GROUPED
    | dict(logits_scaling=2.0, residual_multiplier=0.7, embedding_multiplier=3.0, attention_multiplier=0.3),
    "cohere": GROUPED | dict(logit_scale=0.5),
    "cohere2": SLIDES | dict(logit_scale=0.5),
    "gpt_neox": PLAIN,
    "nemotron": SIZES,
    "smollm3": SIZES,
    "exaone4": SLIDES,
    "seed_oss": SIZES,
    "ernie4_5_moe": SIZES | dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
    "minimax_m2": SIZES | LOCAL,
    "qwen3_next": SIZES | LINEAR | EXPERTS | dict(shared_expert_intermediate_size=16, rope_parameters=HALF),
    "qwen3_5": QWEN_MARKS
    | dict(
        text_config=SIZES | LINEAR | dict(rope_parameters=HALF | dict(mrope_section=[1, 1, 0])),
        vision_config=QWEN_IMAGE | dict(num_position_embeddings=16),
    ),
    "qwen3_5_text": SIZES | LINEAR | dict(rope_parameters=HALF | dict(mrope_section=[1, 1, 0])),
    "nemotron_h": SIZES
    | ROUTED
    | dict(
        layers_block_type=["linear_attention", "full_attention", "moe", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        moe_shared_expert_intermediate_size=16,
        moe_latent_size=None,
        n_group=1,
        topk_group=1,
    ),
    "falcon_h1": SIZES | MAMBA | dict(mamba_d_ssm=64, lm_head_multiplier=0.5),
    "granitemoehybrid": GROUPED
    | MAMBA
    | dict(layer_types=LINEAR["layer_types"], shared_intermediate_size=16, position_embedding_type="rope")
    | dict(num_local_experts=2, num_experts_per_tok=1),
    "bamba": GROUPED | MAMBA | dict(attn_layer_indices=[1, 3]),
    "lfm2": GROUPED | dict(layer_types=["conv", "full_attention"] * 2),
    "gemma3n_text": SLIDES
    | dict(
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=V,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        laurel_rank=4,
        intermediate_size=[48] * N,
        activation_sparsity_pattern=[0.0] * N,
    ),
    "gemma4_text": SLIDES
    | dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=16,  # as in the released ones, the heads of some layers are larger
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=V,
        num_kv_shared_layers=2,
        final_logit_softcapping=10.0,
    ),
    "minimax": SIZES | LOCAL | dict(layer_types=LINEAR["layer_types"], block_size=8),
}


@lru_cache(None)
def saved(family):
    "A folder with a random model of the family."
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**FAMILIES[family])
    model = auto_class(config).from_config(config, dtype=torch.float32)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # norms and biases off their initial values
    model.get_output_embeddings().weight.data[V - 3 :] = 0  # marks of pictures are not written
    folder = tempfile.mkdtemp(prefix=f"{family}-")
    model.save_pretrained(folder)
    return folder


@lru_cache(None)
def verifier(family):
    loaded = Verifier.from_pretrained(saved(family), range(N + 1))
    loaded.model.generation_config.eos_token_id = None
    return loaded


def texts(lengths=(23, 9, 14)):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(2, V - 3, (n,), generator=g).tolist() for n in lengths]


def same(ours, theirs):
    "Float32, sums in another order."
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Theirs(NamedTuple):
    "What transformers computes."

    states: tuple  # entering each layer; of several streams (Gemma-3n) the one that is read
    normed: torch.Tensor  # behind the final norm
    logits: torch.Tensor


@torch.no_grad()
def theirs(family, ids, **inputs):
    model = verifier(family).model
    out = model(ids, output_hidden_states=True, **inputs)
    *states, normed = out.hidden_states
    if normed.ndim == 4:
        states = [state[0] for state in states]
        normed = verifier(family).decoder(ids).last_hidden_state
    return Theirs(tuple(states), normed, out.logits)


def check_tap(family):
    "Hidden states of every layer are those of transformers; the last one is before the final norm."
    v, ids = verifier(family), torch.tensor(texts([24, 24]))
    ours, expected = v(ids, use_cache=False), theirs(family, ids)
    for tap, state in zip(ours.hidden_states.split(H, -1), expected.states):
        same(tap, state)
    same(v.norm(ours.last_hidden_states).detach(), expected.normed)
    same(ours.logits, expected.logits)


def table(rows):
    "Rows as `prepare` makes them, of which all but two tokens are trained."
    masks = [[i > 1 for i in range(len(row))] for row in rows]
    return Dataset.from_dict(dict(input_ids=rows, loss_mask=masks, seq_len=[*map(len, rows)]))


def three_layers(family):
    return Verifier(verifier(family).model, [1, 2, 3])


@lru_cache(None)
def feature_folder(family):
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-features-")) / "out"
    extract_features(three_layers(family), table(texts()), folder, dtype=torch.float32)
    return folder


@lru_cache(None)
def features(family):
    return FeatureDataset(feature_folder(family))


def check_features(family):
    "What is read back is what transformers computes of each row alone; rows were padded together."
    for sample, row in zip(features(family), texts()):
        expected = theirs(family, torch.tensor([row]))
        same(sample["hidden_states"], torch.cat(expected.states[1:4], -1)[0])
        same(verifier(family).norm(sample["verifier_last_hidden_states"]).detach(), expected.normed[0])


def check_train(family):
    "A step of EAGLE-3 whose targets are the verifier's own logits."
    logits = verifier(family)(torch.tensor(texts()[:1]), use_cache=False).logits[0]
    take_a_step(family, [features(family)[i] for i in range(3)], logits)


def take_a_step(family, samples, logits):
    "`logits` are the verifier's own of the first sample."
    torch.manual_seed(1)
    layer = draft_layer_config(verifier(family).model.config)
    model = Eagle3DraftModel.from_training_args(layer, verifier_name_or_path=saved(family))
    same(model.target_head(samples[0]["verifier_last_hidden_states"]), logits)
    batch = collate(samples, 48, shift=model.shift)
    loss = model.train()(**batch, **model.get_trainer_kwargs(ttt_steps=2)[0])[1]
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert loss.isfinite() and grads.isfinite().all() and grads.norm() > 1e-3


def picture(family):
    "A prompt with a picture of four tokens, and what the model takes beside it."
    g = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, 3, 16, 16, generator=g)
    ids = torch.tensor([[5, 6, V - 3, *[V - 1] * 4, 7, 8, 9, 10]])
    is_picture = (ids == V - 1).int()
    if family.startswith("qwen"):
        patches, grid = pixels.reshape(16, 48), torch.tensor([[1, 4, 4]])
        return ids, dict(pixel_values=patches, image_grid_thw=grid, mm_token_type_ids=is_picture)
    beside = dict(gemma3=dict(token_type_ids=is_picture), mistral3=dict(image_sizes=torch.tensor([[16, 16]])))
    return ids, dict(pixel_values=pixels) | beside.get(family, {})


def check_picture(family):
    """Features with a picture are what transformers computes; EAGLE-3 takes a step on them; what follows a picture is
    decoded as transformers does."""
    three, (ids, inputs) = three_layers(family), picture(family)
    live = LiveFeatures(three, table([ids[0].tolist(), *texts()[:1]]), torch.float32)
    live.inputs = lambda i: {} if i else inputs  # a processor would make them of messages
    samples = live.__getitems__([0, 1])
    expected = theirs(family, ids, **inputs)
    assert (expected.logits - theirs(family, ids).logits).abs().max() > 0.1
    text = ids[0] != V - 1  # DeepStack (Qwen3-VL) adds to a picture's tokens between two layers
    same(samples[0]["hidden_states"][text], torch.cat(expected.states[1:4], -1)[0, text])
    take_a_step(family, samples, expected.logits[0])

    v = verifier(family)
    with torch.no_grad():
        answer = v.model.generate(ids, do_sample=False, max_new_tokens=NEW, **inputs)[0].tolist()
    for kv_cache, branches in product(kv_caches(family), (False, True)):
        drafter = Knowing([answer], branches)
        g = generate(v, drafter, ids[0], max_new_tokens=NEW, k=4, inputs=inputs, kv_cache=kv_cache)
        assert g.prompt + g.tokens == answer and any(s.accepted > 1 for s in g.steps)
        read = torch.cat(drafter.features)[: len(text), :H]
        same(read, expected.states[0][0])


class Knowing:
    "Knows the answers, is wrong at every third place, and has siblings where it shall branch."

    def __init__(self, answers, branches):
        self.answers, self.branches = answers, branches
        self.aux_layer_ids, self.features = (0, N), []

    def reset(self):
        self.features = []

    def propose(self, tokens, features, k, sampling):
        self.features.append(features)
        known, n = tokens.tolist(), len(tokens)
        answer = next(a for a in self.answers if a[:n] == known)[n : n + k]
        true = torch.tensor([(t + 1) % V if (n + i) % 3 == 0 else t for i, t in enumerate(answer)])
        if not self.branches:
            return TokenTree.chain(true)
        right = torch.tensor(answer)
        # siblings are right where the chain is wrong; each has a child, right again
        siblings = torch.where(true == right, (true + 2) % V, right)
        depth = torch.arange(len(true))
        parents = torch.cat([depth - 1, depth - 1, len(true) + depth[:-1]])
        return TokenTree(torch.cat([true, siblings, right[1:]]), parents)


@lru_cache(None)
def greedy(family):
    "Prompts and what transformers writes after them."
    model = verifier(family).model
    prompts = texts((11, 3, 6))
    with torch.no_grad():
        outputs = [model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=NEW) for p in prompts]
    return prompts, [out[0].tolist() for out in outputs]


def kv_caches(family):
    "Those that the family can be decoded with."
    config = verifier(family).config
    return ["dynamic"] if recurrent_kinds(config) else ["dynamic", "static"]


def check_decode(family):
    "Chains, trees and batches write what transformers writes, with every KV cache, and hand over its features."
    v, (prompts, answers) = verifier(family), greedy(family)
    for kv_cache, branches in product(kv_caches(family), (False, True)):
        drafter, options = Knowing(answers, branches), dict(max_new_tokens=NEW, k=4, kv_cache=kv_cache)
        together = generate(v, drafter, prompts[1:], **options)
        assert [g.prompt + g.tokens for g in together] == answers[1:]
        g = generate(v, drafter, prompts[0], **options)
        assert g.prompt + g.tokens == answers[0]
        if branches:
            assert any(max(s.path or [0]) > 3 for s in g.steps)  # nodes beyond the chain
        else:
            assert {s.accepted for s in g.steps} >= {0, 2}
        handed = torch.cat(drafter.features)
        alone = v(torch.tensor(answers[:1])).hidden_states[0, : len(handed)]
        same(handed, torch.cat([alone[:, :H], alone[:, -H:]], -1))


def check_regenerate(family):
    "A batch of prompts of different length is answered as transformers answers each of them."
    prompts, answers = greedy(family)
    ours = answer(verifier(family), prompts, NEW, [V])
    assert [p + a for p, a in zip(prompts, ours)] == answers


CHECKS = {
    "tap": check_tap,
    "features": check_features,
    "train step": check_train,
    "decode": check_decode,
    "regenerate": check_regenerate,
    "picture": check_picture,
}


def attention_of(config):
    "What its layers attend to, as the table has it."
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = ["sliding" if getattr(config, "sliding_window", None) else "full"]
    return ", ".join(sorted({kind.removesuffix("_attention") for kind in kinds}))


class Line(NamedTuple):
    "What the page has of a family."

    row: str
    errors: list[str]


def line_of(family):
    "The checks of one family."
    cells, errors = [], {}
    config = CONFIG_MAPPING[family](**FAMILIES[family])
    for name, check in CHECKS.items():
        if name == "picture" and not hasattr(config, "vision_config"):
            cells.append("–")
            continue
        try:
            check(family)
            cells.append("yes")
        except Exception as e:
            message = " ".join(f"{type(e).__name__}: {e}".split())
            errors.setdefault(message, []).append(name)
            cells.append("no")
    class_name = auto_class(config)._model_mapping[type(config)].__name__
    config = config.get_text_config()
    if recurrent_kinds(config) and "no" not in cells:
        cells[list(CHECKS).index("decode")] = "reads again"
    row = " | ".join([f"`{family}`", f"`{class_name}`", attention_of(config), *cells])
    errors = [f"- `{family}`, {', '.join(names)}: ``{message}``" for message, names in errors.items()]
    return Line(f"| {row} |", errors)


def page(text, lines):
    "The page with its table and its list of errors made anew."
    head = ["family", "class of transformers", "layers", *CHECKS]
    table = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *(line.row for line in lines)]
    text = re.sub(r"^\| family.*\n(?:\|.*\n)*", lambda _: "\n".join([*table, ""]), text, flags=re.M)
    errors = [error for line in lines for error in line.errors] or ["Nothing that the checks look at."]
    return "\n".join([text.partition(BROKEN)[0] + BROKEN, *errors, ""])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), [line_of(family) for family in FAMILIES]))
