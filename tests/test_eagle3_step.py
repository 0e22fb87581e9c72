"""How much of the project a reader walks through to follow one EAGLE-3 train step: our functions, their files, and the
deepest call. Each limit is what was reached; a step that is shorter to read lowers it."""

import pytest
import torch
from calls import calls_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from speculators_nb.data.packing import collate
from speculators_nb.models.eagle3 import Eagle3DraftModel
from speculators_nb.nn.layers import draft_layer_config


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    "(file, function, depth) of each call of ours in one step: two conversations in one packed row, three TTT steps."
    folder = tmp_path_factory.mktemp("verifier")
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    verifier = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    verifier.save_pretrained(folder)
    model = Eagle3DraftModel.from_training_args(
        draft_layer_config(verifier.config), verifier_name_or_path=str(folder), draft_vocab_size=64
    ).train()
    rows = [
        dict(
            input_ids=torch.randint(64, (n,)),
            loss_mask=torch.arange(n) > n // 2,
            hidden_states=torch.randn(n, 96),
            verifier_last_hidden_states=torch.randn(n, 32),
        )
        for n in (13, 8)
    ]
    batch, arguments = collate(rows, 24, model.shift), model.get_trainer_kwargs(ttt_steps=3)[0]
    return calls_of(lambda: model(**batch, **arguments)[1].backward())


def test_a_step_is_short_to_read(called):
    files, functions = {file for file, _, _ in called}, {(file, name) for file, name, _ in called}
    assert max(depth for _, _, depth in called) <= 8
    assert len(functions) <= 85, sorted(functions)
    assert len(files) <= 6, sorted(files)


def test_forward_holds_the_loop_and_the_loss(called):
    "It takes the steps and calls the loss itself."
    direct = [name for _, name, depth in called if depth == 2]
    assert direct.count("LeanSteps.layers") == 3 and direct.count("head_loss") == 1
