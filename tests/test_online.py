"""Every drafter learns while it serves, and the text stays the verifier's."""

import math
from pathlib import Path

import pytest
import torch
from by_day import by_day

from speculators_nb.core.options import algorithms
from speculators_nb.decode.generate import HiddenStates, NoDrafter, generate
from speculators_nb.decode.step import Generation, Step, StepRecord
from speculators_nb.decode.tree import Sampling
from speculators_nb.lab.experiment import COMMON, settings
from speculators_nb.train.online import OnlineDrafter, read_drafts, rejected_tokens
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.tapped_model import Verifier

PATH = Path(__file__).resolve().parents[1] / "data/tiny-verifier"
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [40, 41, 42, 43, 44]]


def arguments(algorithm):
    return {name: value for name, value in settings(algorithm).items() if name not in COMMON}


@pytest.fixture(scope="module")
def verifier():
    return Verifier.from_pretrained(PATH, dtype="float32")


# a chain, blocks, and a drafter that reads the last state alone; the others at night
@pytest.mark.parametrize("algorithm", by_day(algorithms(), ["eagle3", "dflash", "mtp"]))
def test_every_drafter_learns_and_the_text_stays(algorithm, verifier):
    model = new_drafter(algorithm, PATH, **arguments(algorithm))
    drafter = OnlineDrafter(model, learning_rate=1e-3, total_seq_len=64, memory=64, **arguments(algorithm))
    tapped, plain = Verifier(verifier.model, drafter.aux_layer_ids), Verifier(verifier.model)

    @torch.no_grad()
    def loss_of(row):
        torch.manual_seed(0)  # of anchors
        return float(model(**row, **drafter.training_args).loss)

    for turn in range(2):
        answers = generate(tapped, drafter, PROMPTS, max_new_tokens=16, k=3)
        for prompt, answer in zip(PROMPTS, answers):
            assert answer.tokens == generate(plain, NoDrafter(), prompt, max_new_tokens=16, k=0).tokens
            drafter.keep(answer)
        if not turn:
            row = drafter.packed_row()
            before = loss_of(row)
        drafter.learn(3)
    assert loss_of(row) < before


def test_what_is_kept_is_the_request_s_own(verifier):
    "Beside requests of other lengths, drawn at random, in one call; the newest is the last, what does not fit is gone."
    model = new_drafter("eagle3", PATH, **arguments("eagle3"))
    drafter = OnlineDrafter(model, total_seq_len=32, memory=40)
    tapped = Verifier(verifier.model, drafter.aux_layer_ids)
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(0))
    answers = generate(tapped, drafter, PROMPTS, max_new_tokens=12, k=3, sampling=sampling)
    for answer in answers:
        drafter.keep(answer)
        row, text = drafter.rows[-1], [*answer.prompt, *answer.tokens]
        assert row["input_ids"].tolist() == text[: len(row["input_ids"])]
        states = tapped(torch.tensor([text])).hidden_states[0, : len(row["input_ids"])]
        kept = torch.cat([row["hidden_states"], row["verifier_last_hidden_states"]], -1)
        torch.testing.assert_close(kept, states, rtol=1e-3, atol=1e-3)
    assert sum(len(row["input_ids"]) for row in drafter.rows) <= 40 and len(drafter.rows) == 2
    batch = drafter.packed_row()
    assert batch["input_ids"].shape == (1, 32)
    assert batch["input_ids"][0, :10].tolist() == model.shift(drafter.rows[-1])["input_ids"][:10].tolist()


@pytest.mark.parametrize("vocabulary", [None, 1500])
def test_rejected_tokens_are_as_likely_as_when_they_were_drafted(verifier, vocabulary):
    "In a packed row, to the drafter that drafted them, with a draft vocabulary as without; and then less likely."
    mapping = None
    if vocabulary:
        t2d = torch.arange(2048) % 4 != 1
        t2d[torch.arange(int(t2d.sum()) - vocabulary) * 4] = False
        mapping = t2d, t2d.nonzero()[:, 0] - torch.arange(vocabulary)
    sizes = dict(draft_vocab_size=vocabulary, mapping=mapping)
    model = new_drafter("dflash", PATH, **arguments("dflash"), **sizes)
    learning = dict(learning_rate=1e-3, total_seq_len=96, memory=96, rejected_weight=1.0)
    drafter = OnlineDrafter(model, **learning, **arguments("dflash"))
    tapped = Verifier(verifier.model, drafter.aux_layer_ids)
    whole = model.config.speculative_tokens  # a shorter draft is of fewer slots, which see each other
    answers = generate(tapped, drafter, PROMPTS, max_new_tokens=16, k=whole, record=1)
    for answer in answers:
        drafter.keep(answer)
    batch = drafter.packed_row()
    rejected = batch["rejected_probs"] > 0
    tokens, q, p = [], [], []
    for step, record in zip(answers[-1].steps, answers[-1].records):
        if step.draft:
            tokens += step.draft[step.accepted :]
            p += record.p[step.accepted :]
            q += record.q[step.accepted :] if len(step.draft) == whole else []  # the last ones are shorter
    n = len(tokens)  # the newest request is the first of the row
    assert len(q) > 20 and batch["rejected_ids"][rejected][:n].tolist() == tokens
    assert batch["rejected_probs"][rejected][:n].tolist() == pytest.approx(p, abs=5e-5)

    def log_q():
        with torch.no_grad():
            return model.log_probs_of(batch["rejected_ids"], rejected, batch)[:n]

    before = log_q()
    assert before.exp()[: len(q)].tolist() == pytest.approx(q, rel=1e-3)
    drafter.learn(4)
    assert log_q().mean() < before.mean() - 0.1


def test_what_is_behind_an_accepted_stop_token_was_not_rejected():
    "The rule refuses 9 behind the stop token 7, which ended the text; in the step before it refused 8."
    steps = [Step(3, [5, 8, 8], 1, [5, 6]), Step(3, [6, 7, 9], 2, [6, 7])]
    records = [StepRecord([0.5, 0.25, 0.125], [1.0] * 3, [1.0] * 3, [], [], {}) for _ in steps]
    answer = Generation([1, 2], [4, 5, 6, 6, 7], steps, "stop", records=records)
    found = rejected_tokens(answer, 6, 3)
    wanted = torch.zeros(6, 3)
    wanted[2] = torch.tensor([0, 0.25, 0.125])
    assert found["rejected_probs"].equal(wanted) and found["rejected_ids"].sum() == 16


def test_drafts_along_a_row_are_read_as_behind_their_texts_alone(verifier):
    "Two answers in one row; each draft against a pass over its own text, and accepted as far as that is greedy."
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(2048, (n,), generator=generator) for n in (9, 6)]
    batch = dict(input_ids=torch.cat(texts)[None], position_ids=torch.cat([torch.arange(9), torch.arange(6)])[None])
    anchors, before = torch.tensor([2, 7, 12]), [texts[0][:3], texts[0][:8], texts[1][:4]]
    drafts = torch.randint(2048, (3, 3), generator=generator)
    greedy = generate(verifier, NoDrafter(), before[1].tolist(), max_new_tokens=2, k=0).tokens
    drafts[1, :2] = torch.tensor(greedy)
    p, accepted = read_drafts(verifier, batch, anchors, drafts)
    assert accepted.tolist() == [[False] * 3, [True, True, False], [False] * 3]
    for text, draft, found in zip(before, drafts, p):
        logits = verifier(torch.cat([text, draft])[None]).logits[0, len(text) - 1 : -1]
        assert found.tolist() == pytest.approx(logits.softmax(-1)[range(3), draft].tolist(), rel=1e-3)


def test_learning_from_drafts_along_stored_answers(verifier):
    "Nothing is decoded; drafts become likelier where the verifier takes them for likelier, and the loss of them falls."
    model = new_drafter("dflash", PATH, **arguments("dflash"))
    learning = dict(learning_rate=1e-3, total_seq_len=96, memory=96, rejected_weight=1.0)
    drafter = OnlineDrafter(model, **learning, verifier=verifier, **arguments("dflash"))
    tapped = Verifier(verifier.model, drafter.aux_layer_ids)
    for prompt in PROMPTS:
        drafter.keep(generate(tapped, HiddenStates(drafter.aux_layer_ids), prompt, max_new_tokens=16, k=0))
    batch = drafter.packed_row()

    def loss():
        torch.manual_seed(0)  # of anchors
        with torch.no_grad():
            return float(drafter.drafted_loss(batch))

    before = loss()
    drafter.learn(8)
    assert loss() < before


def test_what_is_not_finite_is_not_learned(verifier):
    "The weights stay what they are, and the next request is learned from as if nothing had been."
    model = new_drafter("eagle3", PATH, **arguments("eagle3"))
    drafter = OnlineDrafter(model, total_seq_len=64, memory=64)
    tapped = Verifier(verifier.model, drafter.aux_layer_ids)
    drafter.keep(generate(tapped, drafter, PROMPTS[0], max_new_tokens=8, k=3))
    drafter.learn()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = drafter.rows[-1]["hidden_states"].clone()
    drafter.rows[-1]["hidden_states"][3] = float("nan")
    with pytest.raises(FloatingPointError, match="step 2 is not finite, and nothing is learned .* learning_rate"):
        drafter.learn()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()) and not model.training
    drafter.rows[-1]["hidden_states"] = states
    assert math.isfinite(drafter.learn())
    with pytest.raises(ValueError, match="steps=0"):
        drafter.learn(0)


def test_earlier_samples_are_every_second_one(verifier):
    model = new_drafter("eagle3", PATH, **arguments("eagle3"))
    sample = {
        "input_ids": torch.full((4,), 77),
        "loss_mask": torch.ones(4, dtype=torch.bool),
        "hidden_states": torch.zeros(4, 3 * model.hidden_size),
        "verifier_last_hidden_states": torch.zeros(4, model.hidden_size),
    }
    drafter = OnlineDrafter(model, total_seq_len=64, memory=64, earlier=[sample])
    tapped = Verifier(verifier.model, drafter.aux_layer_ids)
    drafter.keep(generate(tapped, drafter, PROMPTS[0], max_new_tokens=8, k=3))
    batch = drafter.packed_row()
    kinds = [
        bool((batch["input_ids"][batch["document_ids"] == i] == 77).all())
        for i in range(int(batch["document_ids"].max()) + 1)
    ]
    assert kinds == [bool(i % 2) for i in range(len(kinds))] and len(kinds) > 3


@pytest.mark.parametrize(
    "given,words",
    [
        (dict(memory=100), "memory=100: is less than one packed row, total_seq_len=1024"),
        (dict(learning_rate=-1.0), "learning_rate"),
        (dict(total_seq_len=0), "total_seq_len"),
    ],
)
def test_what_cannot_be_is_named(given, words, verifier):
    model = new_drafter("eagle3", PATH, **arguments("eagle3"))
    with pytest.raises(ValueError, match=words):
        OnlineDrafter(model, **given)
    with pytest.raises(ValueError, match="nothing to learn from: `keep` a request first"):
        OnlineDrafter(model).learn()
    with pytest.raises(ValueError, match="rejected_weight=1.0: is for blocks .*, and this is eagle3"):
        OnlineDrafter(model, rejected_weight=1.0)
    with pytest.raises(ValueError, match="verifier: is asked for rejected_weight alone"):
        OnlineDrafter(model, verifier=verifier)
