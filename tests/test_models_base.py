"""Checkpoints in and out: what is refused and what is said; what a kill leaves behind."""

import json
import shutil
import signal

import forked
import pytest
import torch
from matrix import DRAFTERS, batch_for, drafter, train_step
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle3 import Eagle3DraftModel
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.serve.vllm_contract import check_vllm_contract

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
    return folder


def mapping(v=64):
    t2d = torch.arange(v) % 2 == 0
    return t2d, t2d.nonzero()[:, 0] - torch.arange(int(t2d.sum()))


def fresh(verifier, **options):
    return Eagle3DraftModel.from_training_args(
        draft_layer_config(Qwen3Config(**SHAPE)), verifier_name_or_path=str(verifier), **options
    )


@pytest.fixture
def checkpoint(verifier, tmp_path):
    fresh(verifier, t2d=mapping()[0], d2t=mapping()[1]).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


@pytest.mark.statement("release-58")
def test_round_trip(checkpoint):
    model = SpeculatorModel.from_pretrained(checkpoint)
    assert type(model) is Eagle3DraftModel and check_vllm_contract(checkpoint) == []
    model.save_pretrained(checkpoint.parent / "again")
    a, b = (load_file(f / "model.safetensors") for f in (checkpoint, checkpoint.parent / "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert (checkpoint / "config.json").read_text() == (checkpoint.parent / "again/config.json").read_text()


def test_stored_in_bf16(checkpoint):
    SpeculatorModel.from_pretrained(checkpoint).save_pretrained(checkpoint.parent / "half", dtype=torch.bfloat16)
    model = SpeculatorModel.from_pretrained(checkpoint.parent / "half")
    assert model.fc.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16 and model.d2t.dtype == torch.int64
    assert json.loads((checkpoint.parent / "half/config.json").read_text())["dtype"] == "bfloat16"


def test_a_mapping_that_is_given(checkpoint):
    "A checkpoint that holds none."
    file = checkpoint / "model.safetensors"
    state = load_file(file)
    given = {name: state.pop(name) for name in ("t2d", "d2t")}
    save_file(state, file)
    with pytest.raises(ValueError, match="misses tensors: d2t, t2d"):
        SpeculatorModel.from_pretrained(checkpoint)
    assert torch.equal(SpeculatorModel.from_pretrained(checkpoint, **given).d2t, given["d2t"])


def test_stored_in_several_dtypes(checkpoint):
    "The dtype of most of them is the drafter's, whichever comes first."
    file = checkpoint / "model.safetensors"
    state = {n: w.bfloat16() if w.is_floating_point() else w for n, w in load_file(file).items()}
    for first in (next(n for n, w in state.items() if w.is_floating_point()), "norm.weight"):
        save_file(state | {first: state[first].float()}, file)
        assert SpeculatorModel.from_pretrained(checkpoint).dtype == torch.bfloat16


def test_drafts_without_its_verifier(checkpoint):
    "A checkpoint is enough to draft; training says what it lacks."
    config = json.loads((checkpoint / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "/nowhere/to/be/found"
    (checkpoint / "config.json").write_text(json.dumps(config))
    model = SpeculatorModel.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match="target_head.weight"):
        SpeculatorModel.verify_training_compatible(model)


def edit(checkpoint, change):
    config = json.loads((checkpoint / "config.json").read_text())
    change(config)
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda c: c.pop("speculators_model_type"), "speculators_model_type is missing"),
        (lambda c: c.update(speculators_model_type="eagle9"), "'eagle9' is not known"),
        (lambda c: c.update(draft_vocab_size=100), "larger than the verifier's vocabulary of 64"),
        (lambda c: c.update(draft_vocab_size=31), r"misshapen tensors: d2t \(32,\) instead of \(31,\)"),
        (lambda c: c["transformer_layer_config"].update(intermediate_size=8), "misshapen tensors"),
        (lambda c: c.update(norm_before_fc=True), "misses tensors: input_norm.weight"),
        (lambda c: c["transformer_layer_config"].update(model_type="gemma"), "'gemma' is not a draft layer family"),
    ],
)
def test_bad_configs(checkpoint, change, message):
    edit(checkpoint, change)
    with pytest.raises(ValueError, match=message):
        SpeculatorModel.from_pretrained(checkpoint)


def test_truncated_weights_are_named(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors"):
        SpeculatorModel.from_pretrained(checkpoint)


def test_verifier_without_weights(tmp_path):
    Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no model.safetensors"):
        fresh(tmp_path)


def test_verifier_of_pickles_is_refused(tmp_path):
    Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(FileNotFoundError, match="pickles can run code"):
        fresh(tmp_path)


def test_verifier_of_another_hidden_size(verifier, checkpoint, tmp_path):
    LlamaForCausalLM(LlamaConfig(**SHAPE | dict(hidden_size=48))).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="hidden_size 48, this drafter's LlamaConfig has 32"):
        SpeculatorModel.from_pretrained(checkpoint, verifier=tmp_path / "other")


def test_verifier_whose_config_lacks_its_width(verifier, tmp_path):
    "transformers then takes 4096."
    folder = shutil.copytree(verifier, tmp_path / "verifier")
    config = json.loads((folder / "config.json").read_text())
    width = config.pop("hidden_size")
    (folder / "config.json").write_text(json.dumps(config))
    layer = draft_layer_config(AutoConfig.from_pretrained(folder))
    with pytest.raises(ValueError, match=f"embeddings of {width} channels, its config.json says hidden_size 4096"):
        Eagle3DraftModel.from_training_args(layer, verifier_name_or_path=str(folder))


def test_verifier_of_another_vocabulary(checkpoint, tmp_path):
    LlamaForCausalLM(LlamaConfig(**SHAPE | dict(vocab_size=80))).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="80 rows, but t2d has 64"):
        SpeculatorModel.from_pretrained(checkpoint, verifier=tmp_path / "other")


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(t2d=mapping()[0]), "d2t is missing"),
        (dict(d2t=mapping()[1]), "t2d is missing|draft_vocab_size"),
        (dict(draft_vocab_size=65), "larger than the verifier's"),
        (dict(draft_vocab_size=32), "t2d and d2t are missing"),
        (dict(t2d=mapping(60)[0], d2t=mapping(60)[1]), "t2d"),
        (dict(norm_before_fc=True, fc_norm=True), "choose one"),
        (dict(target_layer_ids=[1, 2, 1]), "must be distinct and not negative"),
    ],
)
def test_bad_training_arguments(verifier, options, message):
    with pytest.raises(ValueError, match=message):
        fresh(verifier, **options)


def test_different_head_is_kept_apart(verifier):
    "A trained head is drafted with; targets still come from the verifier's rows."
    model = fresh(verifier)
    state = model.saved_state()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    other = SpeculatorModel.from_pretrained(config=model.config, state_dict=state)
    assert torch.equal(other.target_head.weight, model.lm_head.weight) and torch.equal(
        other.lm_head.weight, model.lm_head.weight + 1
    )
    assert other.to(torch.float64).target_head.weight.dtype == torch.float64


def test_kill_during_save_leaves_a_whole_checkpoint(checkpoint):
    "SIGKILL at a random moment of a save over an old checkpoint: it loads, and is wholly the old or the new one."
    ready = forked.FORK.Event()

    def save():
        model = SpeculatorModel.from_pretrained(checkpoint)
        state = {n: torch.ones_like(w) if w.is_floating_point() else w for n, w in model.saved_state().items()}
        ready.set()
        while True:
            model.save_pretrained(checkpoint, state_dict=state)

    before = load_file(checkpoint / "model.safetensors")
    run = forked.begin(save)
    assert ready.wait(60)
    run.join(0.3)
    run.kill()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    after = load_file(checkpoint / "model.safetensors")
    same = {
        torch.equal(after[n], before[n]) for n in before if before[n].is_floating_point() and not (before[n] == 1).all()
    }
    assert len(same) == 1
    SpeculatorModel.from_pretrained(checkpoint)


def test_sharded_checkpoint(checkpoint):
    state = load_file(checkpoint / "model.safetensors")
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({n: state[n] for n in part}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {n: f for f, part in parts.items() for n in part}})
    )
    (checkpoint / "model.safetensors").unlink()
    assert torch.equal(SpeculatorModel.from_pretrained(checkpoint).fc.weight, state["fc.weight"])


def test_documented_attributes(verifier):
    "The names of the speculators library for what a drafter shares with its verifier."
    t2d, d2t = mapping()
    whole, reduced = fresh(verifier), fresh(verifier, t2d=t2d, d2t=d2t)
    assert (whole.use_draft_vocab, reduced.use_draft_vocab) == (False, True)
    assert (reduced.draft_vocab_size, reduced.verifier_vocab_size, reduced.hidden_size) == (32, 64, 32)
    assert whole.target_layer_ids == whole.config.eagle_aux_hidden_state_layer_ids
    states = torch.randn(3, 32)
    with torch.no_grad():
        logits = reduced.verifier_lm_head(reduced.verifier_norm(states))
        torch.testing.assert_close(logits, reduced.target_head(states))
    assert reduced.verifier_lm_head.weight.shape == (32, 32)
    assert not any("verifier" in name for name in reduced.state_dict())
    assert Eagle3DraftModel(whole.config).verifier_lm_head is None
    eagle = SpeculatorModel.registered_class("eagle")
    with torch.device("meta"):  # of llama's own size
        assert eagle(eagle.config_class()).target_layer_ids is None
    layer = draft_layer_config(Qwen3Config(**SHAPE))
    assert eagle.from_training_args(layer, verifier_name_or_path=str(verifier)).target_layer_ids == [4]
    for kind in SpeculatorModel.registered_classes().values():
        assert isinstance(kind.target_layer_ids, property) and isinstance(kind.verifier_norm, property)


def test_documented_errors(verifier):
    "TypeError and AttributeError where the documentation says so, and ValueError as before."
    layers, base = Qwen3Config(**SHAPE), SpeculatorModelConfig()
    for wrong in (layers, base, None):
        for use in (
            lambda wrong=wrong: Eagle3DraftModel(wrong),
            lambda wrong=wrong: SpeculatorModel.registered_model_class_from_config(wrong),
        ):
            for kind in (TypeError, ValueError):
                with pytest.raises(kind, match=f"config is a {type(wrong).__name__}"):
                    use()
    with pytest.raises(TypeError, match="config is a Qwen3Config"):
        SpeculatorModel.from_pretrained(None, config=layers)
    with pytest.raises(TypeError, match="not a SpeculatorModel"):
        SpeculatorModel.verify_training_compatible(Qwen3ForCausalLM(layers))
    without = fresh(verifier)
    del without.layers
    for kind in (AttributeError, ValueError):
        with pytest.raises(kind, match="no attribute 'layers'"):
            SpeculatorModel.verify_training_compatible(without)


@pytest.mark.parametrize(
    "name",
    [
        "eagle",
        "eagle3",
        "peagle",
        "dflash",
        "dspark vanilla",
        "dflash2",
        "xpress",
        "domino",
        "lilicorr",
        "query_only",
        "mlp",
        "medusa",
    ],
)
def test_a_batch_is_one_packed_row(name):
    "A second row, or a tensor that is shorter than the row, was left out of the loss in silence."
    model = drafter(name, "qwen3")
    batch = batch_for(model, "qwen3")
    options = model.get_trainer_kwargs(**DRAFTERS[name][2])[0]
    with pytest.raises(ValueError, match="input_ids has 2 rows, and .* takes one packed row"):
        model(**{key: torch.cat([tensor, tensor]) for key, tensor in batch.items()}, **options)
    for key in batch.keys() - {"input_ids"}:
        with pytest.raises(ValueError, match=rf"^{key} is \[1, 67.*beside input_ids of \[1, 72\]"):
            model(**batch | {key: batch[key][:, :-5]}, **options)


@pytest.mark.parametrize("name", ["eagle3", "peagle", "mtp"])
def test_without_a_loss_mask_all_tokens_are_trained(name):
    "Those of the first document too, and no padding."
    model = drafter(name, "qwen3")
    batch = batch_for(model, "qwen3")
    every = batch | dict(loss_mask=batch["document_ids"] >= 0)
    assert train_step(model, batch | dict(loss_mask=None), name)[0] == train_step(model, every, name)[0]


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash"])
def test_an_evaluation_measures_acceptance(name):
    "By position, at most 1; training does not."
    model = drafter(name, "qwen3")
    batch, options = batch_for(model, "qwen3"), model.get_trainer_kwargs(**DRAFTERS[name][2])[1]
    metrics = [model.train(training)(**batch, **options)[2] for training in (False, True)]
    accept, nothing = ([key for key in m if key.startswith("accept_") and key.endswith("_sum")] for m in metrics)
    assert accept and not nothing
    assert all(0 <= metrics[0][key] <= metrics[0][key.removesuffix("sum") + "total"] for key in accept)


def test_a_missing_tensor_of_a_batch_is_named():
    model = drafter("dflash", "qwen3")
    with pytest.raises(ValueError, match="loss_mask=None: DFlashDraftModel needs it"):
        model(**batch_for(model, "qwen3") | dict(loss_mask=None))
