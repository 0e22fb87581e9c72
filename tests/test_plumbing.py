"""Small parts that no reader sees at work: rows requested ahead, files of a server, digests of code, command lines."""

import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from transformers import AutoConfig, PretrainedConfig

from speculators_nb.cli.demo import Stages, commands
from speculators_nb.cli.serving import serve
from speculators_nb.data.packing import collate
from speculators_nb.decode.generate import generate
from speculators_nb.decode.ngram import NgramDrafter
from speculators_nb.distributed.torchrun import is_lost_connection, torchrun_line
from speculators_nb.evaluate.vllm_metrics import MetricsError, counted, read_counters
from speculators_nb.features.extraction import collect
from speculators_nb.features.feature_rows import FeatureError, FeatureRow, FeatureRows, row_problem
from speculators_nb.features.prefetch import PrefetchedRows, follow_order, prefetched, without_states
from speculators_nb.lab.code_digest import code_digest
from speculators_nb.lab.experiment import heldout_setting
from speculators_nb.lab.greedy_replay import greedy_answers, replay
from speculators_nb.models import serving_rules as rules
from speculators_nb.models.attached_verifier import generation_settings, resolve_verifier
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.eagle import EagleSpeculatorConfig
from speculators_nb.models.formats_dflash import check_no_unknown_options
from speculators_nb.models.formats_eagle import check_served_layer
from speculators_nb.models.mtp_native import fuse_experts
from speculators_nb.nn.supervision import shift_by_one
from speculators_nb.serve.vllm_connector import Done, cached_rows, file_for, say_what_is_served, write_whole
from speculators_nb.train.packed_loaders import PackedLoaders
from speculators_nb.train.trainer import SpeculatorTrainer, SpeculatorTrainingArguments

ROOT = Path(__file__).parents[1]

# ---- rows requested ahead


class Squares:
    "i * i, after a moment; without a sample 90."

    def __init__(self):
        self.requested = []

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        if i == 90:
            raise LookupError("no sample 90")
        self.requested.append(i)
        time.sleep(0.002)
        return i * i


ROWS = [list(range(i, i + 4)) for i in range(0, 80, 4)]


def values(rows):
    return [[i * i for i in row] for row in rows]


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_slow_trainer_holds_the_requests_back(ahead):
    source, in_flight = Squares(), []
    data = PrefetchedRows(Subset(source, range(80)), ahead, threads=2)
    loader = DataLoader(data, batch_sampler=ROWS, collate_fn=list)
    data.sampler = loader.batch_sampler
    for step, row in enumerate(loader, 1):
        assert row == values(ROWS)[step - 1]
        for _, futures in data.rows:
            wait(futures)
        in_flight.append(len(source.requested) / 4 - step)
    assert sorted(source.requested) == list(range(80)), "each once"
    assert in_flight == [min(ahead, 20 - step) for step in range(1, 21)]


def test_rows_of_another_epoch_of_a_resumed_run_and_with_an_error():
    source = Squares()
    data = PrefetchedRows(source, ahead=2, threads=2)
    data.sampler = ROWS
    assert [data.__getitems__(row) for row in ROWS[15:]] == values(ROWS[15:]) and min(source.requested) == 60
    assert data.__getitems__([5, 1]) == [25, 1]  # a row that nobody expected
    data.sampler = [[1, 2], [90], [3]]
    assert data.__getitems__([1, 2]) == [1, 4]
    with pytest.raises(LookupError, match="no sample 90"):
        data.__getitems__([90])
    with pytest.raises(ValueError, match="both must be 1 or more"):
        PrefetchedRows(source, 0, 1)


class Computed(FeatureRows):
    "Rows of i + 2 tokens, whose states are computed when they are read; row 1 has a token id of 99."

    where, ahead, concurrency, requested = "memory", 2, 2, 0

    def __init__(self, **keywords):
        self.rows = [{"input_ids": torch.full((i + 2,), 99 if i == 1 else i)} for i in range(6)]
        for row in self.rows:
            row["loss_mask"] = torch.ones(len(row["input_ids"]))
        super().__init__([len(row["input_ids"]) for row in self.rows], **keywords)

    def read(self, i):
        self.requested += 1
        ids, mask = self.tokens(i)
        return FeatureRow(ids, mask.bool(), torch.ones(len(ids), 3, 4))


def test_states_that_are_computed_are_requested_ahead():
    source = Computed()
    half = Subset(source, [3, 4, 5])
    bare = without_states(half, 1)
    assert (len(bare["input_ids"]), int(bare["loss_mask"].sum()), source.requested) == (6, 6, 0)
    loader = follow_order(DataLoader(prefetched(half), batch_sampler=[[0, 2], [1]], collate_fn=list))
    assert [[len(s["input_ids"]) for s in row] for row in loader] == [[5, 7], [6]] and source.requested == 3
    stored = [bare]  # what is not computed stays as it is
    assert prefetched(stored) is stored and without_states(stored, 0) is bare


def test_a_bad_row_is_skipped_or_an_error():
    source = Computed(layer_ids=[4, 9], on_bad="skip")
    source.shape, source.vocab_size = (3, 4), 50
    assert [int(source[i]["loss_mask"].sum()) for i in range(3)] == [2, 0, 4] and source.bad.tolist()[:3] == [0, 1, 0]
    source.on_bad = "raise"
    with pytest.raises(FeatureError, match="row 1 of memory: token id 99, the verifier has 50"):
        source[1]
    row = FeatureRow(torch.arange(3), torch.ones(3, dtype=torch.bool), torch.ones(3, 4, 8))
    assert row_problem(row, (4, 8), 50) is None and row_problem(row, (4, 6), 50) and row_problem(row, (4, 8), 2)
    assert row_problem(row, None, None) is None  # nothing is known of the others


# ---- files that a server of vLLM writes


def states(folder, event=None):
    "Write under a lock as the engine does."
    path = folder / "request.safetensors"
    fd = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    place = torch.arange(12.0).view(3, 1, 4, 1).expand(3, 2, 4, 1)
    rows = cached_rows(place, [2, 0], 6)
    assert rows[:, 0, 0].tolist() == [8, 9, 10, 11, 0, 1] and rows.data_ptr() != place.data_ptr()
    write_whole({"hidden_states": rows, "token_ids": torch.arange(6)}, event or Done(), str(path), fd)
    with open(f"{path}.lock") as f:
        fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return path, rows


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    class Full(Done):
        def synchronize(self):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        states(tmp_path, Full())
    assert [p.name for p in tmp_path.iterdir()] == ["request.safetensors.lock"]
    path, rows = states(tmp_path)
    assert torch.equal(load_file(path)["hidden_states"], rows)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(Path(f"{path}.lock").stat().st_mode) & 0o666
    assert torch.equal(collect(path, range(6)), rows)
    with open(f"{path}.lock", "w") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(FeatureError, match="still locked"):
            collect(path, range(6), timeout=0.05)


def test_what_a_server_says_of_itself_and_names_no_file_elsewhere(tmp_path):
    say_what_is_served(str(tmp_path), "data/tiny-verifier", [2, 3, 4, 6], "float32")
    assert json.loads((tmp_path / "extraction.json").read_text())["layer_ids"] == [2, 3, 4, 6]
    assert file_for("/hidden", "cmpl-../../etc/x-0") == "/hidden/cmpl-.._.._etc_x-0.safetensors"


def test_counters_of_a_server():
    head = "vllm:spec_decode_num"
    text = f"""{head}_drafts_total{{engine="0"}} 10.0\n{head}_drafts_total{{engine="1"}} 5.0
{head}_accepted_tokens_per_pos_total{{engine="0",position="1"}} 4.0
{head}_accepted_tokens_per_pos_total{{engine="0",position="0"}} 8.0"""
    now = read_counters(text)
    assert (now["drafts"], now["positions"]) == (15, [8, 4]) and counted(now, now)["positions"] == [0, 0]
    with pytest.raises(MetricsError, match="started again"):
        counted(now, read_counters(""))


# ---- training


def sample(n):
    "Features of n tokens: two layers of size 4 beside the last hidden state."
    states = {"hidden_states": torch.randn(n, 8), "verifier_last_hidden_states": torch.randn(n, 4)}
    return {"input_ids": torch.arange(n), "loss_mask": torch.arange(n) >= 2, **states}


@pytest.fixture
def arguments(tmp_path):
    return SpeculatorTrainingArguments(tmp_path, total_seq_len=16, eval_strategy="no", load_best_model_at_end=False)


def test_an_evaluation_has_the_same_rows_every_time(arguments):
    data = [sample(n) for n in (9, 5, 12, 7, 4)]
    loaders = PackedLoaders(nn.Linear(1, 1), arguments, train_dataset=data, eval_dataset=data)
    loaders.shift = shift_by_one
    rows, again = (list(loaders.get_eval_dataloader()) for _ in range(2))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(rows, again))
    assert loaders.n_eval_rows == len(rows)
    assert sum(int((row["document_ids"] >= 0).sum()) for row in rows) == sum(len(s["input_ids"]) - 1 for s in data)


class Plain(nn.Linear):
    "As much of a drafter as a trainer needs before its first step."

    @staticmethod
    def get_trainer_kwargs():
        return {}, {}


def test_ranks_take_the_rows_and_seeds_of_one_process(arguments):
    data = [sample(n) for n in (12, 13, 12, 11, 12)]

    def steps_of(rank, world_size, accumulation):
        one = SpeculatorTrainer(Plain(1, 1), arguments, train_dataset=data)
        one.shift = shift_by_one
        one.args = SimpleNamespace(total_seq_len=12, seed=0, data_seed=None, world_size=world_size)
        one.args.process_index, one.args.gradient_accumulation_steps = rank, accumulation
        one.args.data_ranks, one.args.data_rank, one.args.context_parallel_size = world_size, rank, 1
        one.train_rows = one.rows(data)
        mine = BatchSamplerShard(one.train_rows, world_size, rank)
        batches, found = (collate([data[i] for i in row], 12, shift_by_one) for row in mine), []
        for step in range(2):
            one.state.global_step = step
            taken, _ = one.get_batch_samples(batches, accumulation, torch.device("cpu"))
            found += [(step, b["row_seed"], int(b["loss_mask"].sum())) for b in taken]
        assert [one.epoch_after(step) for step in (1, 2, 3)] == [0.8, 1, 1.8]
        return [row for row in found if row[2]]

    trained = [sorted(sum((steps_of(r, w, 4 // w) for r in range(w)), [])) for w in (1, 2, 4)]
    assert len(trained[0]) == 5 and trained[0] == trained[1] == trained[2]


def test_data_of_which_all_that_is_trained_is_cut_away_is_refused(arguments):
    arguments.total_seq_len = 5
    data = [sample(n) | {"loss_mask": torch.arange(n) >= 8} for n in (12, 13)]
    with pytest.raises(ValueError, match="total_seq_len=5: the rows have up to 13 tokens"):
        PackedLoaders(nn.Linear(1, 1), arguments, train_dataset=data).get_train_dataloader()


@pytest.mark.parametrize(
    "line, typed",
    [
        ("speculators-nb-torchrun --nproc-per-node 2 train f 'my d'", ["/bin/speculators-nb", "train", "f", "my d"]),
        ("torchrun --nproc-per-node 2 run.py", ["run.py"]),
        ("torchrun --nproc-per-node 2 SCRIPT.py", ["-c"]),
    ],
)
def test_the_line_that_starts_ranks(line, typed):
    assert torchrun_line(2, typed) == line


def test_a_rank_that_lost_another_is_not_the_cause():
    assert is_lost_connection(RuntimeError("[../tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"))
    assert not is_lost_connection(ValueError("Connection closed by peer"))
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


# ---- measuring


def made(scale, base=object):
    "A class whose method has this constant."

    class Drafter(base):
        size = 3

        def scaled(self):
            return self.size * scale

    return Drafter


def test_a_digest_of_code_is_that_of_what_it_computes():
    factor = 0.5
    assert code_digest(lambda k: factor**k) == code_digest(lambda k: factor**k)
    assert code_digest(lambda k: 0.5**k) != code_digest(lambda k: 0.6**k)
    assert code_digest(made(2)) == code_digest(made(2)) != code_digest(made(3))
    assert code_digest(made(1, made(2))) != code_digest(made(1, made(3)))
    assert code_digest(made(torch.ones(2))) != code_digest(made(torch.zeros(2)))
    changed, used = made(2), made(2)
    changed.size, used._can_set_experts_implementation_cached_value = 4, False
    assert code_digest(changed) != code_digest(made(2)) == code_digest(used)
    for one, other in (({"a", "b"}, {"a", "c"}), (torch.float32, torch.bfloat16), (F.relu, F.gelu), (b"a", b"b")):
        first, second = made(2), made(2)
        first.size, second.size = one, other
        assert code_digest(first) != code_digest(second) and code_digest(made(one)) != code_digest(made(other))
    first, second = made(2), made(2)  # from Python 3.14 on x[1:] has a constant
    first.size, second.size = slice(1, None), slice(2, None)
    assert code_digest(first) != code_digest(second)


def test_a_digest_of_code_is_the_same_in_another_process():
    "The order of a set differs between processes."
    code = "lambda name: name in {'gate', 'up', 'down', 'query', 'key', 'value', 'output', 'norm'}"
    line = f"from speculators_nb.lab.code_digest import code_digest; print(code_digest({code}))"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", line], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == code_digest(eval(code))


def test_a_replay_takes_the_steps_of_decoding():
    shipped = dict(verifier=ROOT / "data/tiny-verifier", dtype=torch.float64)
    drafters = {
        "eagle3": SpeculatorModel.from_pretrained(ROOT / "data/tiny-drafter", **shipped).drafter(),
        "n-gram": NgramDrafter(),
    }
    setting = heldout_setting(drafters, 2)
    setting.verifier.model.double()
    for answer in greedy_answers(setting.verifier, setting.prompts, 30, setting.eos_token_ids):
        for drafter in drafters.values():
            for k in (1, 4):
                decoded = generate(
                    setting.verifier,
                    drafter,
                    answer.prompt,
                    k=k,
                    max_new_tokens=30,
                    eos_token_ids=setting.eos_token_ids,
                )
                replayed = replay(drafter, answer, k)
                assert (replayed.tokens, replayed.steps) == (decoded.tokens, decoded.steps)
                assert replayed.finish_reason == decoded.finish_reason


# ---- formats, serving rules, arguments of drafters


class Toy(SpeculatorModel):
    config_class = SimpleNamespace(width=2, bias=False)
    config_arguments = ("bias",)
    training_defaults = {"bias": True, "steps": 4}

    def forward(self, input_ids, *, steps=3, loss_config="kl_div", dtype=None): ...


def test_defaults_of_a_drafters_arguments():
    "In this order: its training defaults, its config, the signature of its forward pass."
    assert Toy.training_arguments()["bias"] is True and Toy.training_arguments()["steps"] == 4
    assert Toy.get_trainer_kwargs(learning_rate=1e-4)[0] == dict(steps=4, loss_config={"kl_div": 1.0})
    assert Toy.get_trainer_kwargs(steps=2, loss_fn="ce")[0] == dict(steps=2, loss_config={"ce": 1.0})


def test_rules_of_serving_name_what_they_find():
    raw = {rules.LAYER: {"model_type": "mamba", "hidden_act": "relu"}, "layers": [2, 9]}
    each = [rules.known_layer_family, rules.silu_only, rules.layers_returned("layers"), rules.written("depth", why="x")]
    found = [sentence for rule in each for sentence in rule(raw, PretrainedConfig(num_hidden_layers=4))]
    assert len(found) == 4 and list(rules.silu_only({})) == []
    for ids, family, wrong in (([0, 2], "deepseek_v3", 1), ([1, 2], "deepseek_v3", 0), ([0, 2], "llama", 0)):
        verifier = AutoConfig.for_model(family, num_hidden_layers=4)
        assert len(list(rules.layers_returned("layers")({"layers": ids}, verifier))) == wrong
    rope = dict(rope_type="longrope", original_max_position_embeddings=4096)
    nested = dict(sliding_attention=rope, full_attention=rope)
    yarn = dict(rope_type="yarn", original_max_position_embeddings=4096)
    short, ratio = yarn | dict(factor=4.0), yarn | dict(factor=None)
    layers = [dict(rope_parameters=given) for given in (rope, nested, short, ratio)]
    layers += [dict(rope_parameters=short, max_position_embeddings=n) for n in (16384, 32768)]
    each = rules.rope_as_trained, rules.rope_of_some_requests
    said = [tuple(len(list(rule({rules.LAYER: layer}))) for rule in each) for layer in layers]
    assert said == [(0, 1), (1, 0), (0, 0), (1, 0), (0, 0), (0, 1)]


def test_no_server_returns_what_enters_layer_0_of_a_deepseek_verifier(tmp_path):
    AutoConfig.for_model("deepseek_v3", num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"aux_layer_ids=\[0, 2\]: vLLM fails at .*'deepseek_v3'; give layers from 1"):
        serve(str(tmp_path), hidden_states=str(tmp_path / "states"), aux_layer_ids=[0, 2])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: fuse_experts({"mlp.experts.1.gate_proj.weight": torch.ones(3, 4)}), "lacks mlp.experts.0.gate_proj"),
        (lambda: generation_settings(None, dict(max_tokens=4)), "generate got max_tokens: not a field"),
        (lambda: generation_settings(None, dict(num_beams=4)), "num_beams=4: speculative decoding here knows"),
        (lambda: resolve_verifier(7), "give a folder, a hub id or a PreTrainedModel"),
        (
            lambda: check_served_layer(EagleSpeculatorConfig(layernorms=True, fusion_bias=True)),
            "layernorms and fusion_bias=True",
        ),
        (
            lambda: check_no_unknown_options(SimpleNamespace(name="x", config_value=lambda *a, **k: 2.0, folder=ROOT)),
            "is 2.0",
        ),
    ],
    ids=["experts", "no field", "beams", "no verifier", "two kinds of norm", "option"],
)
def test_what_other_projects_have_and_we_do_not(call, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        call()


def test_the_demo_notes_its_stages_and_how_it_is_made_again(tmp_path):
    for _ in range(2):  # two calls on a folder
        stages = Stages(2, tmp_path / "seconds.json")
        stages.begin("answers", "the verifier answers")
        stages.begin("train", "training a drafter")
        stages.end()
    assert [*json.loads((tmp_path / "seconds.json").read_text())] == ["answers", "train"]
    given = dict(heldout="data/corpus/heldout.jsonl", algorithm="dflash", k=4, n_prompts=None)
    typed = commands("demo", given, Path("output/demo"), given["heldout"], served=True)
    assert typed[0] == "speculators-nb demo --algorithm dflash" and len(typed) == 3
    assert len(commands("demo", given, Path("my demo"), given["heldout"], served=False)) == 2
