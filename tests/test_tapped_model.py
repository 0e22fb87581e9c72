"""The tapped verifier gives vLLM's aux states for every layout, with padding, with a cache, and refuses what it does
not know."""

import os
import warnings

import pytest
import torch
from families import verifier as family_verifier
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    Qwen3Config,
)

from speculators_nb.cli.data_commands import dtype_of
from speculators_nb.verifier import tapped_model
from speculators_nb.verifier.cache import crop_cache
from speculators_nb.verifier.identity import fingerprint
from speculators_nb.verifier.tapped_model import (
    Verifier,
    check_aux_layer_ids,
    default_aux_layer_ids,
    faster_dtype,
)

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.2,
)
PLAIN = {
    k: SIZES[k]
    for k in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "mixtral": MixtralConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=4),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    "neox": GPTNeoXConfig(**PLAIN),
    "phi": PhiConfig(**PLAIN),
    "opt": OPTConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_dim=64,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
}
IDS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
CLOSE = dict(rtol=1e-4, atol=1e-4)  # float32, other order of sums; logits are of order ten


@pytest.fixture(scope="module", params=CONFIGS)
def verifier(request):
    torch.manual_seed(0)
    return Verifier(AutoModelForCausalLM.from_config(CONFIGS[request.param]), range(5))


def test_any_subset_of_layers(verifier):
    every = verifier(IDS).hidden_states.split(32, -1)
    for ids in ([0], [4], [1, 3], [0, 2, 4]):
        assert torch.equal(Verifier(verifier.model, ids)(IDS).hidden_states, torch.cat([every[i] for i in ids], -1))


def test_without_logits_the_head_does_not_run(verifier):
    runs, head = [], verifier.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda *_: runs.append(1))
    out = verifier(IDS, want_logits=False, use_cache=False)
    handle.remove()
    assert not runs and out.logits is None and out.past_key_values is None
    assert torch.equal(out.hidden_states, verifier(IDS).hidden_states)


def test_cache_continues_and_forgets(verifier):
    whole, cache = verifier(IDS), DynamicCache()
    verifier(IDS[:, :7], past_key_values=cache)
    verifier(IDS[:, 7:].flip(1), past_key_values=cache)  # a draft that is rejected
    assert cache.get_seq_length() == 12
    crop_cache(cache, 7)
    assert cache.get_seq_length() == 7
    out = verifier(IDS[:, 7:], past_key_values=cache)
    assert out.past_key_values is cache and cache.get_seq_length() == 12
    torch.testing.assert_close(out.logits, whole.logits[:, 7:], **CLOSE)
    torch.testing.assert_close(out.hidden_states, whole.hidden_states[:, 7:], **CLOSE)


def test_left_padding_with_a_cache(verifier):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    whole = verifier(IDS, mask)
    cache = verifier(IDS[:, :9], mask[:, :9]).past_key_values
    out = verifier(IDS[:, 9:], mask, past_key_values=cache)
    torch.testing.assert_close(out.logits, whole.logits[:, 9:], **CLOSE)


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [[3, 4], [1, 3], [2]])
def test_last_logits_leave_the_taps_whole(family, attention, layers):
    "The last two layers share keys; transformers 5.23 would give them the positions alone whose logits are wanted."
    model = family_verifier(family).model
    usual = model.config._attn_implementation
    model.set_attn_implementation(attention)
    v, ids = Verifier(model, layers), IDS.clamp(max=60)
    whole = v(ids)
    for n in (1, 3):
        first = v(ids[:, :7], want_logits=n)
        rest = v(ids[:, 7:], past_key_values=first.past_key_values, want_logits=n)
        for name in ("hidden_states", "last_hidden_states"):
            parts = torch.cat([getattr(out, name) for out in (first, rest)], 1)
            torch.testing.assert_close(parts, getattr(whole, name), **CLOSE)
        for out, end in ((first, 7), (rest, 12)):
            torch.testing.assert_close(out.logits, whole.logits[:, end - n : end], **CLOSE)
    model.set_attn_implementation(usual)


def test_short_taps_are_refused():
    v = Verifier(AutoModelForCausalLM.from_config(CONFIGS["llama"]), [1])
    v.norm.register_forward_pre_hook(lambda module, args: (args[0][:, -2:],))
    with pytest.raises(RuntimeError, match=r"2 of 12 positions enter layer 4 in transformers 5\.\d+"):
        v(IDS, want_logits=2)


def test_the_cache_is_given_by_its_name_of_today(verifier):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        cache = verifier(IDS[:, :7]).past_key_values
        verifier(IDS[:, 7:], past_key_values=cache, want_logits=False)


def test_model_is_left_as_it_was(verifier):
    verifier(IDS)
    assert not any(m._forward_pre_hooks for m in verifier.model.modules())
    with pytest.raises(IndexError):
        verifier(torch.tensor([[10**6]]))
    assert not any(m._forward_pre_hooks for m in verifier.model.modules())


def test_features_may_enter_a_backward_pass(verifier):
    fc = torch.nn.Linear(5 * 32, 8)
    states = verifier(IDS).hidden_states
    fc(states).sum().backward()
    torch.testing.assert_close(fc.weight.grad, states.flatten(0, -2).sum(0).expand(8, -1))
    with torch.inference_mode():
        assert verifier(IDS).hidden_states.is_inference()


@pytest.mark.parametrize(
    "n, ids",
    [
        (2, [0, 1, 2]),
        (3, [1, 2, 3]),
        (4, [1, 2, 3]),
        (5, [2, 3, 4]),
        (6, [2, 3, 4]),
        (7, [2, 3, 4]),
        (8, [2, 4, 5]),
        (32, [2, 16, 29]),
    ],
)
def test_default_ids(n, ids):
    assert default_aux_layer_ids(n) == ids


@pytest.mark.parametrize(
    "ids, rule",
    [([], "empty"), ([1, 1], "not distinct"), ([2, 1], "not ascending"), ([-1, 2], "outside"), ([1, 5], "outside")],
)
def test_bad_ids_are_named(ids, rule):
    with pytest.raises(ValueError, match=rule):
        check_aux_layer_ids(ids, 4)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"])
    model.save_pretrained(tmp_path)
    return tmp_path, model


def test_from_pretrained(saved):
    folder, model = saved
    verifier = Verifier.from_pretrained(str(folder), [1, 2])
    assert torch.equal(verifier(IDS).logits, Verifier(model)(IDS).logits) and verifier.aux_layer_ids == [1, 2]
    assert fingerprint(verifier.model) == fingerprint(model)
    assert Verifier.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_fingerprint_sees_one_weight(saved):
    _, model = saved
    before = fingerprint(model)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-3
    assert fingerprint(model) != before


def test_what_is_known_of_a_verifier_is_read_once(tmp_path, verifier, monkeypatch):
    from speculators_nb.verifier import identity
    from speculators_nb.verifier.identity import VerifierInfo

    verifier.model.save_pretrained(tmp_path)
    reads = []
    monkeypatch.setattr(
        identity, "verifier_config", lambda v, read=identity.verifier_config: reads.append(v) or read(v)
    )
    info = VerifierInfo.of(tmp_path)
    assert VerifierInfo.of(info) is info and os.fspath(info) == str(info) == str(tmp_path)
    assert VerifierInfo.of(info).fingerprint == info.fingerprint
    assert len(reads) == 1
    with pytest.raises(FileNotFoundError):
        VerifierInfo.of(tmp_path / "nowhere")


@pytest.mark.parametrize("slow, chosen", [(torch.float32, torch.bfloat16), (torch.bfloat16, None), (None, None)])
def test_the_dtype_of_products_is_measured(monkeypatch, slow, chosen):
    "A small verifier keeps its own, and so does one on a CPU that is no faster in bfloat16."
    clock, torch_linear = [0.0], torch.nn.functional.linear

    def linear(states, weight):
        clock[0] += 2.0 if states.dtype == slow else 1.0
        return torch_linear(states, weight)

    model = Verifier(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    assert faster_dtype(model) is None
    monkeypatch.setattr(tapped_model, "FEW_WEIGHTS", 0)
    monkeypatch.setattr(tapped_model.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert faster_dtype(model) is chosen
    model.model.bfloat16()
    assert faster_dtype(model) is None


@pytest.mark.parametrize("native", [False, True])
def test_weights_in_bfloat16_on_a_cpu_without_its_arithmetic_are_named(native, monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native}, raising=False)
    model = Verifier(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    for dtype in (torch.float32, torch.bfloat16):
        model.model.to(dtype)
        assert dtype_of(model, "auto") is None
        assert ("compute_dtype=float32" in caplog.text) == (dtype == torch.bfloat16 and not native)
