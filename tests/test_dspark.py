"""DSpark against upstream's recorded numbers, against a definition by loops, and the lean pass against the dense one;
drafting's law against what is drawn."""

import json
import math
from collections import defaultdict

import pytest
import torch
from recorded import FIXTURES, cases, load_case
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen3Config

from speculators_nb.core.tree import Sampling
from speculators_nb.decode.generate import generate
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig, MarkovHead
from speculators_nb.verifier.tapped_model import Verifier

CASES = cases("dspark")


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    "Base logits, and where recorded those with the bias, of every slot of every block, to 1e-4 absolute."
    model, batch, kwargs, _, folder = load_case(name)
    want = load_file(folder / "outputs.safetensors")
    x = {k: v[0] for k, v in batch.items() if not k.startswith("anchor")}
    anchors = batch["anchor_positions"]
    with torch.no_grad():
        tokens = model.block_tokens(x["input_ids"][anchors])
        hidden = model.block_hidden(
            tokens,
            model.context(x["hidden_states"]),
            anchors,
            x["document_ids"],
            x["position_ids"],
            lean=False,
            impl="sdpa",
        )
        logits = model.lm_head(hidden)
        torch.testing.assert_close(logits.flatten(0, 1), want["lm_head_out.0"][0], rtol=0, atol=1e-4)
        if "logits" in want:
            if model.markov_head is not None:
                logits = logits + model.markov_head.markov_w2(
                    model.markov_head(model.markov_head.markov_w1(model.previous(x["input_ids"], anchors)), hidden)
                )
            torch.testing.assert_close(logits.flatten(0, 1), want["logits"][0], rtol=0, atol=1e-4)
            drafted, *_ = model(**batch, **kwargs, cross_document_targets=True, lean=False)
            assert torch.equal(drafted[0], model.to_verifier(want["logits"][0].argmax(-1)))


@pytest.mark.parametrize("name", [c for c in CASES if c != "dspark"])  # its verifier is not among the fixtures
def test_checkpoints_load_again(name, tmp_path, monkeypatch):
    "Ours and upstream's, with the recorded loss."
    model, batch, kwargs, info, folder = load_case(name)
    model.save_pretrained(tmp_path)
    monkeypatch.chdir(FIXTURES)
    theirs = tmp_path / "upstream"  # as upstream's save_pretrained leaves it
    theirs.mkdir()
    keys = json.loads((folder / "saved_pretrained_keys.json").read_text())
    save_file(
        {k: v for k, v in load_file(folder / "state_dict.safetensors").items() if k in keys},
        theirs / "model.safetensors",
    )
    (theirs / "config.json").write_text((folder / "saved_pretrained" / "config.json").read_text())
    for checkpoint in (tmp_path, theirs):
        again = SpeculatorModel.from_pretrained(checkpoint).train()
        assert again(**batch, **kwargs, cross_document_targets=True)[1].item() == pytest.approx(info["loss"], rel=1e-5)


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
        for s in range(size):
            q = turn(rms(heads(normed[s : s + 1], "q_proj")[0], of("self_attn.q_norm"), eps), start + s, theta)
            seen = [t for t in range(size) if t <= s or not sliding or config.sliding_window_non_causal]
            k, v = torch.stack(past_k + [own_k[t] for t in seen]), torch.stack(past_v + [own_v[t] for t in seen])
            share = q.shape[0] // k.shape[1]
            out.append(
                torch.cat(
                    [((k[:, h // share] @ q[h]) / d**0.5).softmax(0) @ v[:, h // share] for h in range(q.shape[0])]
                )
            )
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

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    layers, kind = pick(1, 2), pick("vanilla", "gated", "rnn")
    types = [pick("full_attention", "sliding_attention") for _ in range(layers)]
    layer = Qwen3Config(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=pick(1, 2, 4),
        head_dim=6,
        vocab_size=30,
        layer_types=types,
        sliding_window=pick(3, 7),
        use_sliding_window=True,
    )
    rank, confidence = pick(0, 5, 5, 5), pick(True, True, False)
    fields = dict(
        transformer_layer_config=layer,
        draft_vocab_size=pick(20, 30),
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
    model = DSparkDraftModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.3 if p.ndim > 1 else 0.1) + (p.ndim == 1))
    if model.d2t is not None:
        ids = torch.randperm(30, generator=g)[:20].sort().values
        model.load_vocab_mappings(torch.zeros(30, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(20))
    model.target_head.set_rows(
        torch.nn.Parameter(torch.randn(config.draft_vocab_size, 16, generator=g), requires_grad=False)
    )
    L, A = 40, 16 * len(config.aux_hidden_state_layer_ids)
    documents = torch.randint(0, 4, (L,), generator=g).sort().values
    documents[L - int(torch.randint(0, 6, (), generator=g)) :] = -1
    restart = torch.cat(
        [torch.arange(int((documents == d).sum())) for d in documents.unique(sorted=True) if d >= 0]
        + [torch.arange(int((documents < 0).sum()))]
    )
    batch = dict(
        input_ids=torch.randint(30, (1, L), generator=g),
        hidden_states=torch.randn(1, L, A, generator=g),
        document_ids=documents[None],
        loss_mask=((torch.rand(1, L, generator=g) < 0.8) & (documents >= 0)),
        verifier_last_hidden_states=torch.randn(1, L, 16, generator=g),
        position_ids=restart[None],
    )
    N = 7
    batch |= dict(
        anchor_positions=torch.randperm(L - config.block_size, generator=g)[:N].sort().values,
        anchor_valid=torch.rand(N, generator=g) < 0.8,
    )
    return model, batch


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
    model.train()
    results = []
    for lean in (True, False):
        model.zero_grad()
        weights = (
            dict(loss_config="ce", per_position_loss_weight="dpace")
            if seed % 4 == 0
            else dict(loss_config={"kl_div": 1.0, "tv": 0.5})
        )
        _, loss, metrics = model(**batch, **weights, serving_window=seed % 3 == 0, lean=lean)
        loss.backward()
        results.append((loss, metrics, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (a, ma, ga), (b, mb, gb) = results
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert ma.keys() == mb.keys()
    for key in ma:
        torch.testing.assert_close(ma[key], mb[key], rtol=1e-5, atol=1e-5)
    assert ga.keys() == gb.keys()
    for key in ga:
        assert (ga[key] - gb[key]).norm() <= 1e-5 * gb[key].norm() + 1e-6, key


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
    state, codes = None, []
    for s in range(6):
        code, state = head.step(embeds[:, s], hidden[:, s], state)
        codes.append(code)
    torch.testing.assert_close(torch.stack(codes, 1), head(embeds, hidden), rtol=1e-6, atol=1e-6)
    if kind == "rnn":  # an early token reaches late slots; elsewhere only its own
        other = embeds.clone()
        other[:, 0] += 1
        assert (head(other, hidden)[:, -1] - head(embeds, hidden)[:, -1]).abs().max() > 1e-4


def test_runs_repeat():
    "The same seed gives the same step; evaluation draws the same anchors every time; training does not."
    model, batch = random_model(5)
    batch = {k: v for k, v in batch.items() if not k.startswith("anchor")}

    def loss(**kw):
        return model(**batch, max_anchors=4, **kw)[1].item()

    model.eval()
    assert loss() == loss()
    model.train()
    assert loss(generator=torch.Generator().manual_seed(1)) == loss(generator=torch.Generator().manual_seed(1))
    assert len({loss() for _ in range(6)}) > 1


def test_an_empty_loss_mask_is_no_nan():
    model, batch = random_model(
        7, markov_rank=4, markov_head_type="rnn", enable_confidence_head=True, confidence_head_with_markov=True
    )
    batch["loss_mask"].zero_()
    for b in (batch, {k: v for k, v in batch.items() if not k.startswith("anchor")}):
        _, loss, metrics = model(**b)
        loss.backward()
        assert loss == 0 and all(torch.isfinite(v) for v in metrics.values())


def test_bf16_products_and_autocast_stay_close():
    "bfloat16 keeps 8 bits: the loss moves by less than 2 %."
    for seed in range(4):
        model, batch = random_model(20 + seed)
        full = model(**batch)[1].item()
        assert model(**batch, gemm_dtype=torch.bfloat16)[1].item() == pytest.approx(full, rel=2e-2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch)[1]
        loss.backward()
        assert loss.item() == pytest.approx(full, rel=2e-2)


# ---- drafting


def block_laws(model, row, features, start, k):
    """The laws of training's pass on a block at the last decided token, the drafted tokens in front being those of
    `row`."""
    L, first = len(row), int(not model.config.sample_from_anchor)
    model.config.block_size = k + first
    x = torch.cat([features, torch.zeros(L - len(features), features.shape[1])])
    documents, anchors = torch.zeros(L, dtype=torch.long), torch.tensor([start])
    with torch.no_grad():
        hidden = model.block_hidden(
            model.block_tokens(row[anchors]),
            model.context(x),
            anchors,
            documents,
            torch.arange(L),
            lean=False,
            impl="sdpa",
            serving_window=True,
        )
        logits, embeds = model.lm_head(hidden), None
        if model.markov_head is not None:
            embeds = model.markov_head.markov_w1(model.previous(row, anchors))
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
    k, n, g = model.config.speculative_tokens, 12, torch.Generator().manual_seed(seed)
    tokens, features = torch.randint(29, (n,), generator=g), torch.randn(n - 1, model.fc.in_features, generator=g)
    drafter = model.drafter()
    drafter.propose(tokens[:7], features[:6], k, Sampling())
    tree = drafter.propose(tokens, features[6:], k, Sampling(1.0, g))
    assert len(tree) == k and tree.parents.tolist() == list(range(-1, k - 1))
    want, sure = block_laws(model, torch.cat([tokens, tree.tokens]), features, n - 1, k)
    got = tree.probs if model.d2t is None else tree.probs[:, model.to_verifier(torch.arange(len(model.d2t)))]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    # a threshold cuts the same chain where the product of confidences falls below it
    for threshold in [*sure.cumprod(0).mul(1 - 1e-4).tolist(), 1.0]:
        cut = model.drafter(confidence_threshold=threshold)
        cut.propose(tokens[:7], features[:6], k, Sampling())
        short = cut.propose(tokens, features[6:], k, Sampling(1.0, torch.Generator().manual_seed(0)))
        greedy = cut.propose(tokens, features[n - 1 :], k, Sampling())
        assert len(short) <= k and len(greedy) <= k and (threshold < 1 or len(short) == 0)
        if len(short):
            _, own = block_laws(model, torch.cat([tokens, short.tokens, tokens[: k - len(short)]]), features, n - 1, k)
            kept = (own[: len(short) + 1].cumprod(0) >= threshold * (1 - 1e-5)).tolist()
            assert all(kept[: len(short)]) and (
                len(short) == k or own[: len(short) + 1].prod() < threshold * (1 + 1e-5)
            )


def chi_square(counts, law, least=5):
    "Pearson's statistic and its degrees of freedom, rare outcomes pooled."
    expected = law * counts.sum()
    rare = expected < least
    parts = [(counts[~rare], expected[~rare])] + (
        [(counts[rare].sum()[None], expected[rare].sum()[None])] if expected[rare].sum() > 0 else []
    )
    o, e = (torch.cat(x) for x in zip(*parts))
    return float(((o - e) ** 2 / e).sum()), len(o) - 1


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_pairs_follow_the_law(kind):
    """1200 drafted chains of two: the joint counts have the joint law, in which the second token depends on the first.
    The 0.999 quantile of chi-square is below df + 4 sqrt(2 df)."""
    model, _ = random_model(
        60,
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
    g = torch.Generator().manual_seed(0)
    tokens, features = torch.randint(29, (6,), generator=g), torch.randn(5, 16, generator=g)
    drafter, counts, laws = model.drafter(), torch.zeros(30, 30), torch.zeros(30, 30)
    drafter.propose(tokens, features, 2, Sampling())
    for _ in range(1200):
        tree = drafter.propose(tokens, features[:0], 2, Sampling(1.0, g))
        a, b = tree.tokens.tolist()
        counts[a, b] += 1
        laws[a] = tree.probs[1]
        first = tree.probs[0]
    value, df = chi_square(counts.sum(1), first)
    assert value < df + 4 * math.sqrt(2 * df)
    common = counts.sum(1).topk(3).indices
    assert (laws[common[0]] - laws[common[1]]).abs().sum() > 0.1  # the law really depends on the token in front
    for a in common:
        value, df = chi_square(counts[a], laws[a])
        assert value < df + 4 * math.sqrt(2 * df)


def tiny_verifier(tmp_path, vocab=30):
    torch.manual_seed(0)
    verifier = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            initializer_range=0.3,
            max_position_embeddings=128,
        )
    ).eval()
    verifier.save_pretrained(tmp_path / "verifier")
    return verifier


def fresh(tmp_path, verifier, **args):
    layer = Qwen3Config(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=verifier.config.vocab_size,
        max_position_embeddings=128,
    )
    model = DSparkDraftModel.from_training_args(
        layer,
        verifier_name_or_path=str(tmp_path / "verifier"),
        **dict(block_size=4, mask_token_id=1, markov_rank=4) | args,
    )
    with torch.no_grad():
        for p in model.markov_head.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.mark.parametrize(
    "args",
    [{}, dict(markov_head_type="rnn", sample_from_anchor=False), dict(markov_head_type="gated")],
    ids=["vanilla", "rnn", "gated"],
)
def test_greedy_text_is_the_verifiers(tmp_path, args):
    "Token for token, with and without a threshold."
    hf = tiny_verifier(tmp_path)
    model = fresh(tmp_path, hf, **args)
    verifier = Verifier(hf, model.config.aux_hidden_state_layer_ids)
    prompt = torch.randint(30, (9,), generator=torch.Generator().manual_seed(2))
    want = hf.generate(prompt[None], max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, 9:
    ].tolist()
    for threshold in (None, 0.3, 1.0):
        out = generate(verifier, model.drafter(threshold), prompt, max_new_tokens=30, k=3)
        assert out.tokens == want
    # at threshold 1 nothing is drafted, and the text comes all the same
    assert max(s.requested for s in out.steps) == 3 and not any(s.draft for s in out.steps)


@pytest.mark.parametrize("threshold", [None, 0.25])
def test_sampled_text_has_the_verifiers_law(tmp_path, threshold):
    """Pairs of tokens sampled with drafts of two, from a vocabulary of four, against the verifier's own joint law; 900
    draws, chi-square at about 0.999."""
    hf = tiny_verifier(tmp_path, vocab=4)
    model = fresh(tmp_path, hf)
    verifier = Verifier(hf, model.config.aux_hidden_state_layer_ids)
    prompt = torch.tensor([2, 3, 1])
    counts = torch.zeros(16)
    with torch.no_grad():

        def law(ids):
            return hf(torch.tensor([ids])).logits[0, -1].softmax(-1)

        first = law([2, 3, 1])
        joint = torch.stack([first[a] * law([2, 3, 1, a]) for a in range(4)])
        joint = (
            torch.stack([torch.stack([joint[a, b] * law([2, 3, 1, a, b]) for b in range(4)]) for a in range(4)])
            .sum(0)
            .flatten()
        )  # of tokens two and three: token one is the prompt pass's
    g, drafter = torch.Generator().manual_seed(0), model.drafter(threshold)
    lengths = set()
    for _ in range(900):
        out = generate(verifier, drafter, prompt, max_new_tokens=3, k=2, sampling=Sampling(1.0, g))
        counts[out.tokens[1] * 4 + out.tokens[2]] += 1
        lengths |= {len(s.draft) for s in out.steps}
    value, df = chi_square(counts, joint)
    assert value < df + 4 * math.sqrt(2 * df), (value, df)
    assert len(lengths) > 1 or threshold is None


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
