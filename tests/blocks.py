"""What the tests of block drafters (DFlash, DFlash2, DSpark, XPress, …) share: random drafters, the dense definition of
a block's states, and what must hold for each of them."""

import json

import pytest
import torch
from recorded import FIXTURES, load_case
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel

V, H = 30, 16
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)

# ---- random drafters


def picker(g):
    "A function that picks one of its arguments."
    return lambda *options: options[int(torch.randint(len(options), (), generator=g))]


def random_layer(pick):
    "One or two layers with windows, some causal in the block whatever the window, some with attention sinks."
    layers = pick(1, 2)
    return Qwen3Config(
        hidden_size=H,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=pick(1, 2, 4),
        head_dim=6,
        vocab_size=V,
        layer_types=[pick("full_attention", "sliding_attention") for _ in range(layers)],
        sliding_window=pick(3, 7),
        use_sliding_window=True,
        is_causal=pick(None, True, False),
        add_swa_attention_sink_bias=pick(True, False),
    )


def random_drafter(config, g, spread=lambda name: 0.3):
    "A drafter with random weights, as large as `spread` says for the name of a matrix."
    model = SpeculatorModel.registered_class(config.speculators_model_type)(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (spread(name) if p.ndim > 1 else 0.1) + (p.ndim == 1))
    if model.d2t is not None:
        ids = torch.randperm(V, generator=g)[:20].sort().values
        model.load_vocab_mappings(torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(20))
    model.target_head.set_rows(torch.randn(config.draft_vocab_size, H, generator=g))
    return model


def random_row(config, g, lengths=None, trained=0.8, anchors=7):
    """A packed row of 40 with its anchors. Documents are random, or of `lengths`, the last being padding; `trained` is
    the share of positions with loss."""
    L, A = 40, H * len(config.aux_hidden_state_layer_ids)
    if lengths is None:
        cuts = torch.randint(0, 4, (L,), generator=g).sort().values
        cuts[L - int(torch.randint(0, 6, (), generator=g)) :] = -1
        lengths = [int((cuts == d).sum()) for d in (0, 1, 2, 3, -1)]
    ids = [*range(len(lengths) - 1), -1]
    documents = torch.cat([torch.full((n,), d) for n, d in zip(lengths, ids)])
    return dict(
        input_ids=torch.randint(V, (1, L), generator=g),
        hidden_states=torch.randn(1, L, A, generator=g),
        document_ids=documents[None],
        loss_mask=((torch.rand(1, L, generator=g) < trained) & (documents >= 0)),
        verifier_last_hidden_states=torch.randn(1, L, H, generator=g),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        anchor_positions=torch.randperm(L - config.block_size, generator=g)[:anchors].sort().values,
        anchor_valid=torch.rand(anchors, generator=g) < 0.8,
    )


def without_anchors(batch):
    return {k: v for k, v in batch.items() if not k.startswith("anchor")}


# ---- states of blocks, by the dense definition


def dense_states(model, row, features, anchors, documents, positions, **options):
    "States [N, B, H] of the blocks at `anchors`."
    given = model.block_tokens(row[anchors]), model.context(features), anchors, documents, positions
    return model.block_hidden(*given, lean=False, impl="sdpa", **options)


def states_of(model, batch):
    "(the packed row, states of the blocks at its anchors)"
    x = {k: v[0] for k, v in without_anchors(batch).items()}
    names = "input_ids", "hidden_states"
    at = x["document_ids"], x["position_ids"]
    return x, dense_states(model, *(x[name] for name in names), batch["anchor_positions"], *at)


def served_states(model, row, features, anchor):
    """States [1, B, H] of a block at one place of a text, sliding windows as the engine counts them. Features behind
    the last one do not matter: they are 0."""
    x = torch.cat([features, torch.zeros(len(row) - len(features), features.shape[1])])
    at = torch.zeros(len(row), dtype=torch.long), torch.arange(len(row))
    return dense_states(model, row, x, torch.tensor([anchor]), *at, serving_window=True)


def text_and_features(model, n=12, seed=0):
    "(n random tokens, features of all but the last, the generator)"
    g = torch.Generator().manual_seed(seed)
    return torch.randint(V - 1, (n,), generator=g), torch.randn(n - 1, model.fc.in_features, generator=g), g


def read_in_two_parts(drafter, tokens, features):
    "A drafter that has drafted after 7 tokens, and has the features of six."
    drafter.propose(tokens[:7], features[:6], drafter.model.config.speculative_tokens, Sampling())
    return drafter


def of_draft_vocabulary(model, probs):
    "The columns of a distribution over the verifier's vocabulary that the drafter has."
    return probs if model.d2t is None else probs[..., model.to_verifier(torch.arange(len(model.d2t)))]


# ---- what holds for each


def check_checkpoints(name, folder, monkeypatch):
    "Ours and upstream's load again, with the recorded loss."
    model, batch, kwargs, info, case = load_case(name)
    model.save_pretrained(folder)
    monkeypatch.chdir(FIXTURES)
    theirs = folder / "upstream"  # as upstream's save_pretrained leaves it
    theirs.mkdir()
    keys = json.loads((case / "saved_pretrained_keys.json").read_text())
    state = load_file(case / "state_dict.safetensors")
    save_file({k: v for k, v in state.items() if k in keys}, theirs / "model.safetensors")
    (theirs / "config.json").write_text((case / "saved_pretrained" / "config.json").read_text())
    for checkpoint in (folder, theirs):
        again = SpeculatorModel.from_pretrained(checkpoint).train()
        assert type(again) is type(model)
        assert again(**batch, **kwargs, cross_document_targets=True)[1].item() == pytest.approx(info["loss"], rel=1e-5)


def check_lean(model, batch, **options):
    "Loss, metrics and gradients of the lean pass are those of the dense one, to 1e-5. Returns what it returned."
    model.train()
    results = []
    for lean in (True, False):
        model.zero_grad()
        torch.manual_seed(0)
        out = model(**batch, **options, lean=lean)
        out[1].backward()
        results.append((*out[1:], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (a, ma, ga), (b, mb, gb) = results
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert ma.keys() == mb.keys() and ga.keys() == gb.keys()
    for key in ma:
        torch.testing.assert_close(ma[key], mb[key], rtol=1e-5, atol=1e-5)
    for key in ga:
        assert (ga[key] - gb[key]).norm() <= 1e-5 * gb[key].norm() + 1e-6, key
    return out


def check_distribution(counts, probs, least=5):
    """Pearson's statistic of counts, rare outcomes pooled, is below df + 4 sqrt(2 df), where the 0.999 quantile of
    chi-square is."""
    expected = probs * counts.sum()
    rare = expected < least
    o, e = counts[~rare], expected[~rare]
    if expected[rare].sum() > 0:
        o, e = (torch.cat([x, y[rare].sum()[None]]) for x, y in ((o, counts), (e, expected)))
    value, df = float(((o - e) ** 2 / e).sum()), len(o) - 1
    assert value < df + 4 * (2 * df) ** 0.5, (value, df)


def check_pairs(draft, n, common):
    """n chains of two, drawn by `draft(generator)`: the joint counts have the joint distribution, in which the second
    token depends on the first."""
    counts, second, g = torch.zeros(V, V), torch.zeros(V, V), torch.Generator().manual_seed(0)
    for _ in range(n):
        tree = draft(g)
        a, b = tree.tokens.tolist()
        counts[a, b] += 1
        first, second[a] = tree.probs
    check_distribution(counts.sum(1), first)
    often = counts.sum(1).topk(common).indices
    assert (second[often[0]] - second[often[1]]).abs().sum() > 0.1  # it really depends on the token in front
    for a in often:
        check_distribution(counts[a], second[a])


# ---- with a verifier


def tiny_verifier(folder, vocab=V):
    "A random verifier, stored in `folder`/verifier."
    torch.manual_seed(0)
    sizes = dict(hidden_size=H, intermediate_size=24, num_hidden_layers=4, head_dim=4, initializer_range=0.3)
    verifier = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **sizes, **ATTENTION)).eval()
    verifier.save_pretrained(folder / "verifier")
    return verifier


def fresh(algorithm, folder, verifier, head, **args):
    "A fresh drafter for it, whose head of this name is not small."
    sizes = dict(hidden_size=H, intermediate_size=20, num_hidden_layers=1, head_dim=6)
    layer = Qwen3Config(vocab_size=verifier.config.vocab_size, **sizes, **ATTENTION)
    args = dict(block_size=4, mask_token_id=1) | args
    cls = SpeculatorModel.registered_class(algorithm)
    model = cls.from_training_args(layer, verifier_name_or_path=str(folder / "verifier"), **args)
    with torch.no_grad():
        for p in getattr(model, head).parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return model


def greedy_text(verifier, prompt, n):
    "What transformers writes."
    out = verifier.generate(prompt[None], max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def second_and_third(verifier, start):
    "Joint distribution of the second and third token after `start`, of a vocabulary of four."
    with torch.no_grad():

        def following(*drawn):
            return verifier(torch.tensor([[*start, *drawn]])).logits[0, -1].softmax(-1)

        first, joint = following(), torch.zeros(4, 4)
        for a in range(4):
            second = following(a)
            for b in range(4):
                joint[b] += first[a] * second[b] * following(a, b)
    return joint
