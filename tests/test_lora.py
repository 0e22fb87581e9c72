"""Adapters of low rank (LoRA) on drafters: what is trained, what is stored, what PEFT reads of it and writes."""

import json
import shutil

import pytest
import torch
from matrix import DRAFTERS, batch_for, drafter, family_of, train_step, verifier
from safetensors.torch import load_file, save_file
from test_warm_start import KINDS, RELEASE, RUN, old

from speculators_nb.decode.generate import generate
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.lora import adapted, add_adapter, load_adapter, remove_adapter, save_adapter
from speculators_nb.train.run_record import read_record
from speculators_nb.train.train_drafter import hidden_layers, train_drafter
from speculators_nb.verifier.tapped_model import Verifier

every_drafter = pytest.mark.parametrize("name", DRAFTERS)


def moved(model, seed=2, rank=2):
    "A drafter with an adapter whose B is not zero."
    add_adapter(model, hidden_layers(model), rank)
    torch.manual_seed(seed)
    with torch.no_grad():
        for difference in adapted(model).values():
            difference.B.normal_(0, 0.1)
    return model


@torch.no_grad()
def loss_of(model, batch, name):
    torch.manual_seed(0)
    return model.train()(**batch, **model.get_trainer_kwargs(**DRAFTERS[name][2])[0])[1].item()


def greedy(model, name):
    "A text that the verifier wrote with a drafter."
    _, target, samples = verifier(family_of(name))
    trained = model.eval().drafter()
    target = Verifier(target.model, list(trained.aux_layer_ids) or None)
    return generate(target, trained, samples[0]["input_ids"][:9].tolist(), k=3, max_new_tokens=8)


@every_drafter
def test_every_drafter_trains_an_adapter_and_nothing_else(name):
    """A fresh adapter changes nothing, to the bit. Gradients reach A and B of every layer and nothing else. Merged, the
    loss and the drafts are the same; taken off, the weights are the drafter's, to the bit. The text never changes."""
    plain = drafter(name, family_of(name))
    batch = batch_for(plain, family_of(name))
    loss, layers, text = loss_of(plain, batch, name), hidden_layers(plain), greedy(plain, name)
    model = drafter(name, family_of(name))
    add_adapter(model, layers, rank=2)
    assert adapted(model).keys() == {*layers} and loss_of(model, batch, name) == loss

    model = moved(drafter(name, family_of(name)))
    train_step(model, batch, name)
    for parameter, p in model.named_parameters():
        assert p.requires_grad == parameter.endswith((".A", ".B")) == (p.grad is not None)
        # LiLiCorr's scores count while the text is among the candidates, here in no second slot
        assert p.grad is None or p.grad.any() or parameter.startswith("lilicorr.out_head"), parameter
    loss_with, text_with = loss_of(model, batch, name), greedy(model, name)
    assert loss_with != loss and text_with.tokens == text.tokens

    merged = moved(drafter(name, family_of(name)))
    remove_adapter(merged, merge=True)
    assert loss_of(merged, batch, name) == loss_with and greedy(merged, name).steps == text_with.steps
    remove_adapter(model, merge=False)
    of_plain = plain.state_dict()
    assert model.state_dict().keys() == of_plain.keys()
    assert all(torch.equal(w, of_plain[n]) for n, w in model.state_dict().items())


def trained(features, out, kind="eagle3", **given):
    start = dict(verifier=RELEASE / "verifier", algorithm=None, from_pretrained=RELEASE / kind, lora_rank=2)
    return train_drafter(features, out, **start | RUN | dict(load_best_model_at_end=False, max_steps=3) | given)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_training_saves_a_whole_drafter_and_its_adapter(tmp_path, kind):
    "The drafter with the adapter is the one that was saved; everything that has no adapter is as it was."
    before = old(kind)
    trainer = trained(RELEASE / "features", tmp_path / "out", kind)
    out = SpeculatorModel.from_pretrained(tmp_path / "out", verifier=RELEASE / "verifier")
    again = SpeculatorModel.from_pretrained(
        RELEASE / kind, verifier=RELEASE / "verifier", adapter=tmp_path / "out/adapter", dtype="float32"
    )
    assert out.adapter is None and equal(out.state_dict(), again.state_dict())
    layers = {f"{name}.weight" for name in hidden_layers(before)}
    changed = {n for n, w in before.float().state_dict().items() if not torch.equal(w, out.state_dict()[n])}
    assert changed == layers == {f"{name}.weight" for name in adapted(trainer.model)}
    config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert config["r"] == 2 and config["lora_alpha"] == 4 and config["base_model_name_or_path"] == str(RELEASE / kind)
    assert trainer.model.training and out.requires_grad_(True)  # what was loaded can be trained again


def test_a_run_of_an_adapter_is_resumed_to_the_bit(tmp_path):
    often = dict(save_strategy="steps", save_steps=1, save_total_limit=None)
    whole = trained(RELEASE / "features", tmp_path / "whole", **often).model
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("checkpoint-2", "checkpoint-3", "adapter"):
        shutil.rmtree(tmp_path / "cut" / name)
    for name in ("model.safetensors", "config.json", "trainer_state.json"):
        (tmp_path / "cut" / name).unlink()
    record = json.loads((tmp_path / "cut/run.json").read_text())
    del record["finished"]
    (tmp_path / "cut/run.json").write_text(json.dumps(record))
    resumed = trained(RELEASE / "features", tmp_path / "cut", **often, resume_from_checkpoint=True).model
    assert equal(whole.state_dict(), resumed.state_dict())
    assert read_record(tmp_path / "cut")["model"]["lora_rank"] == 2
    for given, said in (
        (dict(lora_rank=3), "lora_rank was 2, is 3"),
        (dict(lora_rank=None), "lora_rank was 2, is None"),
    ):
        with pytest.raises(ValueError, match=f"cannot resume from .*{said}"):
            trained(RELEASE / "features", tmp_path / "cut", **often, **given, resume_from_checkpoint=True)
    done = trained(RELEASE / "features", tmp_path / "whole", **often, resume_from_checkpoint=True)
    assert done.done and equal(whole.state_dict(), done.model.state_dict())


def test_the_best_adapter_is_kept(tmp_path):
    often = dict(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, eval_share=0.3)
    worst = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)  # the first
    best = trained(RELEASE / "features", tmp_path / "out", **often, **worst).state.best_model_checkpoint
    assert not best.endswith("checkpoint-3")
    assert equal(
        load_file(f"{best}/adapter/adapter_model.safetensors"),
        load_file(tmp_path / "out/adapter/adapter_model.safetensors"),
    )
    assert equal(load_file(f"{best}/model.safetensors"), load_file(tmp_path / "out/model.safetensors"))


def files_of_drafter(folder):
    files = [folder / "config.json", folder / "model.safetensors", *folder.glob("adapter/*")]
    return {file.relative_to(folder): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def replaced(tmp_path_factory):
    "A run of an adapter, which others replace."
    folder = tmp_path_factory.mktemp("replaced")
    trained(RELEASE / "features", folder, max_steps=1)
    assert len(files_of_drafter(folder)) == 4
    return folder


@pytest.mark.parametrize("rank", [2, None])
def test_a_run_that_is_killed_has_replaced_nothing(tmp_path, monkeypatch, replaced, rank):
    """Until the new drafter is complete the old one is there with its adapter, wherever the run is killed, and the next
    ones over what it has left; then there is the new one alone."""
    shutil.copytree(replaced, tmp_path, dirs_exist_ok=True)
    before, other = files_of_drafter(tmp_path), dict(max_steps=1, lora_rank=rank, seed=1, overwrite=True)

    def kill(*args, **kwargs):
        raise SystemExit

    for killed_in in (
        "train.trainer.SpeculatorTrainer.training_step",
        "train.trainer.SpeculatorTrainer.save_model",
        "train.trainer.without_secrets",
        "models.base.save_tensors",
        *["models.base.save_adapter"] * (rank is not None),
        "core.config.write_text",
    ):
        with monkeypatch.context() as m, pytest.raises(SystemExit):
            m.setattr(f"speculators_nb.{killed_in}", kill)
            trained(RELEASE / "features", tmp_path, **other)
        assert files_of_drafter(tmp_path) == before, killed_in
    trained(RELEASE / "features", tmp_path, **other)
    assert len(files_of_drafter(tmp_path)) == (4 if rank else 2) and not (tmp_path / ".saving").exists()


def test_what_a_kill_between_two_drafters_leaves_is_replaced(tmp_path, replaced):
    "Of the old one its config is gone, and its adapter is not: the new one has none."
    shutil.copytree(replaced, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").unlink()
    trained(RELEASE / "features", tmp_path, max_steps=1, lora_rank=None, overwrite=True)
    assert len(files_of_drafter(tmp_path)) == 2


def test_a_folder_of_others_beside_a_first_run_stays(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/notes.txt").write_text("mine")
    trained(RELEASE / "features", tmp_path, lora_rank=None)
    assert (tmp_path / "adapter/notes.txt").read_text() == "mine"


def test_adapters_are_switched_in_memory(tmp_path):
    model, texts = drafter("eagle3", "llama"), {}
    for domain, seed in (("code", 3), ("table", 4)):
        save_adapter(moved(drafter("eagle3", "llama"), seed), tmp_path / domain)
        load_adapter(model, tmp_path / domain)
        texts[domain] = {name: w.clone() for name, w in model.state_dict().items()}
    load_adapter(model, tmp_path / "code")
    assert equal(model.state_dict(), texts["code"]) and not equal(texts["code"], texts["table"])
    remove_adapter(model, merge=False)
    assert equal(model.state_dict(), drafter("eagle3", "llama").state_dict())


def test_a_drafter_that_is_stored_in_bfloat16_takes_the_adapter_of_float32(tmp_path):
    save_adapter(moved(drafter("eagle3", "llama")), tmp_path / "adapter")
    small = drafter("eagle3", "llama").bfloat16()
    small.save_pretrained(tmp_path / "small")
    loaded = SpeculatorModel.from_pretrained(tmp_path / "small", adapter=tmp_path / "adapter")
    assert loaded.dtype == torch.bfloat16 and not torch.equal(loaded.fc.weight, small.fc.weight)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(moved(old("eagle3")), folder)
    return folder


@pytest.mark.parametrize(
    "field, value",
    [
        *(("use_dora", True), ("use_rslora", True), ("bias", "all"), ("peft_type", "IA3")),
        *(("alpha_pattern", {"fc": 2}), ("init_lora_weights", "pissa")),
    ],
)
def test_what_peft_computes_otherwise_is_refused(tmp_path, stored, field, value):
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    config = json.loads((stored / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=f"{field}=.* is not read here; merge it with PEFT"):
        load_adapter(old("eagle3"), tmp_path)


def test_an_adapter_of_another_drafter_is_refused(tmp_path, stored):
    "By its layers, their shapes, their weights; the drafter is as it was."
    state = load_file(stored / "adapter_model.safetensors")
    first = next(iter(state))
    broken = {
        "it adapts fc2": {n.replace(".fc.", ".fc2."): w for n, w in state.items()},
        r"is \(2, 47\) there and \(2, 48\) here": state | {first: state[first][:, 1:].contiguous()},
        "holds NaN": state | {first: state[first] * torch.nan},
        "lora_magnitude": state | {"base_model.model.fc.lora_magnitude_vector": torch.ones(3)},
    }
    for i, (said, tensors) in enumerate(broken.items()):
        shutil.copytree(stored, tmp_path / str(i))
        save_file(tensors, tmp_path / str(i) / "adapter_model.safetensors")
        model = old("eagle3")
        with pytest.raises(ValueError, match=said):
            load_adapter(model, tmp_path / str(i))
        assert equal(model.state_dict(), old("eagle3").state_dict())
    other = old("eagle3")
    with torch.no_grad():
        other.fc.weight[0, 0] += 1
    for model, said in (
        (other, "was trained on other weights; load it with the drafter that it was trained on"),
        (old("dflash"), "of another model than"),
    ):
        with pytest.raises(ValueError, match=said):
            load_adapter(model, stored)
    for missing in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copytree(stored, tmp_path / missing)
        (tmp_path / missing / missing).unlink()
        with pytest.raises(FileNotFoundError, match=missing):
            SpeculatorModel.from_pretrained(
                RELEASE / "eagle3", verifier=RELEASE / "verifier", adapter=tmp_path / missing
            )


def test_ranks_that_save_nothing_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"^lora_rank=64: the widest matrix that is adapted has 16 on its shorter side"
    ):
        trained(RELEASE / "features", tmp_path, lora_rank=64)
    with pytest.raises(
        ValueError, match=r"^lora_rank=4: an adapter is for a drafter that is there; give from_pretrained"
    ):
        trained(RELEASE / "features", tmp_path, lora_rank=4, from_pretrained=None, algorithm="eagle3")
    with pytest.raises(ValueError, match="^fsdp=True: lora_rank=2 trains few weights, on every rank; leave one"):
        trained(RELEASE / "features", tmp_path, fsdp=True)


def test_the_command_trains_an_adapter(tmp_path):
    from test_cli import run

    line = "train", RELEASE / "features", tmp_path, "--verifier", RELEASE / "verifier", "--from-pretrained"
    line = *line, RELEASE / "dflash", "--lora-rank", 2, "--lora-alpha", 3, "--total-seq-len", 64, "--eval-share", 0
    result = run(*line, "--max-steps", 1, "--disable-tqdm")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_alpha"] == 3


# ---- PEFT: `pip install peft`, which is no requirement


@every_drafter
def test_peft_reads_our_adapter_and_we_read_its(tmp_path, name):
    """Merged by PEFT, ours gives the same weights; and one that PEFT has made, and moved off zero, is merged here as
    there."""
    peft = pytest.importorskip(
        "peft", reason="PEFT is not installed, so that its side is not checked: pip install peft"
    )
    ours = moved(drafter(name, family_of(name)))
    save_adapter(ours, tmp_path / "ours")
    remove_adapter(ours, merge=True)
    theirs = peft.PeftModel.from_pretrained(drafter(name, family_of(name)), tmp_path / "ours").merge_and_unload()
    for parameter, weight in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[parameter], weight, rtol=1e-5, atol=1e-6)

    plain = drafter(name, family_of(name))
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=hidden_layers(plain), init_lora_weights=False)
    wrapped = peft.get_peft_model(plain, config)
    wrapped.save_pretrained(tmp_path / "theirs")
    merged, model = wrapped.merge_and_unload().state_dict(), drafter(name, family_of(name))
    load_adapter(model, tmp_path / "theirs")
    remove_adapter(model, merge=True)
    for parameter, weight in model.state_dict().items():
        torch.testing.assert_close(merged[parameter], weight, rtol=1e-5, atol=1e-6)
