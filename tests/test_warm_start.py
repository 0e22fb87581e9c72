"""Faults of other trainers, each with a test by its name: a warm start that loses the draft vocabulary of its
checkpoint, and an answer whose first token is not trained on."""

import shutil
from pathlib import Path

import pytest
import torch

from speculators_nb.data.packing import collate
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.draft_vocabulary import save_vocab_mapping, vocab_mapping_from_frequencies
from speculators_nb.train.train_drafter import train_drafter

RELEASE = Path(__file__).parent / "fixtures/compat/0.1.0"
RUN = dict(
    max_steps=1,
    warmup_steps=0,
    report_to="none",
    eval_share=0,
    save_strategy="no",
    eval_strategy="no",
    disable_tqdm=True,
)


def warm(features, out, **given):
    start = dict(verifier=RELEASE / "verifier", algorithm="eagle3", from_pretrained=RELEASE / "eagle3")
    return train_drafter(features, out, **start | RUN | dict(load_best_model_at_end=False) | given)


def test_a_warm_start_keeps_the_checkpoints_vocabulary(tmp_path):
    "Also where the folder of the features names another mapping of the same size, and other tokens are frequent."
    old = SpeculatorModel.from_pretrained(RELEASE / "eagle3", verifier=RELEASE / "verifier")
    shutil.copytree(RELEASE / "features", tmp_path / "features")
    t2d, d2t = vocab_mapping_from_frequencies(torch.arange(64), 40, 64)
    assert not torch.equal(t2d, old.t2d)
    save_vocab_mapping(tmp_path / "features", t2d, d2t)
    trained = warm(tmp_path / "features", tmp_path / "out").model
    stored = SpeculatorModel.from_pretrained(tmp_path / "out", verifier=RELEASE / "verifier")
    for model in (trained, stored):
        assert torch.equal(model.t2d, old.t2d) and torch.equal(model.d2t, old.d2t)
    assert not torch.equal(stored.fc.weight, old.fc.weight)


def test_a_warm_start_refuses_another_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="draft_vocab_size=30: .*eagle3 knows 40 tokens, and keeps them; leave it out"):
        warm(RELEASE / "features", tmp_path, draft_vocab_size=30)


def scored_states(kind, mask):
    "Positions of a conversation whose verifier state the loss depends on: changed one at a time."
    torch.manual_seed(0)
    model = SpeculatorModel.from_pretrained(RELEASE / kind, verifier=RELEASE / "verifier").eval()
    n, hidden, taps = len(mask), 16, len(model.drafter().aux_layer_ids)
    sample = dict(input_ids=torch.arange(10, 10 + n), hidden_states=torch.randn(n, taps * hidden), loss_mask=mask)
    states = torch.randn(n, hidden)

    @torch.no_grad()
    def loss(last_states):
        batch = collate([sample | dict(verifier_last_hidden_states=last_states)], n, model.shift)
        return model(**batch).loss.item()

    def changed(position):
        return torch.where((torch.arange(n) == position)[:, None], -states, states)

    return [position for position in range(n) if loss(changed(position)) != loss(states)]


@pytest.mark.parametrize("kind", ["eagle3", "hass", "eagle", "peagle", "dflash", "dspark"])
def test_the_first_answer_token_is_trained(kind):
    """The verifier's prefill gives the first token of an answer, so that a drafter first drafts the token behind it.
    That draft is trained: of all states, the first that is scored is the first answer token's."""
    first = 5
    scored = scored_states(kind, torch.arange(16) >= first)
    assert scored[0] == first and scored == list(range(first, scored[-1] + 1))
    late = scored_states(kind, torch.arange(16) > first)
    assert late[0] == first + 1  # a mask that begins one token late is seen
