"""The trainer's promises, on a toy that keeps the training contract and nothing else: token-weighted accumulation,
still evaluation, whole checkpoints, exact resume."""

import gc
import json
import os
import shutil
import weakref
from contextlib import nullcontext
from itertools import pairwise

import pandas as pd
import pytest
import torch
from on_device import CUDA, PretendCuda, on_cuda
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Subset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainerState

import speculators_nb.train.trainer as trainer_module
from speculators_nb.features.feature_rows import sample_of
from speculators_nb.features.in_process import states_of
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.nn.compiled import to_device
from speculators_nb.nn.layers import draft_layer_config
from speculators_nb.nn.supervision import shift_by_one
from speculators_nb.train.checkpoint import checkpoint_problem, last_checkpoint, replaced_drafter, surplus_checkpoints
from speculators_nb.train.live_view import evaluation_table, header_line, row_line
from speculators_nb.train.packed_loaders import lengths_of
from speculators_nb.train.trainer import (
    MetricSums,
    SpeculatorTrainer,
    SpeculatorTrainingArguments,
    log_table,
    train,
)
from speculators_nb.verifier.tapped_model import Verifier

HIDDEN, VOCAB = 8, 16


class Toy(nn.Module):
    "Predicts the next token from the features; `noise` is its random choice, made anew in every forward."

    shift = staticmethod(shift_by_one)

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(2 * HIDDEN, 32), nn.RMSNorm(32), nn.Linear(32, VOCAB, bias=False)

    @staticmethod
    def get_trainer_kwargs(noise=0.0):
        return {"noise": noise}, {"noise": noise}

    def forward(
        self, input_ids, hidden_states, verifier_last_hidden_states, loss_mask, position_ids, document_ids, noise=0.0
    ):
        x = hidden_states + noise * torch.randn_like(hidden_states)
        logits = self.head(self.norm(self.fc(x)))
        target = verifier_last_hidden_states[..., 0].long()
        n = loss_mask.sum()
        loss = (
            nn.functional.cross_entropy(logits.float()[0], target[0], reduction="none") * loss_mask[0]
        ).sum() / n.clamp_min(1)
        right = ((logits.argmax(-1) == target) & loss_mask).sum()
        return None, loss, {"acc_sum": right.float(), "acc_total": n.float()}


def samples(n=12, seed=0, masked=0.3):
    g = torch.Generator().manual_seed(seed)
    w, out = torch.randn(2 * HIDDEN, VOCAB, generator=torch.Generator().manual_seed(99)), []
    for i in range(n):
        length = int(torch.randint(6, 20, (), generator=g))
        aux = torch.randn(length + 1, 2 * HIDDEN, generator=g)
        last = torch.zeros(length, HIDDEN)
        last[1:, 0] = (aux[: length - 1] @ w).argmax(-1).float()
        out.append(
            {
                "input_ids": torch.randint(0, VOCAB, (length,), generator=g),
                "hidden_states": aux[:length],
                "verifier_last_hidden_states": last,
                "loss_mask": torch.rand(length, generator=g) > masked * (i % 3),
            }
        )
    return out


def arguments(folder, **kwargs):
    base = dict(total_seq_len=32, learning_rate=1e-2, num_train_epochs=2, logging_steps=1, disable_tqdm=True, seed=3)
    return SpeculatorTrainingArguments(str(folder), **base | kwargs)


def toy():
    torch.manual_seed(0)
    return Toy()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Stop(TrainerCallback):
    "Break off at a step, as a killed process would."

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


# --- accumulation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulated_micro_batches_equal_one_big_batch(tmp_path, optimizer):
    "Two rows of 32 with accumulation 2 hold the same samples as one row of 64; their loss-token counts differ."
    data = samples(4)
    runs = {}
    for name, kwargs in {
        "one row": dict(total_seq_len=64),
        "two rows": dict(total_seq_len=32, gradient_accumulation_steps=2),
    }.items():
        trainer = SpeculatorTrainer(
            toy(),
            arguments(
                tmp_path / name,
                optimizer=optimizer,
                eval_strategy="no",
                load_best_model_at_end=False,
                save_strategy="no",
                max_steps=4,
                **kwargs,
            ),
            data,
        )
        assert len(trainer.rows(data)) == {"one row": 1, "two rows": 2}[name]
        trainer.train()
        runs[name] = trainer
    counts = {int(sum(data[i]["loss_mask"][1:].sum() for i in row)) for row in runs["two rows"].rows(data)}
    assert len(counts) == 2, "the micro-batches must differ in tokens, or the test shows nothing"
    a, b = (weights(r.model) for r in runs.values())
    assert (a - b).abs().max() < (1e-6 if optimizer == "adamw" else 2e-4)  # Muon rounds its step to bfloat16
    pd.testing.assert_series_equal(
        *(log_table(r)["loss"] for r in runs.values()), rtol=1e-5 if optimizer == "adamw" else 1e-3
    )
    assert log_table(runs["one row"])["acc"].tolist() == log_table(runs["two rows"])["acc"].tolist()


def test_loss_scaling_is_the_token_weighted_mean(tmp_path):
    trainer = SpeculatorTrainer(toy(), arguments(tmp_path, gradient_accumulation_steps=3), samples(), samples(3, 1))
    batches, n = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 3, torch.device("cpu"))
    counts = [int(b["loss_mask"].sum()) for b in batches]
    assert n == sum(counts)
    got = sum(trainer.compute_loss(trainer.model, b, num_items_in_batch=n) for b in batches)
    want = sum(trainer.model(**b)[1] * c for b, c in zip(batches, counts)) / sum(counts)
    assert torch.allclose(got, want, rtol=1e-6)


class HostToy(Toy):
    "Reads its loss mask on the host."

    read_on_host = ("loss_mask",)

    def forward(self, *, loss_mask, **batch):
        assert loss_mask.device.type == "cpu" and batch["input_ids"].device.type == "cuda"
        return super().forward(loss_mask=to_device(loss_mask, batch["input_ids"].device), **batch)


@pytest.mark.parametrize("kind", [Toy, HostToy])
def test_between_two_logs_the_host_does_not_wait_for_the_device(kind, tmp_path, monkeypatch):
    "Batches come on the host, loss tokens are counted there, and copies are not waited for."
    trainer = SpeculatorTrainer(kind(), arguments(tmp_path, gradient_accumulation_steps=2), samples(), samples(3, 1))
    rows = iter(trainer.get_train_dataloader())
    monkeypatch.setattr(SpeculatorTrainingArguments, "device", property(lambda self: CUDA))
    monkeypatch.setattr(trainer_module, "kept_rng", lambda device, seed=None: nullcontext())
    on_cuda(trainer.model)
    with PretendCuda() as device:
        batches, n = trainer.get_batch_samples(rows, 2, CUDA)
        for batch in batches:
            inputs = trainer._prepare_inputs(batch)
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=n)
        trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
        assert loss.is_cuda
    assert not device.waits and not device.copies, (device.waits, device.copies)


def test_a_step_without_loss_tokens_changes_nothing(tmp_path):
    data = samples(4)
    for s in data[1:]:
        s["loss_mask"][:] = False
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(weights(model))

    trainer = SpeculatorTrainer(
        toy(),
        arguments(
            tmp_path,
            total_seq_len=20,
            eval_strategy="no",
            load_best_model_at_end=False,
            weight_decay=0.1,
            save_strategy="no",
            num_train_epochs=3,
            lr_scheduler_type="constant",
        ),
        data,
        callbacks=[Watch()],
    )
    trainer.train()
    moved = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert 0 < sum(moved) < len(moved), moved  # some rows hold sample 0, the others nothing to learn from
    assert torch.isfinite(weights(trainer.model)).all()
    assert log_table(trainer)["loss"].notna().all()


def test_nothing_to_learn_is_said_before_training(tmp_path):
    data = samples(3)
    for s in data:
        s["loss_mask"][:] = False
    with pytest.raises(ValueError, match="no position of the 3 training samples has loss_mask=True"):
        train(toy(), data, output_dir=str(tmp_path), disable_tqdm=True)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        SpeculatorTrainer(toy(), arguments(tmp_path), samples(), data).evaluate()
    with pytest.raises(ValueError, match="dataset is empty"):
        SpeculatorTrainer(toy(), arguments(tmp_path), [], data).train()
    late = samples(1)[0]
    late["loss_mask"] = torch.arange(len(late["loss_mask"])) >= 5
    wrong = r"no position of the 3 evaluation( \(b\))? samples has loss_mask=True, so there is nothing to evaluate"
    for held_out, given, words in (
        (data, {}, wrong),
        ({"a": samples(2), "b": data}, dict(metric_for_best_model="a_loss"), wrong),
        ([late], dict(total_seq_len=3), "all trained tokens of the 1 evaluation samples are beyond it"),
        ([], {}, "dataset is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            train(toy(), samples(), held_out, arguments(tmp_path / "held out", **given))
    assert not (tmp_path / "held out/run.json").exists()  # and not after an epoch


def test_samples_that_are_cut_are_counted_in_every_set(tmp_path, caplog):
    sets = {"a": samples(3, 1), "b": samples(4, 2)}
    train(toy(), samples(), sets, arguments(tmp_path, total_seq_len=5, metric_for_best_model="a_loss"))
    assert [message.split(" rows")[0] for message in caplog.messages if "are longer" in message] == [
        "evaluation (a): 3 of 3",
        "evaluation (b): 3 of 4",
        "training: 12 of 12",
    ]


# --- precision, clipping, schedules -------------------------------------------------------------------------------


def test_bf16_autocast_over_float32_weights(tmp_path):
    trainer = train(toy().bfloat16(), samples(), samples(3, 1), arguments(tmp_path, bf16=True))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert {s.dtype for state in trainer.optimizer.state.values() for s in state.values()} == {torch.float32}
    seen = []
    trainer.model.head.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    trainer.evaluate()
    assert set(seen) == {torch.bfloat16}
    table = log_table(trainer)
    assert table["loss"].iloc[-1] < table["loss"].iloc[0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant_with_warmup"])
def test_schedules_warm_up(tmp_path, schedule):
    trainer = SpeculatorTrainer(
        toy(),
        arguments(
            tmp_path,
            lr_scheduler_type=schedule,
            warmup_steps=4,
            max_steps=12,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
            max_grad_norm=0.01,
            optimizer="muon",
            muon_learning_rate=3e-3,
        ),
        samples(),
    )
    trainer.train()
    rates = log_table(trainer)["learning_rate"].tolist()
    assert rates[:5] == pytest.approx([0, 0.25e-2, 0.5e-2, 0.75e-2, 1e-2])
    assert (rates[-1] == pytest.approx(1e-2)) == (schedule == "constant_with_warmup")
    groups = {g["kind"]: g["lr"] for g in trainer.optimizer.param_groups}
    assert groups["muon"] == pytest.approx(0.3 * groups["adamw"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "schedule, given, wrong",
    [
        ("cosine_with_min_lr", dict(min_lr=1e-3), "takes no 'patience'"),
        ("reduce_lr_on_plateau", dict(patience=0, threshold=9.0), "ReduceLROnPlateau takes no 'min_lrs'"),
        ("greedy", dict(patience=0, threshold=9.0, factor=0.5), "GreedyLR takes no 'min_lrs'"),
    ],
)
def test_schedules_take_their_own_arguments(tmp_path, optimizer, schedule, given, wrong):
    how = dict(lr_scheduler_type=schedule, lr_scheduler_kwargs=given, optimizer=optimizer, warmup_steps=0)
    trainer = train(toy(), samples(), samples(3, 1), arguments(tmp_path, **how))
    rates = log_table(trainer)["learning_rate"].dropna()
    assert rates.nunique() > 1 and rates.min() >= 1e-3
    key = "patience" if schedule == "cosine_with_min_lr" else "min_lrs"
    with pytest.raises(ValueError, match=wrong):
        arguments(tmp_path, **how | dict(lr_scheduler_kwargs={key: 1}))


def test_gradients_are_clipped(tmp_path):
    class Norm(TrainerCallback):
        norms = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())

    SpeculatorTrainer(
        toy(), arguments(tmp_path, max_grad_norm=0.01, max_steps=3), samples(), samples(3, 1), callbacks=[Norm()]
    ).train()
    assert Norm.norms == pytest.approx([0.01] * 3, rel=1e-3)


# --- evaluation ---------------------------------------------------------------------------------------------------


def test_evaluation_sums_first_and_divides_once(tmp_path):
    data = samples(9, 1)
    trainer = SpeculatorTrainer(toy(), arguments(tmp_path), samples(), data)
    got, one_row = trainer.evaluate(), []
    for s in data:  # a reference without packing: sample by sample
        shifted = {k: v[None] for k, v in shift_by_one(s).items()}
        _, loss, m = trainer.model(**shifted, document_ids=None)
        one_row.append((loss * m["acc_total"], m["acc_sum"], m["acc_total"]))
    loss, right, n = map(sum, zip(*one_row))
    assert got["eval_loss"] == pytest.approx((loss / n).item(), rel=1e-6)
    assert got["eval_acc"] == int(right) / int(n)


def test_evaluation_holds_still_and_leaves_training_alone(tmp_path):
    data, held = samples(), samples(5, 1)
    runs = [
        SpeculatorTrainer(
            toy(),
            arguments(
                tmp_path / str(i), eval_strategy="steps", eval_steps=every, save_steps=every, save_strategy="steps"
            ),
            data,
            held,
            {"noise": 0.5},
        )
        for i, every in enumerate([2, 4])
    ]
    evaluations = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # whatever training has drawn before
        evaluations.append(runs[0].evaluate()["eval_loss"])
    assert evaluations[0] == evaluations[1]
    for r in runs:
        torch.manual_seed(5)
        r.train()
    a, b = (log_table(r)["loss"] for r in runs)
    assert a.tolist() == b.tolist()  # evaluating twice as often changes nothing in training


def test_several_evaluation_sets(tmp_path):
    trainer = SpeculatorTrainer(toy(), arguments(tmp_path), samples(), {"a": samples(3, 1), "b": samples(4, 2)})
    assert {"eval_a_loss", "eval_b_loss", "eval_a_acc", "eval_b_acc"} <= set(trainer.evaluate())


def test_an_evaluation_set_is_looked_at_once_and_not_kept(tmp_path, monkeypatch):
    "A set of one's own may be large; another one that lies where it was is looked at as well."
    looked = []
    monkeypatch.setattr(SpeculatorTrainer, "_check_loss", lambda self, dataset, *_: looked.append(len(dataset)))
    trainer = SpeculatorTrainer(toy(), arguments(tmp_path), samples(), samples(5, 1))
    alive = []
    for n in (3, 4):
        own = Subset(samples(n, 2), range(n))
        alive.append(weakref.ref(own))
        for _ in range(2):
            trainer.evaluate(own)
    del own
    gc.collect()
    assert alive[0]() is None  # transformers keeps the loader of the last
    for _ in range(2):
        trainer.evaluate()
    assert looked == [3, 4, 5]


def test_metrics_come_in_pairs():
    sums, one = MetricSums(), torch.ones(())
    with pytest.raises(ValueError, match="'acc_sum': a model's metrics come in pairs, acc_sum and acc_total"):
        sums.add({"acc_sum": one})
    with pytest.raises(ValueError, match="metric 'acc'"):
        sums.add({"acc": one})
    sums.add({"a_sum": one, "a_total": 4 * one, "b_sum": one, "b_total": 0 * one})
    sums.add({"a_sum": 2 * one, "a_total": 2 * one, "b_sum": one, "b_total": 0 * one})
    assert sums.rates() == {"a": 0.5} and sums.rates() == {}


# --- best, early stop, log ------------------------------------------------------------------------------------------


def test_best_checkpoint_is_loaded_and_kept(tmp_path):
    trainer = train(
        toy(),
        samples(),
        samples(5, 1),
        arguments(tmp_path, learning_rate=0.3, num_train_epochs=6, lr_scheduler_type="constant"),
    )
    table = log_table(trainer)
    best = table["eval_loss"].dropna()
    assert best.idxmin() == trainer.state.best_global_step != best.index[-1]
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best.idxmin()}")
    assert trainer.evaluate()["eval_loss"] == best.min()
    kept = sorted(p.name for p in tmp_path.glob("checkpoint-*"))
    assert kept == sorted({f"checkpoint-{best.idxmin()}", f"checkpoint-{best.index[-1]}"})
    for step in (best.idxmin(), best.index[-1]):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint


@pytest.mark.parametrize("save_steps, best", [(2, 4), (4, 4), (1, 3)])
def test_the_best_is_one_of_those_that_were_saved(tmp_path, save_steps, best):
    "An evaluation between two checkpoints may be better than both: its weights are gone."
    scores = iter([5.0, 3.0, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0])
    how = dict(eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=save_steps, max_steps=8)
    trainer = train(
        toy(),
        samples(24),
        samples(5, 1),
        arguments(tmp_path, metric_for_best_model="score", greater_is_better=False, **how),
        measure=lambda model: {"score": next(scores)},
    )
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    stored = load_file(tmp_path / f"checkpoint-{best}/model.safetensors")
    assert torch.equal(trainer.model.head.weight, stored["head.weight"])


def test_a_best_that_no_evaluation_has_is_refused_before_the_first_step(tmp_path):
    for held_out, best, names in (
        (samples(3, 1), "accept_0", "acc, loss"),
        ({"a": samples(3, 1)}, None, "a_acc, a_loss"),
    ):
        with pytest.raises(ValueError, match=f"metric_for_best_model='{best or 'loss'}': .*; choose from {names}$"):
            train(toy(), samples(), held_out, arguments(tmp_path, metric_for_best_model=best))
    given = dict(load_best_model_at_end=False, early_stopping_patience=2)
    with pytest.raises(ValueError, match="metric_for_best_model='loss': .*; choose from a_acc, a_loss$"):
        train(toy(), samples(), {"a": samples(3, 1)}, arguments(tmp_path, **given))
    assert not (tmp_path / "run.json").exists()


def test_the_look_for_the_best_metric_leaves_training_alone(tmp_path):
    plain = train(toy(), samples(), samples(3, 1), arguments(tmp_path / "a"), noise=0.5)
    train(toy(), samples(), {"a": samples(3, 1)}, arguments(tmp_path / "b", metric_for_best_model="eval_a_acc"))
    torch.manual_seed(5)
    looked = arguments(tmp_path / "c", metric_for_best_model="acc", greater_is_better=True)
    other = train(toy(), samples(), samples(3, 1), looked, noise=0.5)
    assert log_table(other)["loss"].dropna().tolist() == log_table(plain)["loss"].dropna().tolist()


def test_early_stopping_needs_no_best_checkpoint(tmp_path):
    given = dict(learning_rate=0.3, num_train_epochs=30, early_stopping_patience=2, lr_scheduler_type="constant")
    best = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "best", **given))
    last = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "a", **given, load_best_model_at_end=False))
    assert last.state.global_step == best.state.global_step < last.state.max_steps


def test_early_stopping(tmp_path):
    trainer = train(
        toy(),
        samples(),
        samples(5, 1),
        arguments(
            tmp_path, learning_rate=0.3, num_train_epochs=30, early_stopping_patience=2, lr_scheduler_type="constant"
        ),
    )
    evals = log_table(trainer)["eval_loss"].dropna()
    assert len(evals) < 30 and evals.argmin() == len(evals) - 3


def test_log_table_and_final_folder(tmp_path):
    trainer = train(
        toy(),
        samples(),
        samples(3, 1),
        output_dir=str(tmp_path),
        total_seq_len=32,
        num_train_epochs=1,
        logging_steps=2,
        disable_tqdm=True,
        noise=0.1,
    )
    table = log_table(trainer)
    assert {"epoch", "loss", "grad_norm", "learning_rate", "acc", "eval_loss", "eval_acc"} <= set(table)
    assert table.index.is_monotonic_increasing and table.index.name == "step"
    assert pd.read_csv(tmp_path / "training_log.csv", index_col="step").shape == table.shape
    names = {p.name for p in tmp_path.iterdir()}
    assert {"model.safetensors", "training_args.json", "training_log.csv"} <= names
    assert not [n for n in names if n.endswith((".bin", ".pt", ".pth"))] and ".saving" not in names
    assert json.loads((tmp_path / "training_args.json").read_text())["model"] == {"noise": 0.1}


def test_a_notebook_shows_the_rows_of_a_terminal(tmp_path, monkeypatch, capsys):
    """transformers has a table of its own in a notebook, of all metrics, counted from 0."""
    from transformers.utils.notebook import NotebookProgressCallback

    for module in ("transformers.trainer", "speculators_nb.train.trainer"):  # as in a kernel
        monkeypatch.setattr(f"{module}.DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    run = SpeculatorTrainer(
        toy(), arguments(tmp_path, num_train_epochs=2, disable_tqdm=False), samples(), samples(3, 1)
    )
    run.train()
    rows = evaluation_table(run.state.log_history).to_dict("records")
    said = capsys.readouterr().out
    assert len(rows) == 2 and all(line in said for line in [header_line(rows[0]), *map(row_line, rows)])


# --- checkpoints and resume -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop,accumulate,optimizer", [(5, 1, "adamw"), (8, 1, "muon"), (6, 2, "adamw")])
def test_a_stopped_run_goes_on_to_the_bit(tmp_path, stop, accumulate, optimizer):
    """Stopped in mid-epoch or at the end of one, with random choices in every forward: the same losses and the same
    weights as without the stop."""
    data = samples(16)
    held = samples(4, 1)
    kwargs = dict(
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
        save_total_limit=None,
        num_train_epochs=2,
        gradient_accumulation_steps=accumulate,
        optimizer=optimizer,
    )
    whole = train(toy(), data, held, arguments(tmp_path / "whole", **kwargs), noise=0.3)
    with pytest.raises(KeyboardInterrupt):
        train(toy(), data, held, arguments(tmp_path / "cut", **kwargs), callbacks=[Stop(stop)], noise=0.3)
    torch.manual_seed(1234)  # another process starts from another random state and other weights
    resumed = train(Toy(), data, held, arguments(tmp_path / "cut", **kwargs, resume_from_checkpoint=True), noise=0.3)
    columns = ["epoch", "loss", "learning_rate", "acc", "eval_loss", "eval_acc", "grad_norm"]
    pd.testing.assert_frame_equal(log_table(resumed)[columns], log_table(whole)[columns], check_exact=True)
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_every_row_of_every_epoch_has_its_own_random_numbers(tmp_path):
    "The same sample over and over, and weights that stay: nothing but the noise differs."
    ended = train(toy(), samples(1) * 8, samples(2), arguments(tmp_path, learning_rate=1e-30), noise=0.5)
    losses = log_table(ended)["loss"].dropna()
    assert len(losses) > 5 and losses.is_unique


def test_patience_is_counted_on_after_a_resume(tmp_path):
    kwargs = dict(
        learning_rate=0.3,
        num_train_epochs=30,
        early_stopping_patience=4,
        lr_scheduler_type="constant",
        save_total_limit=None,
    )
    whole = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "whole", **kwargs))
    stop = whole.state.global_step - 2
    with pytest.raises(KeyboardInterrupt):
        train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut", **kwargs), callbacks=[Stop(stop)])
    resumed = train(toy(), samples(), samples(5, 1), arguments(tmp_path / "cut", **kwargs, resume_from_checkpoint=True))
    assert resumed.state.global_step == whole.state.global_step


@pytest.mark.parametrize("where", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_a_killed_save_leaves_no_checkpoint(tmp_path, monkeypatch, where):
    from transformers import trainer_callback

    kwargs = dict(save_strategy="steps", eval_strategy="steps", save_steps=2, eval_steps=2)
    save = torch.save
    to_json = trainer_callback.TrainerState.save_to_json

    def cut(obj, file, *args, **kw):
        if "checkpoint-4" in str(file) and os.path.basename(file) == where:
            with open(file, "wb") as f:
                f.write(b"PK")
            raise KeyboardInterrupt
        return save(obj, file, *args, **kw)

    def cut_json(self, path):
        if "checkpoint-4" in path and where == "trainer_state.json":
            with open(path, "w") as f:
                f.write('{"global_st')
            raise KeyboardInterrupt
        return to_json(self, path)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(torch, "save", cut)
        m.setattr(trainer_callback.TrainerState, "save_to_json", cut_json)
        train(toy(), samples(), samples(4, 1), arguments(tmp_path, **kwargs))
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    resumed = train(toy(), samples(), samples(4, 1), arguments(tmp_path, **kwargs, resume_from_checkpoint=True))
    assert resumed.state.global_step == resumed.state.max_steps and not (tmp_path / ".saving").exists()


def test_a_kill_while_old_checkpoints_are_deleted_tears_none(tmp_path, monkeypatch):
    def cut(folder, *args, **kwargs):
        if list(os.scandir(folder)):
            raise KeyboardInterrupt

    kwargs = dict(
        save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1, save_total_limit=1, max_steps=6
    )
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(shutil, "rmtree", lambda folder, *a, **k: cut(folder) if os.path.isdir(folder) else None)
        train(toy(), samples(), samples(4, 1), arguments(tmp_path, **kwargs))
    assert (tmp_path / ".saving").is_dir()
    assert [checkpoint_problem(c) for c in tmp_path.glob("checkpoint-*")] == [None]


@pytest.mark.parametrize(
    "limit,now,best,removed",
    [
        (2, 5, 3, [1, 2, 4]),
        (2, 5, 1, [2, 3, 4]),
        (1, 5, 3, [1, 2, 4]),
        (1, 5, 5, [1, 2, 3, 4]),
        (None, 5, 1, []),
        (9, 5, 1, []),
        (3, 5, None, [1, 2]),
        (2, 2, 1, [3, 4, 5]),
        (1, 2, 1, [3, 4, 5]),
        (4, 2, None, [3]),
    ],
)  # now=2: 3 to 5 are an earlier run's
def test_which_checkpoints_go(tmp_path, limit, now, best, removed):
    folders = {step: str(tmp_path / f"checkpoint-{step}") for step in range(1, 6)}
    for folder in folders.values():
        os.mkdir(folder)
    state = TrainerState(global_step=now, best_model_checkpoint=folders.get(best))
    assert surplus_checkpoints(tmp_path, state, limit) == [folders[step] for step in removed]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(toy(), samples(), samples(4, 1), arguments(folder, num_train_epochs=2))
    return last_checkpoint(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"])
@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_torn_checkpoints_are_passed_over(checkpoint, tmp_path, file, damage, caplog):
    older, torn = tmp_path / "checkpoint-1", tmp_path / "checkpoint-9"
    shutil.copytree(checkpoint, older)
    shutil.copytree(checkpoint, torn)
    assert checkpoint_problem(torn) is None
    if damage == "missing":
        (torn / file).unlink()
    else:
        (torn / file).write_bytes((torn / file).read_bytes()[:-7])
    assert checkpoint_problem(torn)
    assert last_checkpoint(tmp_path) == str(older)
    with pytest.raises(ValueError, match="cannot resume from"):
        train(toy(), samples(), samples(4, 1), arguments(tmp_path / "new", resume_from_checkpoint=str(torn)))


def test_resume_without_checkpoint_starts_anew(tmp_path):
    trainer = train(
        toy(), samples(), samples(4, 1), arguments(tmp_path, num_train_epochs=1, resume_from_checkpoint=True)
    )
    assert trainer.state.global_step == len(trainer.train_rows)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs,message",
    [
        (dict(optim="adafactor"), "optim='adafactor' has no effect here: optimizer decides"),
        (dict(per_device_train_batch_size=4), "total_seq_len decides"),
        (dict(logging_nan_inf_filter=True), "logging_nan_inf_filter=True has no effect"),
        (dict(optimizer="sgd"), "optimizer=.sgd.: is not known; choose adamw or muon"),
        (dict(total_seq_len=1), "total_seq_len=1"),
        (dict(early_stopping_patience=1, eval_strategy="no"), "needs evaluations"),
        (dict(torch_compile=True), "torch_compile=True: compiling takes minutes on a CPU"),
        (dict(torch_compile_mode="default"), "torch_compile_mode='default': compiling .*; leave it out"),
        (dict(ignore_data_skip=True), "ignore_data_skip=True is not supported: .* would be trained again"),
        (dict(accelerator_config=dict(split_batches=True)), "accelerator_config: split_batches=True: .* leave it out"),
        (dict(accelerator_config=dict(dispatch_batches=True)), "accelerator_config: dispatch_batches=True: .*row"),
    ],
)
def test_arguments_without_meaning_are_refused(tmp_path, monkeypatch, kwargs, message):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        SpeculatorTrainingArguments(str(tmp_path), **kwargs)


def test_a_compiled_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model is compiled .*: give the model itself, and torch_compile=True"):
        train(torch.compile(toy(), backend="eager"), samples(), samples(3, 1), arguments(tmp_path))


def test_unknown_names_and_double_names(tmp_path):
    with pytest.raises(ValueError, match="nois=1: neither Toy nor the trainer takes this name. Did you mean noise"):
        train(toy(), samples(), output_dir=str(tmp_path), nois=1)
    with pytest.raises(ValueError, match="learning_rate: given by name although args is given"):
        train(toy(), samples(), args=arguments(tmp_path), learning_rate=1)


def test_missing_logger_says_so(tmp_path):
    with pytest.raises(
        ValueError, match="report_to='neptune': this logger is not installed; pip install neptune. Installed:"
    ):
        arguments(tmp_path, report_to="neptune")


def test_lengths_are_not_read_where_they_are_known():
    class Known(list):
        lengths = [7, 8, 9]

    assert lengths_of(Known([None] * 3)) == [7, 8, 9]
    assert lengths_of(torch.utils.data.Subset(Known([None] * 3), [2, 0])) == [9, 7]
    assert lengths_of(samples(3)) == [len(s["input_ids"]) for s in samples(3)]


# --- a real drafter ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """A function that makes a drafter, EAGLE-3 by default, for a tiny random verifier, and samples of that verifier's
    states in bfloat16."""
    folder = tmp_path_factory.mktemp("verifier")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    verifier, g = Verifier.from_pretrained(str(folder)), torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (int(n),), generator=g) for n in torch.randint(10, 24, (14,), generator=g)]
    data = [sample_of(r, torch.arange(len(r)) > 3, s) for r, s in zip(rows, states_of(verifier, rows))]

    def make(seed=0, kind="eagle3", **kwargs):
        torch.manual_seed(seed)
        return SpeculatorModel.registered_class(kind).from_training_args(
            draft_layer_config(config), verifier_name_or_path=str(folder), **kwargs
        )

    return make, data[:10], data[10:]


def test_a_drafter_learns_and_its_checkpoints_load(drafter, tmp_path):
    make, data, held = drafter
    model = make()
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    how = arguments(tmp_path, num_train_epochs=6, total_seq_len=64, save_dtype="bfloat16")
    trainer = train(model, data, held, how, ttt_steps=2)
    after = dict(trainer.model.named_parameters())
    assert frozen and all(torch.equal(after[n], p) for n, p in frozen.items())
    table = log_table(trainer)
    assert table["loss"].iloc[-1] < table["loss"].iloc[0]
    assert {"full_acc_0", "full_acc_1", "loss_0", "eval_accept_0"} <= set(table) and "full_acc_2" not in table
    best = SpeculatorModel.from_pretrained(trainer.state.best_model_checkpoint)
    for name, w in trainer.model.state_dict().items():
        assert torch.equal(best.state_dict()[name], w), name
    final = SpeculatorModel.from_pretrained(tmp_path)
    assert final.dtype == torch.bfloat16 and best.dtype == torch.float32
    assert torch.equal(final.fc.weight, trainer.model.fc.weight.bfloat16())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "use_cache" not in config


def test_a_stopped_drafter_goes_on_to_the_bit(drafter, tmp_path):
    "P-EAGLE, which draws rollouts and has gradients by rows."
    make, data, held = drafter
    kind = dict(kind="peagle", mask_token_id=63, num_depths=4)
    kwargs = dict(
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=4,
        eval_steps=4,
        num_train_epochs=2,
        optimizer="muon",
        bf16=True,
    )
    whole = train(make(**kind), data, held, arguments(tmp_path / "whole", **kwargs), max_anchors=8)
    with pytest.raises(KeyboardInterrupt):
        train(make(**kind), data, held, arguments(tmp_path / "cut", **kwargs), callbacks=[Stop(5)], max_anchors=8)
    again = arguments(tmp_path / "cut", **kwargs, resume_from_checkpoint=True)
    resumed = train(make(seed=1, **kind), data, held, again, max_anchors=8)
    pd.testing.assert_frame_equal(log_table(resumed), log_table(whole), check_exact=True)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters()))
    assert not torch.equal(whole.model.embed_tokens.weight, make(**kind).embed_tokens.weight)


def test_a_drafters_accumulated_rows_equal_one_row(drafter, tmp_path):
    """Every document has more loss tokens than TTT steps, so all steps have the same counts and the equality is exact
    up to rounding, which Muon's bfloat16 would magnify."""
    make, data, _ = drafter
    common = dict(
        optimizer="adamw",
        eval_strategy="no",
        load_best_model_at_end=False,
        save_strategy="no",
        max_steps=3,
        max_grad_norm=0,
        lr_scheduler_type="constant",
    )
    one = train(make(), data, args=arguments(tmp_path / "1", total_seq_len=256, **common))
    rows = len(SpeculatorTrainer(make(), arguments(tmp_path / "r", total_seq_len=48, **common), data).rows(data))
    many = train(
        make(), data, args=arguments(tmp_path / "n", total_seq_len=48, gradient_accumulation_steps=rows, **common)
    )
    assert rows > 2 and len(one.train_rows) == 1
    losses = [log_table(t)["loss"].tolist() for t in (one, many)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_misspelt_training_argument_is_refused(drafter, tmp_path):
    make, data, _ = drafter
    with pytest.raises(ValueError, match="ttt_step=3.*Did you mean ttt_steps"):
        train(make(), data, output_dir=str(tmp_path), ttt_step=3)
    with pytest.raises(ValueError, match="lean=False"):
        train(make(), data, output_dir=str(tmp_path), lean=False)
    assert train(
        make(),
        data,
        output_dir=str(tmp_path),
        max_steps=1,
        disable_tqdm=True,
        total_seq_len=64,
        cross_document_targets=True,
    ).train_kwargs["cross_document_targets"]


def test_weights_that_were_never_loaded_are_named(drafter, tmp_path):
    make, data, _ = drafter
    empty = type(make())(make().config)
    with pytest.raises(ValueError, match="not loaded yet: .*load_verifier_weights"):
        train(empty, data, output_dir=str(tmp_path), disable_tqdm=True)


def test_a_drafter_in_shards_leaves_no_index(tmp_path):
    "A loader would look for the old shards."
    shard = "model-00001-of-00002.safetensors"
    for name in ("config.json", "model.safetensors.index.json", shard, "training_log.csv"):
        (tmp_path / name).write_text("old")
    with replaced_drafter(tmp_path) as staging:
        staging.mkdir()
        for name in ("config.json", "model.safetensors"):
            (staging / name).write_text("new")
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert kept == {"config.json": "new", "model.safetensors": "new", "training_log.csv": "old"}
