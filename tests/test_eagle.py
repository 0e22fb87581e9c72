"""EAGLE-1 and HASS against a re-derivation in plain loops and float64; the cache, the tree, the verifier that comes and
goes, the files."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from speculators_nb.core.config import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators_nb.core.registry import DynamicTreeTokenProposalConfig, GreedyTokenProposalConfig
from speculators_nb.decode.tree import Drafter, Sampling
from speculators_nb.decode.tree_growth import dynamic_tree
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert
from speculators_nb.models.eagle import EagleSpeculator, EagleSpeculatorConfig, feature_noise
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.serve.vllm_contract import check_vllm_contract

H, V, L = 16, 24, 22
SHAPE = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=256,
)
FOUR = list(itertools.product((False, True), (False, True)))


def random_model(seed, layernorms=False, fusion_bias=False, family=LlamaConfig, **layer):
    "A drafter attached to a random verifier, every weight off its initial zeros and ones."
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    verifier = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=2)).eval()
    model = EagleSpeculator(
        EagleSpeculatorConfig(
            transformer_layer_config=family(**SHAPE, num_hidden_layers=1, **layer),
            layernorms=layernorms,
            fusion_bias=fusion_bias,
        )
    )
    with torch.no_grad():
        for p in (*verifier.parameters(), *model.parameters()):
            p.copy_(torch.randn(p.shape, generator=g) * (0.3 if p.ndim > 1 else 0.2) + (p.ndim == 1))
    model.attach_verifier(verifier, "train_only")
    documents = torch.tensor([0] * 9 + [1] * 4 + [2] * 6 + [-1] * 3)
    batch = dict(
        input_ids=torch.randint(V, (1, L), generator=g),
        hidden_states=torch.randn(1, L, H, generator=g),
        document_ids=documents[None],
        loss_mask=((torch.rand(1, L, generator=g) < 0.7) & (documents >= 0)),
        verifier_last_hidden_states=torch.randn(1, L, H, generator=g),
        position_ids=torch.tensor([[*range(1, 10), *range(1, 5), *range(1, 7), 0, 0, 0]]),
    )
    return model, batch, g


class Plain:
    """The network in float64, one row at a time, from the papers. `w`: weights by their checkpoint names, and the
    verifier's."""

    def __init__(self, model):
        c = model.config.transformer_layer_config
        self.eps, self.theta, self.layernorms = c.rms_norm_eps, c.rope_parameters["rope_theta"], model.config.layernorms
        self.w = {n: p.detach().double().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}

    def rms(self, x, name):
        return x / (x.square().sum() / len(x) + self.eps).sqrt() * self.w[name]

    def feature(self, state):
        "The verifier's final norm."
        return self.rms(state.double(), "target_head.norm.weight").detach()

    def enter(self, token, feature):
        "(the layer's input, its residual)"
        e = self.w["embed_tokens.weight"][token].detach()
        if self.layernorms:
            e = self.rms(e, "embedding_layernorm.weight")
        x = self.w["fusion_fc.weight"] @ torch.cat([e, feature])
        if "fusion_fc.bias" in self.w:
            x = x + self.w["fusion_fc.bias"]
        return (self.rms(x, "transformer.input_layernorm.weight") if self.layernorms else x), x

    def heads(self, x, which, position=None):
        "Heads of 4 channels; with a position rotated, channel i with channel i + 2."
        out = []
        for head in (self.w[f"transformer.self_attn.{which}_proj.weight"] @ x).split(4):
            if f"transformer.self_attn.{which}_norm.weight" in self.w:
                head = self.rms(head, f"transformer.self_attn.{which}_norm.weight")
            if position is not None:
                angles = [position * self.theta ** (-i / 2) for i in range(2)]
                a, b = head[:2], head[2:]
                cos, sin = (torch.tensor([f(t) for t in angles], dtype=torch.float64) for f in (math.cos, math.sin))
                head = torch.cat([a * cos - b * sin, b * cos + a * sin])
            out.append(head)
        return out

    def leave(self, query, keys, residual):
        "query (input, position); keys: list of (input, position)."
        q, attended = self.heads(query[0], "q", query[1]), []
        ks, vs = [self.heads(x, "k", p) for x, p in keys], [self.heads(x, "v") for x, _ in keys]
        for h in range(4):
            weights = torch.stack([q[h] @ k[h // 2] / 2 for k in ks]).softmax(0)
            attended.append(sum(weight * v[h // 2] for weight, v in zip(weights, vs)))
        hidden = residual + self.w["transformer.self_attn.o_proj.weight"] @ torch.cat(attended)
        x = self.rms(hidden, "transformer.post_attention_layernorm.weight")
        gate = self.w["transformer.mlp.gate_proj.weight"] @ x
        hidden = hidden + self.w["transformer.mlp.down_proj.weight"] @ (
            gate * gate.sigmoid() * (self.w["transformer.mlp.up_proj.weight"] @ x)
        )
        return self.rms(hidden, "pre_lm_head_layernorm.weight") if self.layernorms else hidden

    def logits(self, feature):
        return self.w["lm_head.weight"].detach() @ feature

    def loss(self, batch, steps, feature_weight=1.0, soft=0.1, topk=None, noise=None):
        """HASS as its paper tells it, in the frame of positions: at step n the query at row r reads the guess of step n
        - 1 at row r - 1,
        and its key at distance d is made of what step n - d read (of the verifier's own features from distance n - 1
        on)."""
        topk = (1.0 if steps > 1 else 0.0) if topk is None else topk
        ids, docs, mask, positions = (
            batch[k][0].tolist() for k in ("input_ids", "document_ids", "loss_mask", "position_ids")
        )
        state, target = batch["hidden_states"][0], batch["verifier_last_hidden_states"][0]
        total = 0
        inputs = {}  # (step, row) -> what entered the layer there
        guesses = {}
        for n in range(1, steps + 1):
            losses = []
            for r in range(len(ids)):
                if docs[r] < 0:
                    continue
                if n == 1:
                    feature = self.feature(state[r]) + (0 if noise is None else noise[0, r].double())
                elif (n - 1, r - 1) in guesses and docs[r - 1] == docs[r]:
                    feature = guesses[n - 1, r - 1].detach()
                else:
                    continue
                inputs[n, r] = self.enter(ids[r], feature)
            for r in range(len(ids)):
                if (n, r) not in inputs:
                    continue
                keys = [(inputs[max(1, n - (r - j)), j][0], positions[j]) for j in range(r + 1) if docs[j] == docs[r]]
                guess = guesses[n, r] = self.leave((inputs[n, r][0], positions[r]), keys, inputs[n, r][1])
                if not mask[r]:
                    continue
                truth = self.feature(target[r])
                distance = sum(0.5 * d * d if abs(d.item()) < 1 else abs(d) - 0.5 for d in guess - truth) / H
                p, logq = self.logits(truth).softmax(0).detach(), self.logits(guess).log_softmax(0)
                best = sorted(range(V), key=lambda v: -p[v].item())[:10]
                losses.append(
                    feature_weight * distance - soft * (p * logq).sum() - topk * sum(p[v] * logq[v] for v in best)
                )
            if losses:
                total = total + sum(losses) / len(losses)
        return total


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.statement("release-61", "release-66")
@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config], ids=["llama", "qwen3"])
@pytest.mark.parametrize("layernorms,fusion_bias", FOUR)
@pytest.mark.parametrize("steps", [1, 3], ids=["eagle", "hass"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "dense"])
def test_plain_loops(steps, layernorms, fusion_bias, family, lean):
    "Loss to 1e-5 relative and every gradient to 1e-4 of its norm: float32 against float64."
    if family is Qwen3Config and not lean:
        pytest.skip("one family is enough for the definition")
    model, batch, g = random_model(steps, layernorms, fusion_bias, family)
    noise = torch.rand(1, L, H, generator=g) - 0.5
    plain = Plain(model)
    want = plain.loss(batch, steps, feature_weight=0.7, noise=noise)
    want.backward()
    model.train()
    tokens, loss, _ = model(**batch, forward_num_total=steps, feature_weight=0.7, noise=noise, lean=lean)
    loss.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert (tokens is None) == lean
    got = gradients(model)
    assert set(got) == {n for n, w in plain.w.items() if w.grad is not None}
    for name, grad in got.items():
        assert (grad - plain.w[name].grad).norm() <= 1e-4 * plain.w[name].grad.norm() + 1e-6, name


@pytest.mark.parametrize("layernorms,fusion_bias", FOUR)
def test_logits_and_cache(layernorms, fusion_bias):
    "The inference signature: all at once, in pieces with a cache, and by plain loops."
    model, _, g = random_model(2, layernorms, fusion_bias)
    ids, features = torch.randint(V, (2, 9), generator=g), torch.randn(2, 9, H, generator=g)
    with torch.no_grad():
        full = model(ids, features).logits
        plain = Plain(model)
        for b in range(2):
            inputs = [plain.enter(t, f.double()) for t, f in zip(ids[b].tolist(), features[b])]
            for r in range(9):
                guess = plain.leave(
                    (inputs[r][0], r), [(x, p) for p, (x, _) in enumerate(inputs[: r + 1])], inputs[r][1]
                )
                torch.testing.assert_close(full[b, r].double(), plain.logits(guess), rtol=1e-4, atol=1e-4)
        cache, parts = DynamicCache(), []
        for a, b in ((0, 4), (4, 5), (5, 9)):
            out = model(ids[:, a:b], features[:, a:b], past_key_values=cache, use_cache=True)
            cache, parts = out.past_key_values, [*parts, out.logits]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(ids, features, return_dict=False), full)
        assert model(ids, features).past_key_values is None and model(ids, features).hidden_states is None
        (guesses,) = model(ids, features, output_hidden_states=True).hidden_states
        torch.testing.assert_close(model.logits(guesses), full)


def test_padding_changes_nothing():
    "Left and right padding, whatever stands there; 4-D masks, bool and additive."
    model, _, g = random_model(3, True, True)
    ids, features = torch.randint(V, (1, 6), generator=g), torch.randn(1, 6, H, generator=g)
    with torch.no_grad():
        want = model(ids, features).logits
        for left in (True, False):
            pad = (2, 0) if left else (0, 2)
            wide, mask = torch.nn.functional.pad(ids, pad, value=5), torch.nn.functional.pad(torch.ones_like(ids), pad)
            states = torch.nn.functional.pad(features, (0, 0, *pad), value=3.0)
            got = model(wide, states, attention_mask=mask).logits
            assert got.isfinite().all()
            torch.testing.assert_close(got[mask.bool()], want[0], rtol=1e-4, atol=1e-4)
        allowed = torch.ones(6, 6).tril().bool()[None, None]
        torch.testing.assert_close(model(ids, features, attention_mask=allowed).logits, want)
        torch.testing.assert_close(model(ids, features, attention_mask=torch.where(allowed, 0.0, -1e9)).logits, want)
        with pytest.raises(ValueError, match="attention_mask has 6 columns for 4 cached and 6 new"):
            cache = model(ids[:, :4], features[:, :4], use_cache=True).past_key_values
            model(ids, features, attention_mask=torch.ones(1, 6), past_key_values=cache)
        with pytest.raises(TypeError, match="no document_ids"):
            model(ids, features, forward_num_total=2)


def test_a_mask_shows_the_steps_that_are_trained():
    "EAGLE one, HASS several; another drafter's word for them, of the explorer, comes first."
    model, batch, _ = random_model(0)
    for options, steps in ((dict(forward_num_total=3), 3), ({}, 1), (dict(ttt_steps=2), 2)):
        assert model.training_mask(batch, **options).keys == steps * batch["input_ids"].shape[1]


@pytest.mark.parametrize("seed", range(8))
def test_lean_is_dense(seed):
    """Over random weights, steps and windows: loss and metrics to 1e-5, gradients to 1e-4 of their norm (1e-6 but for
    one seed, whose gradients nearly cancel)."""
    window = dict(layer_types=["sliding_attention"], sliding_window=3, use_sliding_window=True) if seed % 2 else {}
    model, batch, _ = random_model(
        seed, seed % 3 == 0, seed % 4 == 0, Qwen3Config if seed % 2 else LlamaConfig, **window
    )
    model.eval()
    results = []
    for lean in (True, False):
        model.zero_grad()
        _, loss, metrics = model(
            **batch, forward_num_total=1 + seed % 4, loss_config={"tv": 0.5, "kl_div": 1.0}, lean=lean
        )
        loss.backward()
        results.append((loss, metrics, gradients(model)))
    (a, ma, ga), (b, mb, gb) = results
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (
        ma.keys() == mb.keys()
        and {"loss_0_sum", "feature_loss_0_total", "tv_loss_0_sum", "full_acc_0_sum", "cond_acc_0_total"} <= ma.keys()
    )
    for key in ma:
        torch.testing.assert_close(ma[key], mb[key], rtol=1e-5, atol=1e-5)
    for key in ga:
        assert (ga[key] - gb[key]).norm() <= 1e-4 * gb[key].norm() + 1e-6, key


def test_noise():
    "In training only; the same generator gives the same step; bounded by std/2 * 512/S of each document."
    model, batch, _ = random_model(5)
    model.train()

    def run(seed, **options):
        return model(**batch, generator=torch.Generator().manual_seed(seed), **options)[1].item()

    assert run(0) == run(0) != run(1)
    quiet = model(**batch, noise_std=0.0)[1].item()
    assert run(0) != quiet == model(**batch, noise=torch.zeros(1, L, H))[1].item()
    torch.manual_seed(3)
    first = model(**batch)[1].item()
    torch.manual_seed(3)
    assert first == model(**batch)[1].item()
    model.eval()
    assert run(0) == run(1) == quiet
    noise = feature_noise(batch["document_ids"][0], 4000, 0.2, torch.Generator().manual_seed(0))
    for document, size in ((0, 9), (1, 4), (2, 6)):
        widest = noise[batch["document_ids"][0] == document].abs().max().item()
        assert 0.999 * 0.1 * 512 / size < widest <= 0.1 * 512 / size


def test_scaled_heads():
    "A verifier that scales its logits (Granite, Cohere): the law of a perfect guess is the verifier's."
    model, batch, _ = random_model(6)
    model.target_head.scale = 0.25
    truth = model.target_head.norm(batch["verifier_last_hidden_states"][0])
    torch.testing.assert_close(model.logits(truth), model.target_head(batch["verifier_last_hidden_states"][0]))
    model.eval()
    lean, dense = (model(**batch, loss_config="kl_div", feature_weight=0.0, lean=x)[1].item() for x in (True, False))
    model.target_head.scale = 1.0
    assert lean == pytest.approx(dense, rel=1e-5) and lean != pytest.approx(
        model(**batch, loss_config="kl_div", feature_weight=0.0)[1].item(), rel=1e-2
    )


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_head_with_a_bias(scale):
    "A verifier whose head has a bias (Phi, GPT-J): the loss compares its law with the one that is drafted from."
    model, batch, g = random_model(7)
    model.eval()
    model.target_head.scale = scale
    model.target_head.bias = torch.nn.Parameter(3 * torch.randn(V, generator=g), requires_grad=False)
    on = (batch["loss_mask"] & (batch["document_ids"] >= 0))[0]
    last = batch["verifier_last_hidden_states"][0, on]
    row = [batch[name][0] for name in ("input_ids", "hidden_states", "document_ids", "position_ids")]
    row[1] = model.target_head.norm(row[1])
    drafted = model.logits(model.dense_hidden(*row, 1)[0][on]).log_softmax(-1)
    verifiers = model.target_head(last).log_softmax(-1)
    kl = (verifiers.exp() * (verifiers - drafted)).sum(-1).mean().item()
    for lean in (True, False):
        got = model(**batch, loss_config="kl_div", feature_weight=0.0, lean=lean)[1].item()
        assert got == pytest.approx(kl, rel=1e-4)


# ------------------------------------------------------------------------------------------------ drafting


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A random verifier in a folder."
    folder = tmp_path_factory.mktemp("verifier")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=3))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    model.save_pretrained(folder)
    return folder


def fresh(folder, **options):
    torch.manual_seed(1)
    model = EagleSpeculator.from_training_args(
        draft_layer_config(Qwen3Config(**SHAPE)), verifier_name_or_path=str(folder), **options
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.2 * torch.randn(p.shape)
    return model.eval()


@pytest.mark.statement("eagle-19")
@pytest.mark.parametrize("layernorms,fusion_bias", FOUR)
def test_drafting_is_what_was_trained(folder, layernorms, fusion_bias):
    "The drafter's cache, fed in two parts, gives the laws of training's steps on the row that it drafted itself."
    model, g = fresh(folder, layernorms=layernorms, fusion_bias=fusion_bias), torch.Generator().manual_seed(0)
    drafter, n, k = model.drafter(), 10, 4
    assert isinstance(drafter, Drafter) and drafter.aux_layer_ids == (3,) and drafter.trained_tokens == 3
    tokens, states = torch.randint(V, (n,), generator=g), torch.randn(n - 1, H, generator=g)
    drafter.propose(tokens[:6], states[:5], k, Sampling())
    tree = drafter.propose(tokens, states[5:], k, Sampling(0.7, g))
    row = torch.cat([tokens[1:], tree.tokens])
    with torch.no_grad():
        features = torch.cat([model.target_head.norm(states), torch.zeros(k, H)])
        hidden = model.dense_hidden(
            row, features, torch.zeros(len(row), dtype=torch.long), torch.arange(1, len(row) + 1), k
        )
        for t, law in enumerate(tree.probs):
            torch.testing.assert_close(law, (model.logits(hidden[t][n - 2]) / 0.7).softmax(-1), rtol=1e-4, atol=1e-5)
    greedy = drafter.propose(torch.cat([tokens, tree.tokens[:1]]), torch.randn(1, H, generator=g), k, Sampling())
    assert greedy.probs is None and greedy.parents.tolist() == [-1, 0, 1, 2]


# ------------------------------------------------------------------------------------------------ trees


def paths_of(tokens, parents):
    paths = {-1: ()}
    for i, (t, p) in enumerate(zip(tokens.tolist(), parents.tolist())):
        paths[i] = (*paths[p], t)
    return paths


def test_drafted_tree(folder):
    "Each node's law is what a chain along its path would have drafted; the decided cache is left as it was."
    model, g = fresh(folder, layernorms=True), torch.Generator().manual_seed(3)
    drafter, tokens, states = model.drafter(), torch.randint(V, (8,), generator=g), torch.randn(7, H, generator=g)
    drafter.propose(tokens[:5], states[:4], 3, Sampling())
    tree = drafter.draft_tree(tokens, states[4:], top_k=3, depth=4, total_tokens=14)
    assert len(tree) == 14 and tree.depth.max() <= 4
    features = model.target_head.norm(states)

    def law(nodes, drafted, parents):
        rows, paths = [], paths_of(drafted, parents)
        for i in nodes.tolist():  # each path anew, without a cache
            row = torch.tensor([*tokens[1:].tolist(), *paths[i]])
            read = features
            for _ in range(len(paths[i]) + 1):
                guess = model(row[: len(read)][None], read[None], output_hidden_states=True)
                read = torch.cat([read, guess.hidden_states[0][0, -1:]])
            rows.append(guess.logits[0, -1].log_softmax(-1))
        return torch.stack(rows)

    with torch.no_grad():
        want, _ = dynamic_tree(law, 3, 4, 14)
    assert set(paths_of(tree.tokens, tree.parents).values()) == set(paths_of(want.tokens, want.parents).values())
    chain = drafter.propose(torch.cat([tokens, tokens[:1]]), torch.ones(1, H), 3, Sampling())
    other = model.drafter()
    assert torch.equal(
        chain.tokens,
        other.propose(torch.cat([tokens, tokens[:1]]), torch.cat([states, torch.ones(1, H)]), 3, Sampling()).tokens,
    )


# ---------------------------------------------------------------------------------------------- config, verifier, files


@pytest.mark.statement("eagle-50")
def test_config():
    config = EagleSpeculatorConfig()
    assert (config.architectures, config.transformer_layer_architecture, config.layernorms, config.fusion_bias) == (
        ["EagleSpeculator"],
        "auto",
        False,
        False,
    )
    assert isinstance(config.transformer_layer_config, LlamaConfig)
    named = EagleSpeculatorConfig(transformer_layer_architecture="LlamaDecoderLayer")
    assert (
        named.architectures
        == ["EagleSpeculator", "LlamaDecoderLayer"]
        == EagleSpeculatorConfig.from_dict(named.to_dict()).architectures
    )
    config = EagleSpeculatorConfig(transformer_layer_config=Qwen3Config(**SHAPE, num_hidden_layers=1))
    EagleSpeculator(config)
    assert config.transformer_layer_architecture == "Qwen3DecoderLayer" and config.architectures == [
        "EagleSpeculator",
        "Qwen3DecoderLayer",
    ]
    with pytest.raises(
        ValueError, match="transformer_layer_architecture='MambaBlock' is not the layer of a LlamaConfig"
    ):
        EagleSpeculator(
            EagleSpeculatorConfig(
                transformer_layer_config=LlamaConfig(**SHAPE), transformer_layer_architecture="MambaBlock"
            )
        )


@pytest.mark.statement("eagle-28", "eagle-35")
def test_the_verifier_comes_and_goes(folder):
    ready = Qwen3ForCausalLM.from_pretrained(folder)
    model = EagleSpeculator(fresh(folder).config)
    own = set(model.state_dict())
    ids, features = torch.randint(V, (1, 4)), torch.randn(1, 4, H)
    assert model.verifier_attachment_mode == "detached" and model.verifier is None and model.embed_tokens is None
    for call in (lambda: model(ids, features), model.detach_verifier, model.drafter):
        with pytest.raises(RuntimeError, match="no verifier is attached"):
            call()
    logits = []
    for verifier, mode in ((ready, "full"), (ready, "train_only"), (str(folder), None), (folder, "train_only")):
        held = model.attach_verifier(verifier, mode)
        assert model.verifier is (None if mode == "train_only" else held)
        assert held is None if verifier == folder else isinstance(held, Qwen3ForCausalLM)
        assert model.verifier_attachment_mode == (mode or "full")
        assert model.verifier_layers == 3 and not any(n.startswith("verifier") for n in model.state_dict())
        assert {p for p in model.parameters() if p.requires_grad} == {
            model.get_parameter(n) for n in own if "target_head" not in n
        }
        assert ready.get_input_embeddings().weight.requires_grad
        if verifier is ready:
            assert model.embed_tokens.weight.data_ptr() == ready.get_input_embeddings().weight.data_ptr()
        logits.append(model(ids, features).logits)
        with pytest.raises(RuntimeError, match="attached already"):
            model.attach_verifier(ready)
        model.detach_verifier()
        assert set(model.state_dict()) == own and model.verifier_attachment_mode == "detached"
    assert all(torch.equal(logits[0], x) for x in logits)
    with pytest.raises(ValueError, match="verifier_attachment_mode='half'"):
        model.attach_verifier(ready, "half")
    with pytest.raises(TypeError, match="verifier is a int"):
        model.attach_verifier(3)
    with pytest.raises(ValueError, match="embeds 30 tokens in 16"):
        model.attach_verifier(LlamaForCausalLM(LlamaConfig(**SHAPE | dict(vocab_size=30), num_hidden_layers=1)))
    with pytest.raises(ValueError, match="LlamaModel, which has no output head; give the same model as a causal LM"):
        model.attach_verifier(LlamaModel(LlamaConfig(**SHAPE, num_hidden_layers=1)))
    assert model.verifier_attachment_mode == "detached"
    assert EagleSpeculator(model.config, ready).verifier is ready
    assert EagleSpeculator(model.config, ready, "detached").verifier is None
    with pytest.raises(ValueError, match="not loaded yet"):
        SpeculatorModel.verify_training_compatible(model)


@pytest.mark.parametrize("layernorms,fusion_bias", FOUR)
def test_checkpoint(folder, tmp_path, layernorms, fusion_bias):
    "Exactly the documented tensors; the config says what the 0.4 line says; what is loaded drafts the same."
    model = fresh(folder, layernorms=layernorms, fusion_bias=fusion_bias)
    model.save_pretrained(tmp_path / "draft")
    names = {
        "fusion_fc.weight",
        "transformer.post_attention_layernorm.weight",
        *(f"transformer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"transformer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    }
    names |= {"fusion_fc.bias"} if fusion_bias else set()
    names |= (
        {"embedding_layernorm.weight", "transformer.input_layernorm.weight", "pre_lm_head_layernorm.weight"}
        if layernorms
        else set()
    )
    assert set(load_file(tmp_path / "draft/model.safetensors")) == names
    config = json.loads((tmp_path / "draft/config.json").read_text())
    assert (config["speculators_model_type"], config["architectures"], config["transformer_layer_architecture"]) == (
        "eagle",
        ["EagleSpeculator", "LlamaDecoderLayer"],
        "LlamaDecoderLayer",
    )
    assert (config["layernorms"], config["fusion_bias"], config["transformer_layer_config"]["num_hidden_layers"]) == (
        layernorms,
        fusion_bias,
        1,
    )
    assert "model_type" not in config and "draft_vocab_size" not in config
    again = SpeculatorModel.from_pretrained(tmp_path / "draft")
    ids, features = torch.randint(V, (1, 4)), torch.randn(1, 4, H)
    assert again.verifier_attachment_mode == "train_only" and torch.equal(
        again(ids, features).logits, model(ids, features).logits
    )
    SpeculatorModel.verify_training_compatible(again)
    violations = check_vllm_contract(tmp_path / "draft")
    assert len(violations) == 1 and "save_native" in violations[0]
    assert EagleSpeculator.from_pretrained(tmp_path / "draft", verifier_attachment_mode="detached").embed_tokens is None
    assert (
        EagleSpeculator.from_pretrained(
            tmp_path / "draft", verifier_attachment_mode="full"
        ).verifier.config.num_hidden_layers
        == 3
    )
    assert (
        EagleSpeculator.from_pretrained(tmp_path / "draft", verifier=Qwen3ForCausalLM.from_pretrained(folder)).verifier
        is not None
    )
    config["speculators_config"]["verifier"]["name_or_path"] = "nowhere/to-be-found"
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    assert SpeculatorModel.from_pretrained(tmp_path / "draft").verifier_attachment_mode == "detached"


def test_native_layout(folder, tmp_path):
    model = fresh(folder)
    model.save_native(tmp_path / "native")
    tensors = load_file(tmp_path / "native/model.safetensors")
    config = json.loads((tmp_path / "native/config.json").read_text())
    assert (config["model_type"], config["architectures"], config["num_hidden_layers"]) == (
        "llama",
        ["LlamaForCausalLM"],
        1,
    )
    assert set(tensors) == {
        "fc.weight",
        "embed_tokens.weight",
        "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    }
    assert torch.equal(tensors["fc.weight"], model.fusion_fc.weight) and torch.equal(
        tensors["layers.0.mlp.up_proj.weight"], model.transformer.mlp.up_proj.weight
    )
    assert (
        not {"speculators_model_type", "layer_types"} & config.keys()
        and LlamaConfig.from_pretrained(tmp_path / "native").hidden_size == H
    )
    assert "logit_scale" not in config
    model.target_head.scale = 0.5  # of a Cohere's or Granite's verifier: vLLM reads the drafter's own config.json
    model.save_native(tmp_path / "scaled")
    assert json.loads((tmp_path / "scaled/config.json").read_text())["logit_scale"] == 0.5
    with pytest.raises(ValueError, match="logit_scale is 0.5"):  # for another verifier
        convert(tmp_path / "scaled", tmp_path / "no", folder)
    with pytest.raises(ValueError, match="fusion_bias=True: vLLM"):
        fresh(folder, fusion_bias=True).save_native(tmp_path / "no")
    torch.manual_seed(0)
    slides = EagleSpeculator.from_training_args(
        draft_layer_config(Qwen3Config(**SHAPE), full_attention_indices=()), verifier_name_or_path=str(folder)
    )
    with pytest.raises(ValueError, match="sliding window: vLLM"):
        slides.save_native(tmp_path / "no")
    qwen = EagleSpeculator.from_training_args(
        draft_layer_config(Qwen3Config(**SHAPE), "qwen3"), verifier_name_or_path=str(folder)
    )
    with pytest.raises(ValueError, match="'qwen3': vLLM's EAGLE-1 has a Llama layer"):
        qwen.save_native(tmp_path / "no")


def test_training_arguments(folder):
    kwargs, val = EagleSpeculator.get_trainer_kwargs(learning_rate=1.0)
    assert kwargs == val == dict(forward_num_total=1, feature_weight=1.0, loss_config={"soft_ce": 0.1}, noise_std=0.2)
    assert EagleSpeculator.get_trainer_kwargs(forward_num_total=3)[0]["loss_config"] == {"soft_ce": 0.1, "topk_ce": 1.0}
    assert EagleSpeculator.get_trainer_kwargs(forward_num_total=3, loss_fn="kl_div")[0]["loss_config"] == {
        "kl_div": 1.0
    }
    assert SpeculatorModelConfig.registered_class("eagle") is EagleSpeculatorConfig
    layers = EagleSpeculator.from_training_args(
        Qwen3Config(**SHAPE, num_hidden_layers=3), verifier_name_or_path=str(folder)
    ).config.transformer_layer_config
    assert (layers.num_hidden_layers, layers.layer_types) == (1, ["full_attention"])
    t2d = torch.arange(V) < 12
    with pytest.raises(ValueError, match="draft_vocab_size=12 of 24: EAGLE shares"):
        EagleSpeculator.from_training_args(
            draft_layer_config(Qwen3Config(**SHAPE)), t2d, torch.zeros(12), verifier_name_or_path=str(folder)
        )
    with pytest.raises(ValueError, match="draft_vocab_size=12 of 24"):
        EagleSpeculator.from_training_args(
            draft_layer_config(Qwen3Config(**SHAPE)), verifier_name_or_path=str(folder), draft_vocab_size=12
        )
    with pytest.raises(ValueError, match="forward_num_total=0"):
        (lambda m, b, g: m(**b, forward_num_total=0))(*random_model(0))


def documented(folder, method=None, attach=True):
    "The documentation's own example: a config, a verifier, mode full."
    method = method or GreedyTokenProposalConfig(speculative_tokens=3)
    config = EagleSpeculatorConfig(
        transformer_layer_config=AutoConfig.from_pretrained(folder),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle",
            proposal_methods=[method],
            default_proposal_method=method.proposal_type,
            verifier=VerifierConfig(name_or_path=str(folder), architectures=["Qwen3ForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    return EagleSpeculator(config, verifier=str(folder) if attach else None, verifier_attachment_mode="full")


def test_generate_is_the_verifiers_own(folder):
    """Greedy, as `transformers` itself writes: one row, a padded batch, stop tokens, both limits; by a chain and by a
    tree."""
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    tree = DynamicTreeTokenProposalConfig(speculative_tokens=8, expansion_factor=3, depth=3)
    for speculator in (documented(folder), documented(folder, tree)):
        verifier = speculator.verifier
        for options in (
            dict(max_new_tokens=9),
            dict(max_length=12),
            dict(max_new_tokens=9, attention_mask=padding),
            dict(max_new_tokens=9, eos_token_id=int(verifier.generate(ids)[1, 8]), pad_token_id=7),
            {},
        ):
            assert torch.equal(speculator.generate(ids, **options), verifier.generate(ids, do_sample=False, **options))
        assert speculator.generate(ids[0], max_new_tokens=2).shape == (1, 7)
    with pytest.raises(ValueError, match="repetition_penalty=1.5: speculative decoding here knows"):
        speculator.generate(ids, repetition_penalty=1.5)
    with pytest.raises(ValueError, match="max_length=4: the prompt has 5 tokens"):
        speculator.generate(ids, max_length=4)
    with pytest.raises(TypeError, match="generate got beam: not a field"):
        speculator.generate(ids, beam=2)


def test_generate_reads_its_arguments_as_transformers(folder):
    "Padding is found by the pad token, a given config is filled from the verifier's, flags are not taken for neutral."
    speculator = documented(folder)
    verifier = speculator.verifier
    ids = torch.tensor([[7, 7, 4, 1, 5], [9, 2, 6, 5, 3]])
    for options in (dict(pad_token_id=7), dict(pad_token_id=7, eos_token_id=7), {}):
        options |= dict(max_new_tokens=6)
        assert torch.equal(speculator.generate(ids, **options), verifier.generate(ids, do_sample=False, **options))
    verifier.generation_config.eos_token_id = int(verifier.generate(ids)[1, 8])
    given = GenerationConfig(max_new_tokens=9, pad_token_id=0)
    assert torch.equal(speculator.generate(ids, generation_config=given), verifier.generate(ids, given))
    for name, value in dict(return_dict_in_generate=True, max_time=1.0, forced_eos_token_id=1).items():
        with pytest.raises(ValueError, match=f"{name}={value}: speculative decoding here knows"):
            speculator.generate(ids, **{name: value})
    speculator.generate(ids, max_new_tokens=1, num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(input_ids={"input_ids": [1]}), TypeError, "input_ids is a dict; give a tensor of token ids"),
        (dict(input_ids=torch.ones(1, 3)), TypeError, "input_ids is torch.float32; give a tensor of token ids"),
        (dict(attention_mask=torch.ones(1, 2)), ValueError, r"attention_mask is \[1, 2\] and input_ids \[1, 3\]"),
        (dict(generation_config={}), TypeError, "generation_config is a dict; give a GenerationConfig"),
        (dict(eos_token_id="</s>"), TypeError, "eos_token_id='</s>': give a token id or a list of them"),
        (dict(max_new_tokens="4"), TypeError, "max_new_tokens='4': give a whole number"),
    ],
)
def test_generate_refuses_in_one_line(folder, options, error, message):
    "The argument, its value and what to give; the drafter stays in the mode that it was in."
    speculator = documented(folder).train()
    with pytest.raises(error, match=message) as refused:
        speculator.generate(**dict(input_ids=torch.tensor([[1, 2, 3]])) | options)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="prompt_ids holds"):
        speculator.generate(torch.tensor([[V]]))
    assert speculator.training


def test_wrong_arguments_of_forward_and_mode(folder):
    "States that are not beside their tokens, and a mode that there is not."
    speculator = documented(folder)
    for shape in ((1, 3, H), (1, 4, H + 1)):
        with pytest.raises(ValueError, match=r"hidden_states is \[1, \d, \d+\]; beside input_ids it is \[1, 4, 16\]"):
            speculator(torch.randint(V, (1, 4)), torch.randn(shape))
    with pytest.raises(ValueError, match="verifier_attachment_mode='all': choose 'detached' or"):
        EagleSpeculator(speculator.config, verifier_attachment_mode="all")
    with pytest.raises(TypeError, match="verifier is a EagleSpeculator, a drafter; attach the model"):
        documented(folder, attach=False).attach_verifier(speculator)


def test_generate_keeps_the_distribution(folder):
    "The second sampled token's frequencies over 1,200 requests against the verifier's exact ones (chi squared)."
    speculator, n = documented(folder), 1200
    torch.manual_seed(1)
    prompt = torch.tensor([[3, 1, 4]])
    options = dict(max_new_tokens=3, do_sample=True, top_k=0, temperature=0.7)
    drawn = speculator.generate(prompt.expand(n, -1), **options)[:, 4]
    with torch.no_grad():
        first = (speculator.verifier(prompt).logits[0, -1] / 0.7).softmax(-1)
        rows = torch.cat([prompt.expand(V, -1), torch.arange(V)[:, None]], 1)
        second = (speculator.verifier(rows).logits[:, -1] / 0.7).softmax(-1)
    expected = n * (first @ second)
    counts = torch.bincount(drawn, minlength=V)
    assert ((counts - expected) ** 2 / expected).sum() < 50  # 23 degrees of freedom: p < 0.001
    likeliest = second.argmax(-1)
    (a, b) = speculator.generate(prompt.expand(2, -1), max_new_tokens=2, do_sample=True, top_k=1)[:, 3:]
    assert torch.equal(a, b) and a[1] == likeliest[a[0]]


def test_the_verifier_that_is_attached(folder):
    "Returned in both modes; without the whole of it nothing is generated; ValueError as documented."
    speculator = documented(folder, attach=False)
    verifier = Qwen3ForCausalLM.from_pretrained(folder)
    ids, features = torch.randint(V, (1, 4)), torch.randn(1, 4, H)
    for use in (lambda: speculator(ids, features), lambda: speculator.generate(ids), speculator.detach_verifier):
        with pytest.raises(ValueError, match="verifier"):
            use()
    assert speculator.attach_verifier(verifier, mode="train_only") is verifier and speculator.verifier is None
    with pytest.raises(ValueError, match="verifier_attachment_mode='train_only'"):
        speculator.generate(ids)
    assert speculator(ids, features).logits.shape == (1, 4, V)
    speculator.detach_verifier()
    assert speculator.attach_verifier(verifier) is verifier is speculator.verifier


@pytest.mark.parametrize("window", [None, 3])
def test_attentions(window):
    "Rows sum to one, nothing ahead or outside of the window or at padding, and they make the heads that are used."
    kind = dict(layer_types=["sliding_attention"], sliding_window=3, use_sliding_window=True) if window else {}
    model, _, g = random_model(3, True, True, Qwen3Config, **kind)
    ids, features = torch.randint(V, (2, 6), generator=g), torch.randn(2, 6, H, generator=g)
    padding = torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
    plain = model(ids, features, attention_mask=padding)
    out = model(ids, features, attention_mask=padding, output_attentions=True)
    assert plain.attentions is None and torch.equal(plain.logits, out.logits)
    (weights,) = out.attentions
    assert weights.shape == (2, 4, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    assert not weights.triu(1).any() and not weights[0, :, 1:, 0].any()
    assert window is None or not weights.tril(-3).any()
    x = model.transformer.inputs(model.fuse(ids, features))[0]
    values = model.transformer.self_attn.key_value(x, model.rotary(x, torch.arange(6).expand(2, -1)))[1]
    heads, found = weights @ values.repeat_interleave(2, 1), []
    model.transformer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(ids, features, attention_mask=padding)
    torch.testing.assert_close(found[0], heads.transpose(1, 2).flatten(2))


def test_legacy_cache():
    "Pairs of keys and values by layer, as transformers had them before it had a class."
    model, _, g = random_model(2)
    ids, features = torch.randint(V, (1, 6), generator=g), torch.randn(1, 6, H, generator=g)
    cache = model(ids[:, :4], features[:, :4], use_cache=True).past_key_values
    pairs = tuple((layer.keys.clone(), layer.values.clone()) for layer in cache.layers)
    want = model(ids[:, 4:], features[:, 4:], past_key_values=cache).logits
    out = model(ids[:, 4:], features[:, 4:], past_key_values=pairs)
    assert torch.equal(out.logits, want) and out.past_key_values.get_seq_length() == 6
    assert pairs[0][0].shape[-2] == 4
    with pytest.raises(TypeError, match="past_key_values is a int"):
        model(ids, features, past_key_values=3)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_layers_like_llamas(folder, tmp_path, family):
    "Config, architectures, a training step and a checkpoint of the other families with the same layer."
    config = {"mistral": MistralConfig, "qwen2": Qwen2Config}[family](**SHAPE, num_hidden_layers=2)
    model = EagleSpeculator.from_training_args(config, verifier_name_or_path=str(folder))
    decoder = {"mistral": "MistralDecoderLayer", "qwen2": "Qwen2DecoderLayer"}[family]
    assert model.config.architectures == ["EagleSpeculator", decoder]
    assert model.config.transformer_layer_architecture == decoder
    assert model.transformer.window == (4096 if family == "mistral" else None)
    assert (model.transformer.self_attn.q_proj.bias is not None) == (family == "qwen2")
    batch = random_model(0)[1]
    a, b = (model.eval()(**batch, forward_num_total=2, lean=lean)[1] for lean in (True, False))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path)
    again = SpeculatorModel.from_pretrained(tmp_path, verifier=folder)
    assert again.config == model.config
    assert torch.equal(again.eval()(**batch)[1], model(**batch)[1])
    named = EagleSpeculatorConfig(transformer_layer_config=config, transformer_layer_architecture=decoder)
    assert named.architectures == ["EagleSpeculator", decoder]
