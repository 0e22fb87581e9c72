"""DSpark against upstream's recorded numbers, against a definition by loops, and the lean pass against the dense one;
drafting's law against what is drawn."""

import math
from collections import defaultdict

import pytest
import torch
from blocks import (
    V,
    check_checkpoints,
    check_distribution,
    check_lean,
    check_pairs,
    fresh,
    greedy_text,
    of_draft_vocabulary,
    picker,
    random_drafter,
    random_layer,
    random_row,
    read_in_two_parts,
    second_and_third,
    served_states,
    states_of,
    text_and_features,
    tiny_verifier,
)
from recorded import cases, load_case
from safetensors.torch import load_file
from transformers import GPT2Config, Qwen3Config

from speculators_nb.decode.generate import generate
from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig, MarkovHead
from speculators_nb.verifier.tapped_model import Verifier

CASES = cases("dspark")


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    "Base logits, and where recorded those with the bias, of every slot of every block, to 1e-4 absolute."
    model, batch, kwargs, _, folder = load_case(name)
    want = load_file(folder / "outputs.safetensors")
    anchors = batch["anchor_positions"]
    with torch.no_grad():
        x, hidden = states_of(model, batch)
        logits = model.lm_head(hidden)
        torch.testing.assert_close(logits.flatten(0, 1), want["lm_head_out.0"][0], rtol=0, atol=1e-4)
        if "logits" in want:
            if model.markov_head is not None:
                logits = logits + model.markov_head.markov_w2(
                    model.markov_head(
                        model.markov_head.markov_w1(model.tokens_in_front(x["input_ids"], anchors)), hidden
                    )
                )
            torch.testing.assert_close(logits.flatten(0, 1), want["logits"][0], rtol=0, atol=1e-4)
            drafted, *_ = model(**batch, **kwargs, cross_document_targets=True, lean=False)
            assert torch.equal(drafted[0], model.to_verifier(want["logits"][0].argmax(-1)))


@pytest.mark.parametrize("name", [c for c in CASES if c != "dspark"])  # its verifier is not among the fixtures
def test_checkpoints_load_again(name, tmp_path, monkeypatch):
    check_checkpoints(name, tmp_path, monkeypatch)


# ---- the definition, by loops, from the papers' sentences


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turn(x, position, theta):
    "Rotary embedding of [heads, D] at one position, halves paired."
    half = x.shape[-1] // 2
    angle = position * theta ** -(torch.arange(half, dtype=x.dtype) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def block_by_loops(w, config, batch, anchor):
    """One block from the paper's sentences: w is a plain state dict. Returns (hidden [B, H], base logits, final logits
    [B, Vd], confidence logits [B] or None)."""
    layer, size = config.transformer_layer_config, config.block_size
    eps, d, theta = layer.rms_norm_eps, layer.head_dim, layer.rope_parameters["rope_theta"]
    x = {k: v[0] for k, v in batch.items() if k in ("input_ids", "hidden_states", "position_ids")}
    documents = batch["document_ids"][0]
    context = rms(x["hidden_states"] @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    ids = [int(x["input_ids"][anchor])] + [config.mask_token_id] * (size - 1)
    hidden = w["embed_tokens.weight"][ids]
    start = int(x["position_ids"][anchor])
    for i, kind in enumerate(layer.layer_types):

        def of(name, i=i):
            return w[f"layers.{i}.{name}.weight"]

        normed = rms(hidden, of("input_layernorm"), eps)

        def heads(rows, name, i=i):
            return (rows @ of(f"self_attn.{name}", i).T).unflatten(-1, (-1, d))

        def keys(rows, positions):
            return [
                turn(rms(k, of("self_attn.k_norm"), eps), p, theta) for k, p in zip(heads(rows, "k_proj"), positions)
            ]

        sliding, out = kind == "sliding_attention", []
        past = [
            j
            for j in range(anchor)
            if documents[j] == documents[anchor] >= 0 and (not sliding or j >= anchor - layer.sliding_window)
        ]
        past_k = keys(context[past], [int(x["position_ids"][j]) for j in past])
        past_v = list(heads(context[past], "v_proj"))
        own_k, own_v = keys(normed, range(start, start + size)), list(heads(normed, "v_proj"))
        whole = not sliding or config.sliding_window_non_causal if layer.is_causal is None else not layer.is_causal
        sinks = w.get(f"layers.{i}.self_attn.attention_sink_bias")
        for s in range(size):
            q = turn(rms(heads(normed[s : s + 1], "q_proj")[0], of("self_attn.q_norm"), eps), start + s, theta)
            seen = [t for t in range(size) if t <= s or whole]
            k, v = torch.stack(past_k + [own_k[t] for t in seen]), torch.stack(past_v + [own_v[t] for t in seen])
            share = q.shape[0] // k.shape[1]
            read = []
            for h in range(q.shape[0]):
                weight = ((k[:, h // share] @ q[h]) / d**0.5).exp()
                total = weight.sum() if sinks is None else weight.sum() + sinks[h].exp()
                read.append(weight @ v[:, h // share] / total)
            out.append(torch.cat(read))
        hidden = hidden + torch.stack(out) @ of("self_attn.o_proj").T
        m = rms(hidden, of("post_attention_layernorm"), eps)
        hidden = (
            hidden
            + (torch.nn.functional.silu(m @ of("mlp.gate_proj").T) * (m @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
        )
    hidden = rms(hidden, w["norm.weight"], eps)
    logits, final, confidence = hidden @ w["lm_head.weight"].T, [], []
    state = torch.zeros(config.markov_rank, dtype=hidden.dtype)
    for s in range(size):
        # the token in front of the one that slot s predicts
        before = anchor + s if config.sample_from_anchor else anchor + max(s - 1, 0)
        e = w["markov_head.markov_w1.weight"][x["input_ids"][before]] if config.markov_rank else None
        if config.markov_rank:
            code = e
            if config.markov_head_type == "gated":
                code = e * torch.sigmoid(
                    w["markov_head.gate_proj.weight"] @ torch.cat([hidden[s], e]) + w["markov_head.gate_proj.bias"]
                )
            if config.markov_head_type == "rnn":
                gate, new, read = (
                    w["markov_head.joint_proj.weight"] @ torch.cat([state, e, hidden[s]])
                    + w["markov_head.joint_proj.bias"]
                ).split(config.markov_rank)
                state = torch.sigmoid(gate) * state + torch.sigmoid(-gate) * torch.tanh(new)
                code = torch.tanh(read)
            final.append(logits[s] + w["markov_head.markov_w2.weight"] @ code)
        else:
            final.append(logits[s])
        if config.enable_confidence_head:
            read = torch.cat([hidden[s], e]) if config.confidence_head_with_markov else hidden[s]
            confidence.append(w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0])
    return hidden, logits, torch.stack(final), torch.stack(confidence) if confidence else None


def loss_by_loops(w, config, batch, gamma=4.0, confidence_head_alpha=1.0, cross_document_targets=False, loss="kl_div"):
    "The loss (kl_div, decaying weights) and the metrics, block by block, number by number."
    size, first = config.block_size, 0 if config.sample_from_anchor else 1
    documents, mask = batch["document_ids"][0], batch["loss_mask"][0]
    eps, total, bce_total, count = config.transformer_layer_config.rms_norm_eps, 0.0, 0.0, 0
    m = defaultdict(float)
    for anchor, valid in zip(batch["anchor_positions"].tolist(), batch["anchor_valid"].tolist()):
        if not valid:
            continue
        _, _, logits, confidence = block_by_loops(w, config, batch, anchor)
        alive, surely, believed, length, run, supervised_any = True, 1.0, 1.0, 1.0, 1, False
        for s in range(first, size):
            predicted = anchor + s  # its entry in mask, and with sample_from_anchor in targets
            supervised = bool(mask[predicted]) and (cross_document_targets or documents[predicted] == documents[anchor])
            if not supervised:
                alive, surely, believed = False, 0.0, 0.0
                continue
            supervised_any, count = True, count + 1
            state = batch["verifier_last_hidden_states"][0, predicted - first]
            target = w["verifier_lm_head.weight"] @ rms(state, w["verifier_norm.weight"], eps)
            p, q = target.softmax(0), logits[s].softmax(0)
            alpha = float(torch.minimum(p, q).sum().detach())
            weight = math.exp(-(s - first) / gamma)
            total = total + weight * (p * (p.log() - q.log())).sum()
            right = int(target.argmax()) == int(logits[s].argmax())
            alive, surely = alive and right, surely * alpha
            m["full_acc_sum"] += right
            m["full_acc_total"] += 1
            m[f"position_{s}_acc_sum"] += right
            m[f"position_{s}_acc_total"] += 1
            m["accept_rate_sum"] += alpha
            m["accept_rate_total"] += 1
            length, run = length + surely, run + alive
            if confidence is not None:
                c = torch.sigmoid(confidence[s])
                bce_total = bce_total - weight * (alpha * c.log() + (1 - alpha) * (1 - c).log())
                c = float(c.detach())
                believed *= c
                m["confidence_abs_error_sum"] += abs(c - alpha)
                m["confidence_pred_mean_sum"] += c
                m["confidence_cumprod_bias_sum"] += believed - surely
        if supervised_any:
            m["accept_len_sum"] += length
            m["accept_len_total"] += 1
            m["eal_sum"] += run
            m["eal_total"] += 1
    loss = total / (count + 1e-5)
    if config.enable_confidence_head:
        bce = bce_total / (count + 1e-8)
        m["confidence_loss_sum"] = float(bce.detach())
        loss = loss + confidence_head_alpha * bce
    return loss, m


def random_model(seed, **fixed):
    "A drafter of random shape with random weights, and a random packed row with its anchors."
    g = torch.Generator().manual_seed(seed)
    pick = picker(g)
    kind, rank, confidence = pick("vanilla", "gated", "rnn"), pick(0, 5, 5, 5), pick(True, True, False)
    fields = dict(
        transformer_layer_config=random_layer(pick),
        draft_vocab_size=pick(20, V),
        aux_hidden_state_layer_ids=pick([1], [1, 3]),
        block_size=pick(2, 4, 5),
        mask_token_id=29,
        sample_from_anchor=pick(True, False),
        sliding_window_non_causal=pick(True, False),
        markov_rank=rank,
        markov_head_type=kind,
        enable_confidence_head=confidence,
        confidence_head_with_markov=bool(rank) and pick(True, False),
    )
    config = DSparkSpeculatorConfig(**fields | fixed)
    return random_drafter(config, g), random_row(config, g)


@pytest.mark.parametrize("seed", range(10))
def test_definition_by_loops(seed):
    """Loss, metrics and gradients of the lean pass are those of a definition that goes block by block, slot by slot,
    key by key, with supervision kept inside documents or not."""
    model, batch = random_model(seed)
    model, cross = model.double().train(), bool(seed % 2)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    batch["anchor_valid"] &= batch["document_ids"][0, batch["anchor_positions"]] >= 0
    _, loss, metrics = model(**batch, gamma=3.0, confidence_head_alpha=0.7, cross_document_targets=cross)
    loss.backward()
    state = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    state |= {
        "verifier_lm_head.weight": model.target_head.weight.detach(),
        "verifier_norm.weight": model.target_head.norm.weight.detach(),
    }
    want, counted = loss_by_loops(state, model.config, batch, 3.0, 0.7, cross)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)  # row losses are float32
    for key, value in counted.items():
        scale = float(metrics["confidence_loss_total"]) if key == "confidence_loss_sum" else 1.0
        assert float(metrics[key]) == pytest.approx(value * scale, rel=1e-5, abs=1e-5), key
    want.backward()
    for name, p in model.named_parameters():
        if p.requires_grad and state[name].grad is not None:
            assert (p.grad - state[name].grad).norm() <= 1e-5 * state[name].grad.norm() + 1e-8, name


@pytest.mark.parametrize("seed", range(16))
def test_lean_is_dense(seed):
    """Over random shapes, windows, heads and packings: loss, metrics and gradients of the lean pass are those of the
    dense one, to 1e-5."""
    model, batch = random_model(100 + seed)
    weights = dict(loss_config={"kl_div": 1.0, "tv": 0.5})
    if seed % 4 == 0:
        weights = dict(loss_config="ce", per_position_loss_weight="dpace")
    check_lean(model, batch, **weights, serving_window=seed % 3 == 0)


def test_confidence_target_carries_no_gradient():
    """Only the confidence loss trains the confidence head, and its target pulls at nothing: with weight 0 the drafter's
    gradients are those without the head."""
    model, batch = random_model(
        3, markov_rank=4, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True
    )
    model(**batch, confidence_head_alpha=0.0)[1].backward()
    with_head = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert (
        not with_head.pop("confidence_head.proj.weight").any() and not with_head.pop("confidence_head.proj.bias").any()
    )
    model.zero_grad(), setattr(model, "confidence_head", None)
    model(**batch)[1].backward()
    for name, grad in with_head.items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_block_is_its_steps(kind):
    g = torch.Generator().manual_seed(0)
    head = MarkovHead(11, 7, 4, 5, kind)
    embeds, hidden = torch.randn(3, 6, 4, generator=g), torch.randn(3, 6, 5, generator=g)
    state, codes = torch.zeros(3, 4), []
    for s in range(6):
        code, state = head.step(embeds[:, s], hidden[:, s], state)
        codes.append(code)
    torch.testing.assert_close(torch.stack(codes, 1), head(embeds, hidden), rtol=1e-6, atol=1e-6)
    if kind == "rnn":  # an early token reaches late slots; elsewhere only its own
        other = embeds.clone()
        other[:, 0] += 1
        assert (head(other, hidden)[:, -1] - head(embeds, hidden)[:, -1]).abs().max() > 1e-4


# ---- drafting


def block_laws(model, row, features, start, k):
    """The laws of training's pass on a block at the last decided token, the drafted tokens in front being those of
    `row`."""
    first, anchors = int(not model.config.sample_from_anchor), torch.tensor([start])
    model.config.block_size = k + first
    with torch.no_grad():
        hidden = served_states(model, row, features, start)
        logits, embeds = model.lm_head(hidden), None
        if model.markov_head is not None:
            embeds = model.markov_head.markov_w1(model.tokens_in_front(row, anchors))
            logits = logits + model.markov_head.markov_w2(model.markov_head(embeds, hidden))
        sure = model.confidence(hidden, embeds).sigmoid()[0, first:] if model.confidence_head is not None else None
    return logits[0, first:].softmax(-1), sure


@pytest.mark.parametrize("seed", range(8))
def test_drafting_is_what_was_trained(seed):
    """The drafter, fed in two parts, draws each token from the law that training's pass gives the slot when the drafted
    tokens stand in the text (sliding windows as the engine counts them); confidences are those too."""
    shape = dict(
        markov_rank=5,
        markov_head_type=["vanilla", "gated", "rnn"][seed % 3],
        sample_from_anchor=seed % 2 == 0,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    model, _ = random_model(40 + seed, **shape)
    k, n = model.config.speculative_tokens, 12
    tokens, features, g = text_and_features(model, n, seed)
    drafter = read_in_two_parts(model.drafter(), tokens, features)
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, g))
    assert len(tree) == k and tree.parents.tolist() == list(range(-1, k - 1))
    want, sure = block_laws(model, torch.cat([tokens, tree.tokens]), features, n - 1, k)
    torch.testing.assert_close(of_draft_vocabulary(model, tree.probs), want, rtol=1e-4, atol=1e-6)
    # a threshold cuts the same chain where the product of confidences falls below it
    for threshold in [*sure.cumprod(0).mul(1 - 1e-4).tolist(), 1.0]:
        cut = read_in_two_parts(model.drafter(confidence_threshold=threshold), tokens, features)
        short = cut.propose(tokens, features[6:], k, Sampling(1.0, torch.Generator().manual_seed(0)))
        greedy = cut.propose(tokens, features[n - 1 :], k, Sampling())
        assert len(short) <= k and len(greedy) <= k and (threshold < 1 or len(short) == 0)
        if len(short):
            _, own = block_laws(model, torch.cat([tokens, short.tokens, tokens[: k - len(short)]]), features, n - 1, k)
            kept = (own[: len(short) + 1].cumprod(0) >= threshold * (1 - 1e-5)).tolist()
            assert all(kept[: len(short)]) and (
                len(short) == k or own[: len(short) + 1].prod() < threshold * (1 + 1e-5)
            )


@pytest.mark.parametrize("from_anchor", [True, False])
def test_a_temperature_divides_its_slots_logit(from_anchor):
    "The draft ends behind the last slot whose product, of sigmoid(logit / temperature), reaches the threshold."
    model, _ = random_model(
        7, markov_rank=5, enable_confidence_head=True, confidence_head_with_markov=True, sample_from_anchor=from_anchor
    )
    k = model.config.speculative_tokens
    tokens, features, _ = text_and_features(model, 12)
    temperatures = [3.0 / (slot + 1) for slot in range(k)]

    def draft(*stopping, tokens_wanted=k):
        drafter = model.drafter(*stopping)
        tree = drafter.propose(tokens, features, tokens_wanted, Sampling())
        return tree.tokens, drafter.confidence_logits

    whole, logits = draft(0.0)
    _, sure = block_laws(model, torch.cat([tokens, whole]), features, 11, k)
    torch.testing.assert_close(logits.sigmoid(), sure, rtol=1e-4, atol=1e-6)
    products = (logits / torch.tensor(temperatures)).sigmoid().cumprod(0)
    for slot, product in enumerate(products.tolist()):
        cut, _ = draft(product * (1 - 1e-5), temperatures)
        assert cut.tolist() == whole[: slot + 1].tolist()
    assert len(draft(0.0, temperatures, tokens_wanted=k + 1)[0]) == k + 1  # a slot more has the last one's


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_pairs_follow_the_law(kind):
    model, _ = random_model(
        62,
        markov_rank=5,
        markov_head_type=kind,
        draft_vocab_size=30,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        sample_from_anchor=True,
        aux_hidden_state_layer_ids=[1],
    )
    with torch.no_grad():
        model.markov_head.markov_w1.weight.mul_(3)
    tokens, features, _ = text_and_features(model, 6)
    drafter = model.drafter()
    with torch.no_grad():
        states = drafter.read_block(tokens, features, 2)
    drafter.read_block = lambda *_: states  # computed once; what is drawn is drawn anew
    check_pairs(lambda g: drafter.propose(tokens, features, 2, Sampling(1.0, g)), 1200, common=3)


def fresh_dspark(folder, verifier, **args):
    return fresh("dspark", folder, verifier, "markov_head", **dict(markov_rank=4) | args)


def test_a_threshold_shortens_drafts(tmp_path):
    "The text stays; at threshold 1 nothing is drafted."
    hf = tiny_verifier(tmp_path)
    model = fresh_dspark(tmp_path, hf)
    verifier = Verifier(hf, model.config.aux_hidden_state_layer_ids)
    prompt = torch.randint(30, (9,), generator=torch.Generator().manual_seed(2))
    for threshold in (0.3, 1.0):
        out = generate(verifier, model.drafter(threshold), prompt, max_new_tokens=30, k=3)
        assert out.tokens == greedy_text(hf, prompt, 30)
    assert max(s.requested for s in out.steps) == 3 and not any(s.draft for s in out.steps)


def test_a_threshold_leaves_the_verifiers_law(tmp_path):
    """Pairs of tokens sampled with drafts of two, from a vocabulary of four, against the verifier's own joint law; 500
    draws, chi-square at about 0.999. (Without a threshold: test_proofs.py.)"""
    hf = tiny_verifier(tmp_path, vocab=4)
    model = fresh_dspark(tmp_path, hf, is_causal=True, attention_sink_bias=True)
    verifier = Verifier(hf, model.config.aux_hidden_state_layer_ids)
    start, counts = [2, 3, 1], torch.zeros(4, 4)
    sampling, lengths = Sampling(1.0, torch.Generator().manual_seed(0)), set()
    for out in generate(verifier, model.drafter(0.25), [start] * 500, max_new_tokens=3, k=2, sampling=sampling):
        counts[out.tokens[1], out.tokens[2]] += 1
        lengths |= {len(s.draft) for s in out.steps}
    check_distribution(counts.flatten(), second_and_third(hf, start).flatten())
    assert len(lengths) > 1


# ---- bad input, serving


def test_errors_name_the_field():
    layer = Qwen3Config(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_hidden_layers=1, vocab_size=30
    )
    ok = dict(transformer_layer_config=layer, draft_vocab_size=30, aux_hidden_state_layer_ids=[1], mask_token_id=29)
    for wrong, words in (
        (dict(markov_head_type="lstm"), "markov_head_type='lstm'"),
        (dict(markov_rank=-1), "markov_rank=-1"),
        (dict(markov_rank=0), "confidence_head_with_markov"),
        (dict(mask_token_id=30), "mask_token_id=30"),
        (dict(block_size=1), "block_size=1"),
        (dict(draft_vocab_size=31), "draft_vocab_size=31"),
        (dict(transformer_layer_config=GPT2Config(vocab_size=30)), "model_type"),
    ):
        with pytest.raises(ValueError, match=words):
            DSparkSpeculatorConfig(**ok | wrong)
    DSparkSpeculatorConfig(**ok, markov_rank=0, enable_confidence_head=False)
    model, batch = random_model(1, enable_confidence_head=False, confidence_head_with_markov=False, block_size=5)
    with pytest.raises(ValueError, match="enable_confidence_head"):
        model.drafter(confidence_threshold=0.5)
    for wrong in ([1.0], [0.0] * 8, [float("nan")] * 8):
        with pytest.raises(ValueError, match="confidence_temperatures=.* must be 5 numbers above 0"):
            model.drafter(confidence_temperatures=wrong)
    with pytest.raises(ValueError, match="confidence_threshold=2"):
        random_model(1, enable_confidence_head=True, markov_rank=4)[0].drafter(confidence_threshold=2)
    short = {k: v[:, :4] for k, v in batch.items() if not k.startswith("anchor")}
    with pytest.raises(ValueError, match="block_size=5"):
        model(**short)
    with pytest.raises(ValueError, match="lstm|unknown"):
        model(**batch, per_position_loss_weight="lstm")
    with pytest.raises(ValueError, match="dpace"):
        model(**batch, per_position_loss_weight="dpace", loss_config={"kl_div": 0.5, "tv": 0.5})


def test_serving_violations():
    layer = dict(
        model_type="qwen3",
        layer_types=["full_attention"],
        hidden_act="silu",
        sliding_window=None,
        max_position_embeddings=128,
    )
    good = dict(
        transformer_layer_config=layer,
        mask_token_id=3,
        aux_hidden_state_layer_ids=[1, 2],
        draft_vocab_size=30,
        block_size=4,
        sample_from_anchor=True,
        markov_rank=8,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        sliding_window_non_causal=False,
        speculators_config=dict(proposal_methods=[dict(speculative_tokens=4)]),
    )
    check = DSparkDraftModel.serving_violations
    assert check(good) == [] and check(good | dict(sample_from_anchor=False, speculators_config={})) == []
    whole = layer | dict(layer_types=["sliding_attention"], sliding_window=64, is_causal=False)
    assert check(good | dict(transformer_layer_config=whole, sliding_window_non_causal=True)) == []
    for wrong, words in (
        (dict(markov_head_type="rnn"), "markov_head_type is 'rnn'"),
        (dict(markov_rank=0), "markov_rank is 0"),
        (dict(mask_token_id=None), "mask_token_id"),
        (dict(sample_from_anchor=False), "speculative_tokens is 4, but a block of 4 was trained to draft 3"),
        (
            dict(
                transformer_layer_config=layer | dict(layer_types=["sliding_attention"], sliding_window=64),
                sliding_window_non_causal=True,
            ),
            "sliding_window_non_causal",
        ),
        (
            dict(transformer_layer_config=layer | dict(layer_types=["sliding_attention"], sliding_window=2)),
            "less than the block of 4",
        ),
        (dict(transformer_layer_config=layer | dict(hidden_act="gelu")), "hidden_act"),
    ):
        found = check(good | wrong)
        assert len(found) == 1 and words in found[0], found
    for name in ("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov", "markov_rank"):
        assert any(name in v for v in check({k: v for k, v in good.items() if k != name})), name


def test_defaults_are_the_documented_ones():
    c = DSparkSpeculatorConfig()
    assert (
        c.block_size,
        c.sample_from_anchor,
        c.markov_rank,
        c.markov_head_type,
        c.enable_confidence_head,
        c.confidence_head_with_markov,
    ) == (8, True, 256, "vanilla", True, True)
    assert c.speculative_tokens == 8 and SpeculatorModel.registered_class("dspark") is DSparkDraftModel
    kwargs, evaluation = DSparkDraftModel.get_trainer_kwargs()
    assert (
        kwargs == evaluation
        and kwargs["loss_config"] == {"kl_div": 1.0}
        and kwargs["per_position_loss_weight"] == "fixed-exp-decay"
        and kwargs["confidence_head_alpha"] == 1.0
    )
