"""The smaller part of `make proofs`: every proposer under every lossless rule, the law of sampled texts by chi-square
and greedy texts token for token. tests/proofs/run.py does it with trained drafters of the shipped verifier, 50 000
texts each; here the models are random and the vocabulary has eight tokens, so that drafts are accepted often enough and
contexts are few."""

import functools
import json
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from by_day import by_day
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent / "proofs"))
from memo import inverse
from run import CHAINS, GROWERS, WRONG, combinations
from setting import SHIPPED, Sampler, chi_square, exact_law, make, remembered, shipped

from speculators_nb.decode.acceptance_rules import lenient
from speculators_nb.decode.generate import NoDrafter, generate
from speculators_nb.decode.tree import Sampling
from speculators_nb.lab.experiment import CONTENDERS
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.tapped_model import Verifier

V, PROMPT, NEW, FILTERS = 8, (2, 3, 4, 5, 2, 3, 4), 4, dict(top_p=0.9)
# of those drafters that have them
SMALL = dict(
    markov_rank=4,
    selector_rank=4,
    selector_top_k=5,
    xpress_rank=4,
    emb_dim=4,
    gru_hidden_dim=4,
    lilicorr_candidate_topk=5,
    lilicorr_hidden_size=4,
    lilicorr_factor_dim=4,
    lilicorr_num_heads=2,
    target_layer_ids=[0, 2, 4],
)
FEW = 400
# seeds are fixed, so a passing test cannot flicker; a sound decoder fails one of so many with this probability in all
ALPHA = 1e-3


def test_the_page_counts_every_combination():
    assert set(ALL) > BY_DAY and set(GREEDY) > GREEDY_BY_DAY
    page = (Path(__file__).parent / "proofs/results/README.md").read_text(encoding="utf-8")
    every = sum(rule not in WRONG for _, _, _, rule in combinations())
    assert f" of {every} combinations are measured" in page, "python tests/proofs/run.py page"


def fresh(folder, name, mask):
    "A random drafter, not near the verifier."
    algorithm, own = CONTENDERS[name]
    kind = SpeculatorModel.registered_class(algorithm)
    arguments = kind.lab_arguments | kind.arguments_to_draft(4) | own | SMALL
    torch.manual_seed(0)
    model = new_drafter(algorithm, folder, **arguments, mask_token_id=mask)
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return model.drafter()


class Drafters(dict):
    "By their names; each is made when it is asked for."

    def __init__(self, folder, mask):
        self.given = folder, mask

    def __missing__(self, name):
        folder, mask = self.given
        self[name] = fresh(folder, name, mask)
        return self[name]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("verifier")
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=V,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            max_position_embeddings=64,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).save_pretrained(folder)
    return Verifier.from_pretrained(folder, [0, 2, 4]), Drafters(folder, V - 1)


@pytest.fixture(scope="module")
def law_of(small):
    return functools.cache(lambda temperature: exact_law(small[0].model, PROMPT, NEW, temperature, **FILTERS))


def p_value(small, law, name, rule, temperature, n=FEW):
    verifier, drafters = small
    sampler = Sampler(verifier, PROMPT, new=NEW)
    sampling = sampler.memory.sampling(
        temperature,
        zlib.crc32(f"{name} {rule if isinstance(rule, str) else rule.about} {temperature}".encode()),
        **FILTERS,
    )
    texts = sampler.draw(
        remembered(name, make(name, drafters, verifier), sampler.memory),
        n,
        sampling,
        WRONG.get(rule, rule) if isinstance(rule, str) else rule,
    )
    return chi_square(Counter(tuple(g.tokens) for g in texts), law)[2], [s for g in texts for s in g.steps]


ALL = sorted({(name, rule) for _, _, name, rule in combinations() if rule not in WRONG})


# By day each way to draft and each way to decide once. Other drafters differ in what they draft, not in how it is
# decided: test_proposal_setup.py holds the law of each by day.
BY_DAY = {
    ("eagle", "standard"),  # one token after the other
    ("dflash", "block"),  # all slots at once
    ("dspark", "strict"),  # slots at once, and a head along the path
    ("lilicorr", "standard"),  # a joint law of the slots
    ("n-gram", "standard"),  # without a law
    ("suffix", "block"),  # which learns from text to text
    ("eagle argmax", "strict"),
    ("query_only", "block"),
    ("draft-model", "block"),
    ("draft-model stopping", "standard"),
    ("peagle dynamic", "strict"),
    ("eagle static", "standard"),
    ("dflash static", "standard"),
    ("medusa Medusa's", "standard"),
    ("draft-model greedy+1", "traversal"),
}


@pytest.mark.parametrize("name, rule", by_day(ALL, BY_DAY))
def test_the_law_of_texts_is_the_verifiers(small, law_of, name, rule):
    temperature = (0.7, 1.0)[ALL.index((name, rule)) % 2]
    p, steps = p_value(small, law_of(temperature), name, rule, temperature)
    assert p > ALPHA / len(ALL)
    assert any(s.accepted for s in steps) and any(s.accepted < len(s.draft) for s in steps)  # it was put to the test


@pytest.mark.parametrize(
    "name, rule",
    [
        ("eagle", "wrong: no residual"),
        ("eagle", lenient(0.3)),
        pytest.param("eagle static", "wrong: no residual", marks=pytest.mark.nightly),
        pytest.param("draft-model", "wrong: no residual", marks=pytest.mark.nightly),
    ],
    ids=lambda x: x if isinstance(x, str) else "lenient",
)
def test_a_wrong_rule_is_caught(small, law_of, name, rule):
    "The same threshold; a few more texts."
    assert p_value(small, law_of(1.0), name, rule, 1.0, 4 * FEW)[0] < ALPHA / len(ALL)


def test_remembering_changes_nothing(small, law_of):
    "The same test without any of it: real caches, real passes, torch's own draws."
    verifier, drafters = small
    sampling = Sampling(1.0, torch.Generator().manual_seed(0), **FILTERS)
    for name in ("eagle", "mlp static"):
        texts = generate(
            verifier, make(name, drafters, verifier), [list(PROMPT)] * 250, max_new_tokens=NEW, k=3, sampling=sampling
        )
        assert chi_square(Counter(tuple(g.tokens) for g in texts), law_of(1.0))[2] > 1e-3


def test_the_quick_draw_is_a_draw():
    law, g = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]]), torch.Generator().manual_seed(0)
    seen = torch.bincount(torch.stack([inverse(law, generator=g)[0] for _ in range(20_000)]), minlength=6)
    assert seen[law[0] == 0].sum() == 0
    assert (
        chi_square({i: int(c) for i, c in enumerate(seen) if c}, {i: float(p) for i, p in enumerate(law[0]) if p})[2]
        > 1e-3
    )


@pytest.fixture(scope="module")
def tiny():
    verifier, _, prompts = shipped([0, 2, 4, 6])
    prompts = [p[-40:] for p in prompts[::30]][:4]
    mask = json.loads((SHIPPED / "config.json").read_text())["vocab_size"] - 1
    plain = [generate(verifier, NoDrafter(), p, max_new_tokens=10, k=0).tokens for p in prompts]
    return verifier, Drafters(SHIPPED, mask), prompts, plain


GREEDY = [
    *(c for c in CHAINS if "argmax" not in c),
    "medusa Medusa's",
    *(f"{g} {kind}" for g in GROWERS for kind in ("static", "dynamic")),
]
# the others' greedy texts are test_proposal_setup.py's by day
GREEDY_BY_DAY = {"eagle", "query_only", "n-gram", "suffix", "draft-model stopping"}
GREEDY_BY_DAY |= {"medusa Medusa's", "dflash static", "eagle3 dynamic"}


@pytest.mark.parametrize("name", by_day(GREEDY, GREEDY_BY_DAY))
def test_greedy_texts_are_the_verifiers(tiny, name):
    "The shipped verifier: four prompts, ten tokens, one at a time and together."
    verifier, drafters, prompts, plain = tiny
    drafter = make(name, drafters, verifier)
    assert [g.tokens for g in generate(verifier, drafter, prompts, max_new_tokens=10, k=4)] == plain
    assert generate(verifier, drafter, prompts[0], max_new_tokens=10, k=4).tokens == plain[0]
