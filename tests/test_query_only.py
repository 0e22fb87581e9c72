"""Query-only drafters: transformers' `Gemma4AssistantForCausalLM` gives the same drafts, its layout goes both ways, and
the keys that are made again are those of the verifier's cache."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import run
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert, export_native
from speculators_nb.models.query_only import KEY_FAMILIES, QueryOnlyDraftModel, layers_with_keys
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.verifier.tapped_model import Verifier

V, H, D, WINDOW = 96, 32, 16, 6
SIZES = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.2,
)
GEMMA = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=WINDOW, global_head_dim=16)
EMBEDS = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=V)
ROPE = dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
VERIFIERS = {
    "llama": LlamaConfig(**SIZES, rope_parameters=ROPE | dict(original_max_position_embeddings=16)),
    "qwen2": Qwen2Config(**{name: size for name, size in SIZES.items() if name != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gemma4_text": Gemma4TextConfig(**SIZES, **GEMMA, **EMBEDS),
}
SHARED = Gemma4TextConfig(**SIZES, **GEMMA, **EMBEDS, num_kv_shared_layers=1)


def moved(model):
    "Its weights off their initial values."
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.eval()


def saved(config, folder):
    torch.manual_seed(0)
    model = moved(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.save_pretrained(folder)
    return model


def assistant(folder, clusters=False, kinds=("sliding_attention", "full_attention"), window=WINDOW):
    "A random drafter of transformers', and its folder."
    sizes = SIZES | dict(hidden_size=D, num_hidden_layers=len(kinds), num_kv_shared_layers=len(kinds))
    text = Gemma4TextConfig(
        **sizes | GEMMA | dict(layer_types=list(kinds), sliding_window=window),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=H,
        use_ordered_embeddings=clusters,
        num_centroids=12,
        centroid_intermediate_top_k=3,
    )
    torch.manual_seed(1)
    model = moved(Gemma4AssistantForCausalLM(config))
    if clusters:
        model.masked_embedding.token_ordering.copy_(torch.randperm(V))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", KEY_FAMILIES)
def test_keys_and_values_are_the_verifiers(family, tmp_path):
    model = saved(VERIFIERS[family], tmp_path / "v")
    drafter = QueryOnlyDraftModel.from_training_args(
        draft_layer_config(model.config), verifier_name_or_path=str(tmp_path / "v"), target_layer_ids=[1, 3]
    )
    ids = torch.randint(V, (1, 24))
    features = Verifier(model, drafter.drafter().aux_layer_ids)(ids, want_logits=False, use_cache=False)
    made = drafter.keys_and_values(features.hidden_states[0], torch.arange(24))
    cache = model(ids, use_cache=True).past_key_values
    for kind, layer in drafter.config.key_layer_ids.items():
        for again, stored in zip(made[kind], (cache.layers[layer].keys, cache.layers[layer].values)):
            torch.testing.assert_close(again[:, -stored.shape[2] :], stored[0], rtol=0, atol=1e-6)


def test_every_family_has_a_case():
    assert set(VERIFIERS) == set(KEY_FAMILIES)


@pytest.mark.parametrize("config", [SHARED, VERIFIERS["gemma4_text"]], ids=["shares", "shares nothing"])
def test_the_layers_are_those_whose_keys_gemma_shares(config):
    "What transformers hands to an assistant, found by its shape and numbers."
    torch.manual_seed(0)
    model = moved(AutoModelForCausalLM.from_config(config))
    ids = torch.randint(V, (1, 5))
    shared = model.model(ids, return_shared_kv_states=True).shared_kv_states
    cache = model(ids, use_cache=True).past_key_values
    for kind, layer in layers_with_keys(config).items():
        torch.testing.assert_close(shared[kind][0], cache.layers[layer].keys)


@pytest.mark.parametrize(
    "clusters, kinds",
    [
        (False, ("sliding_attention", "full_attention")),
        (True, ("sliding_attention", "full_attention")),
        (False, ("full_attention",)),
        (True, ("sliding_attention",) * 3 + ("full_attention",)),
    ],
)
@pytest.mark.parametrize("n", [3, WINDOW, 20])
def test_drafts_are_transformers(clusters, kinds, n, tmp_path):
    """Beyond the window of its sliding layers as well, which is one key wider in transformers than in vLLM and here:
    there the same weights are given a window that is one smaller."""
    model = saved(SHARED, tmp_path / "v")
    assistant(tmp_path / "theirs", clusters, kinds)
    theirs = assistant(tmp_path / "narrower", clusters, kinds, window=WINDOW - 1)
    convert(tmp_path / "theirs", tmp_path / "ours", verifier=tmp_path / "v")
    ours = SpeculatorModel.from_pretrained(tmp_path / "ours", verifier=tmp_path / "v")
    ids = torch.randint(V, (n + 1,))
    out = model(ids[None, :n], output_hidden_states=True, return_shared_kv_states=True)
    token, state, logits = ids[n:][None], out.hidden_states[-1][:, -1:], []
    with torch.no_grad():
        for _ in range(4):
            found = theirs(
                inputs_embeds=torch.cat([model.get_input_embeddings()(token), state], -1),
                position_ids=torch.tensor([[n - 1]]),
                shared_kv_states=out.shared_kv_states,
                attention_mask=torch.ones(1, n, dtype=torch.long),
            )
            logits.append(found.logits[0, 0])
            token, state = found.logits.argmax(-1), found.last_hidden_state
    drafter = ours.drafter()
    features = Verifier(model, drafter.aux_layer_ids)(ids[None, :n], want_logits=False, use_cache=False)
    tree = drafter.propose(ids, features.hidden_states[0], 4, Sampling())
    assert tree.tokens.tolist() == [row.argmax().item() for row in logits]
    drafter.reset()
    state = drafter.read(ids, features.hidden_states[0])
    for row, token in zip(logits, tree.tokens):
        mine = drafter.logits(state)[0]
        drafted = mine.isfinite()
        assert drafted.sum() == (V // 4 if clusters else V)
        torch.testing.assert_close(mine[drafted], row[drafted], rtol=1e-4, atol=1e-4)
        state = drafter.step(drafter.next_input(state), token[None])


@pytest.mark.parametrize("clusters", [False, True])
def test_the_layout_goes_both_ways(clusters, tmp_path):
    saved(SHARED, tmp_path / "v")
    assistant(tmp_path / "theirs", clusters)
    convert(tmp_path / "theirs", tmp_path / "ours", verifier=tmp_path / "v")
    export_native(tmp_path / "ours", tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    layers = (Gemma4AssistantConfig.from_pretrained(tmp_path / name).text_config for name in ("theirs", "back"))
    stored, written = (config.to_dict() | dict(dtype=None) for config in layers)
    assert stored == written
    Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "back")


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_stored(tied, tmp_path):
    "A copy where it is tied to the embeddings; else the head, and nobody reads these embeddings."
    saved(SHARED, tmp_path / "v")
    assistant(tmp_path / "theirs", False)
    file, config = tmp_path / "theirs/model.safetensors", tmp_path / "theirs/config.json"
    state = load_file(file)
    embeds = state["model.embed_tokens.weight"]
    head = embeds.clone() if tied else -embeds
    save_file(state | {"lm_head.weight": head}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(tie_word_embeddings=tied)))
    made = SpeculatorModel.from_pretrained(tmp_path / "theirs", verifier=tmp_path / "v")
    assert torch.equal(made.lm_head.weight, head)


def test_what_is_refused(tmp_path):
    saved(VERIFIERS["qwen3"], tmp_path / "qwen3")
    assistant(tmp_path / "theirs")
    with pytest.raises(ValueError, match="reads the keys of a Gemma 4, and .* is a qwen3; give the verifier"):
        convert(tmp_path / "theirs", tmp_path / "ours", verifier=tmp_path / "qwen3")
    saved(Gemma2Config(**SIZES, sliding_window=8), tmp_path / "gemma2")
    with pytest.raises(ValueError, match="is a gemma2: the keys and values of llama, .* choose another drafter"):
        QueryOnlyDraftModel.from_training_args(
            draft_layer_config(VERIFIERS["qwen3"]), verifier_name_or_path=str(tmp_path / "gemma2")
        )
    long = LlamaConfig(**SIZES, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))
    saved(long, tmp_path / "long")
    with pytest.raises(ValueError, match="rope_type='dynamic' depends on the length of a text.* another drafter"):
        QueryOnlyDraftModel.from_training_args(
            draft_layer_config(long), verifier_name_or_path=str(tmp_path / "long"), target_layer_ids=[2]
        )
    drafter = QueryOnlyDraftModel.from_training_args(
        draft_layer_config(VERIFIERS["qwen3"]), verifier_name_or_path=str(tmp_path / "qwen3"), target_layer_ids=[2]
    )
    drafter.save_pretrained(tmp_path / "of qwen3")
    with pytest.raises(ValueError, match="attention_scale=0.35.*: an engine reads the keys of Gemma 4"):
        export_native(tmp_path / "of qwen3", tmp_path / "exported")
    raw = drafter.config.to_dict()
    assert "the verifier is a qwen3" in drafter.serving_violations(raw, VERIFIERS["qwen3"])[1]
    assert len(drafter.serving_violations(raw, SHARED)) == 1
    with pytest.raises(ValueError, match=r"target_layer_ids=\[4\]: none of these layers attends to the whole text"):
        layers_with_keys(VERIFIERS["qwen3"], [4])


@pytest.mark.parametrize("family", KEY_FAMILIES)
def test_scores_have_the_verifiers_factor(family, tmp_path):
    model = saved(VERIFIERS[family], tmp_path)
    drafter = QueryOnlyDraftModel.from_training_args(
        draft_layer_config(model.config), verifier_name_or_path=str(tmp_path), target_layer_ids=[2]
    )
    for layer in drafter.config.key_layer_ids.values():
        assert drafter.config.attention_scale == model.model.layers[layer].self_attn.scaling


def test_the_command_serves_its_own_layout(tmp_path):
    saved(SHARED, tmp_path / "v")
    drafter = QueryOnlyDraftModel.from_training_args(
        draft_layer_config(SHARED), verifier_name_or_path=str(tmp_path / "v"), ttt_steps=3
    )
    drafter.save_pretrained(tmp_path / "drafter")
    words = ["serve", tmp_path / "drafter"]
    assert "--native" in run(*words).output
    done = run(*words, "--native", tmp_path / "native")
    assert done.exit_code == 0, done.output
    assert Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "native").config.backbone_hidden_size == H
    served = done.output
    assert '"method": "mtp"' in served and '"num_speculative_tokens": 3' in served and "native" in served
