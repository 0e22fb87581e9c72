"""Faults of trainers, each with a test by its name: a warm start that loses the draft vocabulary of its checkpoint, or
ignores what it is told, and an answer whose first token is not trained on."""

import shutil
from pathlib import Path

import pytest
import torch

from speculators_nb.core.provenance import read_provenance
from speculators_nb.data.packing import collate
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.draft_vocabulary import save_vocab_mapping, vocab_mapping_from_frequencies
from speculators_nb.train.train_drafter import keep_shape, train_drafter

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
    with pytest.raises(ValueError, match="draft_vocab_size=30: .*eagle3 has 40, and keeps it; leave draft_vocab_size"):
        warm(RELEASE / "features", tmp_path, draft_vocab_size=30)


KINDS = "eagle3", "hass", "eagle", "peagle", "dflash", "dspark", "mtp", "mlp", "medusa"


def old(kind):
    return SpeculatorModel.from_pretrained(RELEASE / kind, verifier=RELEASE / "verifier")


@pytest.mark.parametrize(
    "kind, name, value, own",
    [
        ("eagle3", "algorithm", "dflash", "'eagle3'"),
        ("eagle3", "num_layers", 2, "1"),
        ("eagle3", "draft_arch", "qwen3", "'llama'"),
        ("eagle3", "norm_before_fc", True, "False"),
        ("eagle3", "embed_requires_grad", True, "False"),
        ("eagle3", "draft_attn_impl", "sdpa", "None"),
        ("eagle3", "target_layer_ids", [0], r"\[.*\]"),
        ("eagle", "speculative_tokens", 5, "3"),
        ("eagle", "layernorms", True, "False"),
        ("dflash", "block_size", 16, "4"),
        ("dflash", "sample_from_anchor", True, "False"),
        ("dflash", "attention_sink_bias", True, "False"),
        ("dflash", "mask_token_id", 1, r"\d+"),
        ("dspark", "markov_head_type", "gated", "'vanilla'"),
        ("mtp", "num_speculative_steps", 4, "2"),
        ("mtp", "fresh_head", True, "False"),
        ("medusa", "num_heads", 5, "2"),
        ("mlp", "num_heads", 5, "2"),
        ("mlp", "tie_weights", False, "True"),
    ],
)
def test_a_warm_start_refuses_what_its_checkpoint_has_decided(tmp_path, kind, name, value, own):
    "They were ignored without a word."
    start = dict(algorithm=kind, from_pretrained=RELEASE / kind) | {name: value}
    with pytest.raises(ValueError, match=rf"^{name}=.*{kind} has {own}, and keeps it; leave {name}.* or train anew$"):
        warm(RELEASE / "features", tmp_path, **start)


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument_holds_or_is_kept(kind):
    """An argument of `forward` is one of training; of every other one the checkpoint has a value, which may be given
    again."""
    model = old(kind)
    kept, in_forward = model.kept_arguments(), model.forward_arguments()
    assert kept.keys() | in_forward.keys() == model.training_arguments().keys() and not kept.keys() & in_forward.keys()
    keep_shape(model, "here", kept | dict(algorithm=model.config.speculators_model_type))


@pytest.mark.parametrize("kind, name", [("eagle3", "ttt_steps"), ("peagle", "num_depths")])
def test_a_warm_start_says_how_many_it_is_trained_to_draft(kind, name):
    model = old(kind)
    before = model.config.speculators_config.speculative_tokens
    keep_shape(model, "here", {name: before + 1})
    assert model.config.speculators_config.speculative_tokens == before + 1
    assert getattr(model.config, name, before + 1) == before + 1


def test_the_command_takes_the_kind_of_its_checkpoint(tmp_path):
    from test_cli import one_line, run

    line = "train", RELEASE / "features", "OUT", "--verifier", RELEASE / "verifier", "--from-pretrained"
    line = *line, RELEASE / "dflash", "--total-seq-len", 64, "--eval-share", 0, "--max-steps", 1, "--disable-tqdm"
    refused, trained = (("train", line[1], tmp_path / name, *line[3:]) for name in ("refused", "trained"))
    one_line(run(*refused, "--block-size", 16), "block_size=16", "dflash has 4, and keeps it", "leave block_size out")
    one_line(run(*refused, "--algorithm", "eagle3"), "algorithm='eagle3'", "dflash has 'dflash', and keeps it")
    result = run(*trained)
    assert result.exit_code == 0, result.output
    assert read_provenance(tmp_path / "trained")["arguments"]["algorithm"] == "dflash"


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

    unchanged = loss(states)
    return [position for position in range(n) if loss(changed(position)) != unchanged]


@pytest.mark.parametrize("kind", ["eagle3", "hass", "eagle", "peagle", "dflash", "dspark"])
def test_the_first_answer_token_is_trained(kind):
    """The verifier's prefill gives the first token of an answer, so that a drafter first drafts the token behind it.
    That draft is trained: of all states, the first that is scored is the first answer token's."""
    first = 5
    scored = scored_states(kind, torch.arange(12) >= first)
    assert scored[0] == first and scored == list(range(first, scored[-1] + 1))
    late = scored_states(kind, torch.arange(12) > first)
    assert late[0] == first + 1  # a mask that begins one token late is seen


def test_the_seed_reaches_the_trainer(tmp_path):
    assert warm(RELEASE / "features", tmp_path / "out", seed=7).args.seed == 7
