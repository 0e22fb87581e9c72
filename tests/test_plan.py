"""What a recipe needs: the plan beside what a run writes, the verifiers of the shipped recipes, what does not fit."""

import csv
import json
import re
import shutil
from pathlib import Path
from statistics import median

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from typer.testing import CliRunner

from speculators_nb.cli.main import app
from speculators_nb.cli.run import stages_of
from speculators_nb.core.options import duration
from speculators_nb.data.chat_encoding import save_prepared
from speculators_nb.evaluate.cost import count_flops
from speculators_nb.lab.experiment import settings
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.plan import requirements as planning
from speculators_nb.plan.disk import feature_bytes
from speculators_nb.plan.requirements import GB, check_step_memory, shorter_row, training_step
from speculators_nb.plan.sizes import (
    cache_bytes,
    drafter_sizes,
    empty_drafter,
    forward_flops,
    muon_flops,
    verifier_sizes,
)
from speculators_nb.plan.step_memory import LiveMemory, StepCost, keep_gradients, measured_step
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.identity import VerifierInfo

ROOT = Path(__file__).parents[1]
TINY = ROOT / "data/tiny-verifier"
HEADS = dict(num_attention_heads=32, head_dim=128, vocab_size=151936, tie_word_embeddings=False)
CONFIGS = {
    "qwen3-8b": Qwen3Config(
        hidden_size=4096, num_key_value_heads=8, intermediate_size=12288, num_hidden_layers=36, **HEADS
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        hidden_size=2048, num_key_value_heads=4, num_hidden_layers=48, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, **HEADS,
    ),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
}  # fmt: skip


def run(*words):
    found = CliRunner().invoke(app, [str(word) for word in words])
    return found.exit_code, found.output


@pytest.fixture
def quick(monkeypatch):
    "A step that is not computed, not even without memory."

    def step(algorithm, layer, rows, depth, length, *_, **__):
        return StepCost(held=10e9 + length * 5e6, flops=length * 6e9)

    monkeypatch.setattr(planning, "predicted_step", step)


@pytest.fixture
def config_of(tmp_path):
    def write(name):
        CONFIGS[name].save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("recipe", "disk", "weights"),
    [("qwen3-8b", 820, 16.4), ("qwen3-30b-a3b", 820, 61.1), ("gpt-oss-20b", 1153, 41.8)],
)
def test_a_shipped_recipe_is_planned_from_config_json_alone(quick, config_of, recipe, disk, weights):
    code, text = run(
        "plan", ROOT / f"data/recipes/{recipe}.yaml", "--verifier", config_of(recipe), "--memory", 80, "--disk", 2000
    )
    assert code == 0, text
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["data"].startswith("50,000 rows of 1,000 tokens")
    assert float(lines["features"].split()[0].replace(",", "")) == pytest.approx(disk, rel=0.01)
    assert f"weights of {weights} GB" in text


def test_what_does_not_fit_names_the_option(quick, config_of):
    recipe = ROOT / "data/recipes/gpt-oss-20b.yaml"
    code, text = run("plan", recipe, "--verifier", config_of("gpt-oss-20b"), "--memory", 24, "--disk", 700)
    assert code == 1
    assert "features do not fit: 1.15e+03 GB, 700 GB are free; write dtype: float8_e4m3fn" in text
    assert "the training step does not fit" in text and "total_seq_len: " in text
    assert "--tensor-parallel-size 2" in text


QWEN = [ROOT / "data/recipes/qwen3-8b.yaml", "--disk", 2000, "--verifier"]


def requirements_of(recipe, verifier, memory, devices):
    sections = {stage.name: stage.values for stage in stages_of(recipe)[0]}
    return planning.requirements(sections, verifier, machine=planning.Machine(devices, memory), disk=2000 * GB)


def test_one_device_that_holds_verifier_or_step_takes_turns(quick, config_of):
    "Fields of the lines: 16.4 GB of verifier and, by `quick`, some 18 GB of step."
    qwen = config_of("qwen3-8b")
    code, text = run("plan", *QWEN, qwen, "--memory", 24, "--mfu", 0.2)
    assert code == 1 and "the training step does not fit" in text and "in turn" not in text
    code, text = run("plan", *QWEN, qwen, "--memory", 60)
    assert code == 0 and "do not fit a device of 60 GB together: stop the server before training" in text
    assert "online    verifier and step do not fit one device of 60 GB" in text
    assert "is no H100: write --tflops and --bandwidth of yours" in text, "its rates are not known"
    given = ("--tflops", 362, "--bandwidth", 0.86)
    assert "is no H100" not in run("plan", *QWEN, qwen, "--memory", 60, *given)[1]
    code, text = run("plan", *QWEN, qwen, "--memory", 80, "--devices", 2)
    assert "fit a device of 80 GB" in text and "servers more would keep 2 devices fed" in text


def test_the_stages_stand_on_one_timeline(quick, config_of):
    "50,000 rows of 1,000 tokens: each stage by itself, their sum, and what online training takes in place of files."
    found = requirements_of(QWEN[0], config_of("qwen3-8b"), 80 * GB, 1)
    read, trained = found.machine.seconds(found.read_flops, 1), 3 * 50e6 / found.trained
    assert found.stages == pytest.approx(dict(answers=50e6 / found.answers.rate, features=read, training=trained))
    lines = dict(line.split(maxsplit=1) for line in planning.requirements_text(found).splitlines())
    assert lines["timeline"].endswith(f": {duration(sum(found.stages.values()))} on one device")
    assert f"{duration(3 * read + trained)} in place of {duration(read + trained)}" in lines["online"]
    several = requirements_of(QWEN[0], config_of("qwen3-8b"), 80 * GB, 4).stages
    assert several == pytest.approx({name: seconds / 4 for name, seconds in found.stages.items()})


def test_the_answers_are_part_of_the_plan(quick, config_of):
    """128 at once by the recipe: 16.4 GB of weights and half of 128 caches of 147 kB a token, at 3 TB/s, make
    14,900 tokens a second; fewer caches fit a smaller device."""
    lines = {}
    for memory in (80, 24):
        text = run("plan", *QWEN, config_of("qwen3-8b"), "--memory", memory)[1]
        (lines[memory],) = [line for line in text.splitlines() if line.startswith("answers")]
    assert lines[80].startswith("answers   128 at once, 14,8") and lines[80].endswith("56 min on one server, or more")
    room = int((0.9 * 24e9 - 16.38e9) / (1000 * 147456))
    assert lines[24].startswith(f"answers   {room} at once")
    slower = run("plan", *QWEN, config_of("qwen3-8b"), "--bandwidth", 1.5)[1]
    assert ": 1.9 hours on one server" in slower


def test_rows_are_counted_where_a_conversation_has_several(tmp_path):
    "As of a template that drops earlier answers; `max_samples` of features is of rows."
    rows = [dict(input_ids=[5, 6, 7], loss_mask=[0, 1, 1]) for _ in range(4)]
    save_prepared(Dataset.from_list(rows), tmp_path)
    whole = planning.amount_of_data(tmp_path, None, None, 2, 1000)
    assert (whole.rows, whole.tokens, whole.known) == (4, 12, True)
    assert planning.amount_of_data(tmp_path, 3, None, 2, 1000).rows == 3
    assert planning.amount_of_data(tmp_path / "none", None, None, 2, 1000) == (2, 2000, False, 1.0)


def test_features_that_are_there_are_counted_and_not_made(quick, tmp_path):
    "Of a recipe that trains and no more: rows and verifier are those of the features, which are read from disk."
    rows = Dataset.from_list([dict(input_ids=[5, 6, 7], loss_mask=[0, 1, 1])] * 4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"train: {{data_dir: {tmp_path}/features, output_dir: {tmp_path}/drafter}}")
    code, text = run("plan", recipe)
    assert code == 2 and text.startswith("Error: verifier is missing: "), text
    seconds = {}
    for folder in ("features/rows", "features"):
        save_prepared(rows, tmp_path / folder)
        (tmp_path / "features/data_config.json").write_text(json.dumps({"model": {"target_model_path": str(TINY)}}))
        sections = {stage.name: stage.values for stage in stages_of(recipe)[0]}
        found = planning.requirements(sections, machine=planning.Machine(memory=80 * GB))
        assert (found.data.rows, found.data.known) == (4, True)
        seconds[folder] = found.stages["training"]
        shutil.rmtree(tmp_path / "features")
    assert seconds["features"] > seconds["features/rows"] == pytest.approx(3 * 12 / found.trained)


def test_a_plan_trains_on_what_the_recipe_starts_from(tmp_path):
    drafter = new_drafter("dflash", TINY, num_layers=2)
    drafter.save_pretrained(tmp_path / "drafter")
    recipe = tmp_path / "recipe.yaml"
    own = f"data_dir: rows, verifier: {TINY}, output_dir: {tmp_path}/new, total_seq_len: 256"
    recipe.write_text(f"train: {{{own}, from_pretrained: {tmp_path}/drafter}}")
    code, text = run("plan", recipe, "--memory", 80)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert code == 0 and f"dflash, {trained / 1e6:,.0f} million trained weights" in text, text


def test_a_plan_knows_nothing_of_a_drafter_that_an_earlier_stage_will_make(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    train = f"data_dir: rows, verifier: {TINY}, output_dir: {tmp_path}/new, from_pretrained: {tmp_path}/made"
    convert = f"source: foreign, verifier: {TINY}, output_dir: {tmp_path}/made"
    recipe.write_text(f"convert: {{{convert}}}\ntrain: {{{train}}}")
    code, text = run("plan", recipe, "--memory", 80)
    assert code == 0 and "eagle3" in text, text


@pytest.mark.parametrize("layers, aux", [(2, None), (4, [1, 4])])
def test_a_drafter_that_reads_the_last_layer(tmp_path, layers, aux):
    "As by default of a verifier of two layers, which has no three others."
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, vocab_size=64)
    LlamaConfig(**sizes, num_hidden_layers=layers).save_pretrained(tmp_path / "v")
    values = {name: value for name, value in dict(aux_layer_ids=aux).items() if value}
    train = dict(data_dir="rows", verifier=str(tmp_path / "v"), output_dir=str(tmp_path / "new"), **values)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(dict(train=train | dict(total_seq_len=64))))
    code, text = run("plan", tmp_path / "r.yaml", "--memory", 80)
    assert code == 0 and "eagle3" in text, text


@pytest.mark.parametrize(
    "maker",
    [
        "from-gguf: {gguf: smollm2, output_dir: PLACE}",
        "stitch-mtp: {drafter: made, verifier: there, out: PLACE}",
    ],
)
def test_a_verifier_that_the_recipe_makes(tmp_path, maker, quick):
    "Its config.json is not there yet: the plan says what makes it, and is made once it is, or with another verifier."
    place, recipe = tmp_path / "out/verifier", tmp_path / "r.yaml"
    maker, sections = maker.replace("PLACE", str(place)), f"train: {{data_dir: rows, output_dir: {tmp_path}/new}}"
    recipe.write_text(f"{maker}\nverifier: {place}\n{sections}\nfeatures: {{data: rows, output_dir: {tmp_path}/f}}")
    code, text = run("plan", recipe, "--memory", 80, "--disk", 9999)
    command = maker.partition(":")[0]
    assert code == 2 and f"{recipe}: verifier='{place}': is not there yet, {command} makes it; run spec" in text
    assert f"{command} --recipe {recipe} first, or name a model of the same sizes (--verifier)" in text
    assert run("plan", recipe, "--memory", 80, "--disk", 9999, "--verifier", TINY)[0] == 0
    shutil.copytree(TINY, place)
    assert run("plan", recipe, "--memory", 80, "--disk", 9999)[0] == 0


def test_without_the_hub_the_error_names_the_remedy():
    code, text = run("plan", ROOT / "data/recipes/qwen3-8b.yaml")
    assert code == 2 and text.count("\n") == 1, text
    assert "Qwen/Qwen3-8B" in text and "hf download" in text


def test_the_disk_is_what_a_run_of_a_thousandth_writes(tmp_path):
    "The plan of 12,000 conversations, and the files of 12."
    recipe = tmp_path / "recipe.yaml"
    sections = dict(
        prepare=dict(data=str(ROOT / "data/corpus/train.jsonl"), output_dir=str(tmp_path / "rows"), max_samples=12),
        features=dict(data=str(tmp_path / "rows"), output_dir=str(tmp_path / "features")),
    )
    recipe.write_text(yaml.safe_dump(dict(verifier=str(TINY), **sections)))
    for command in sections:
        code, text = run(command, "--recipe", recipe)
        assert code == 0, text
    code, counted = run("plan", recipe)
    lengths = [int(row["seq_len"]) for row in planning.load_prepared(tmp_path / "rows").rows]
    assert code == 0 and f"{len(lengths):,} rows of {round(sum(lengths) / len(lengths)):,} tokens" in counted
    assert "(counted)" in counted
    files = sum(f.stat().st_size for f in (tmp_path / "features").rglob("*.safetensors"))
    code, planned = run(
        *("plan", recipe, "--conversations", 1000 * len(lengths)),
        *("--tokens-each", round(sum(lengths) / len(lengths)), "--disk", 2000),
    )
    line = next(line for line in planned.splitlines() if line.startswith("features"))
    assert float(line.split()[1]) * GB / 1000 == pytest.approx(files, rel=0.01)


def test_train_refuses_what_the_device_cannot_hold(quick, caplog):
    values = dict(algorithm="eagle3", total_seq_len=8192, optimizer="adamw", bf16=True, gradient_accumulation_steps=1)
    with pytest.raises(ValueError, match=r"take 0.0\d+ GB, and the device has 0.001 GB; write"):
        check_step_memory(TINY, values, 1e6)
    check_step_memory(TINY, values, 15 * GB)
    assert "needs about 5" in caplog.text and "total_seq_len" in caplog.text
    caplog.clear()
    check_step_memory(TINY, values, 80 * GB)
    check_step_memory(TINY, values)  # no accelerator here
    assert not caplog.text


def test_the_shorter_row_fits_where_a_part_stays(quick):
    "Logits and anchors of a shorter row are as many, so half the memory is not half the row."
    info = VerifierInfo.of(TINY)
    values = dict(algorithm="dflash", total_seq_len=8192, optimizer="muon", bf16=True)
    now = training_step(info, values)
    memory = 0.6 * now.memory.total
    length = shorter_row(info, values, memory, now)
    one, longer = (training_step(info, values | dict(total_seq_len=n)).memory.total for n in (length, length + 128))
    assert one <= memory < longer
    assert shorter_row(info, values, 10 * GB, now) == 0
    assert shorter_row(info, values | dict(total_seq_len=128), memory, now._replace(length=128)) == 0


def test_ranks_that_share_a_row_need_the_memory_of_their_part(quick, caplog, monkeypatch):
    "Nor is fsdp named to them, which is refused beside it."
    monkeypatch.setattr(planning, "can_shard", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    short = dict(algorithm="eagle3", total_seq_len=8192, optimizer="muon", bf16=True, gradient_accumulation_steps=1)
    shared = short | dict(total_seq_len=4 * 8192, context_parallel_size=4)
    info = VerifierInfo.of(TINY)
    assert training_step(info, shared, ranks=4) == training_step(info, short, ranks=4)
    needs = training_step(info, short, ranks=4).memory
    check_step_memory(TINY, shared, needs.total)
    assert not caplog.text
    recomputed = dict(extra={"gradient_checkpointing": True})
    least = training_step(info, short | recomputed, ranks=4).memory
    check_step_memory(TINY, shared | recomputed, least.total - needs.state / 8)
    assert "total_seq_len: " in caplog.text and "fsdp" not in caplog.text
    length = int(re.search(r"total_seq_len: (\d+)", caplog.text)[1])
    assert length % 4 == 0 and 2 * 8192 < length < 4 * 8192


LLAMA = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


@pytest.mark.parametrize("config,weights,active", [(LLAMA, 8.03, 7.5), (CONFIGS["qwen3-30b-a3b"], 30.5, 3.3)])
def test_sizes_are_those_of_the_models_cards(config, weights, active):
    sizes = verifier_sizes(config)
    assert sizes.weights / 1e9 == pytest.approx(weights, rel=0.01)
    assert (sizes.active + sizes.vocab * sizes.hidden) / 1e9 == pytest.approx(active, rel=0.1)
    if config is LLAMA:
        of_token = feature_bytes(4096), feature_bytes(4096, dtype=torch.float8_e4m3fn), cache_bytes(sizes)
        assert of_token == (32 * 1024, 16 * 1024, 128 * 1024)


KIB = 1024
HALF = (18 + 18 * 0.128) * 1000 * 2 * 8 * 64 * 2  # gpt-oss-120b: half of the layers keep 128 tokens


@pytest.mark.parametrize(
    ("kind", "tokens", "kept"),
    [
        ("deepseek_v3", 1, 61 * (512 + 64) * 2),  # latent attention: one vector and a rotated part, whatever the heads
        ("qwen3_next", 1, 24 * KIB),  # a quarter of the layers have keys and values, of 2 heads of 256
        ("gpt_oss", 1000, HALF),
        ("gemma3n_text", 1, 20 * KIB * 2),  # 15 of 35 layers borrow
        ("mamba", 1000, 0),
    ],
)
def test_the_cache_is_what_an_engine_keeps_of_a_text(kind, tokens, kept):
    assert cache_bytes(verifier_sizes(CONFIG_MAPPING[kind]()), tokens) == pytest.approx(kept)


@pytest.mark.parametrize(
    ("kind", "active"),
    [
        ("aria_text", 8.6),  # 2 of 8 experts, whose fields have names of their own
        ("gemma4_text", 2.5),  # tables of its layers are looked up
        ("jetmoe", 1.13),  # experts without a part of that name
        ("qwen2_5_omni_thinker", 6.5),  # of a text nothing passes the audio tower
    ],
)
def test_a_token_is_counted_with_what_it_passes(kind, active):
    assert verifier_sizes(CONFIG_MAPPING[kind]()).active / 1e9 == pytest.approx(active, rel=0.05)


def test_answers_read_the_experts_that_their_tokens_use(quick, tmp_path):
    "16 tokens use at most 128 of 512 experts, so a step of Qwen3-Next reads at most a third of 159 GB."
    Qwen3NextConfig().save_pretrained(tmp_path)
    found = requirements_of(ROOT / "data/recipes/qwen3-8b.yaml", tmp_path, 141 * GB, 2)
    info, server = VerifierInfo.of(tmp_path), found.serving
    few, many = (planning.answering(info, found.machine, server, 1000, n) for n in (16, 4096))
    assert few.at_once == 16 and few.rate > 16 / (server.weights / 3 / (server.width * 3e12))
    assert many.rate < many.at_once / (server.weights / (server.width * 3e12))


def test_a_verifier_without_attention_is_planned(quick, tmp_path):
    "Its features are; a drafter of Llama layers is refused with the field that it lacks."
    CONFIG_MAPPING["mamba"]().save_pretrained(tmp_path / "mamba")
    features = dict(data=f"{tmp_path}/rows", output_dir=f"{tmp_path}/features", aux_layer_ids=[1, 2])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(dict(verifier=f"{tmp_path}/mamba", features=features)))
    code, text = run("plan", recipe, "--memory", 80, "--disk", 9000)
    assert code == 0 and "one device" in text, text
    train = dict(data_dir=f"{tmp_path}/features", output_dir=f"{tmp_path}/drafter")
    recipe.write_text(yaml.safe_dump(dict(verifier=f"{tmp_path}/mamba", features=features, train=train)))
    code, text = run("plan", recipe, "--memory", 80, "--disk", 9000)
    assert code == 2 and "no llama layers fit" in text and "num_attention_heads" in text, text


def test_flops_of_a_forward_pass_are_those_counted():
    model = AutoModelForCausalLM.from_pretrained(TINY).model
    ids = torch.ones(1, 512, dtype=torch.long)
    with torch.no_grad():
        counted = count_flops(lambda: model(ids)) / 512
    assert forward_flops(verifier_sizes(model.config), context=2 * 512) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("name", sorted(SpeculatorModel.registered_classes()))
def test_a_drafter_is_counted_before_it_is_made(name):
    info = VerifierInfo.of(TINY)
    sizes = drafter_sizes(empty_drafter(name, info, **settings(name)), info)
    made = new_drafter(name, info, **settings(name))
    trained = sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert (sizes.trained, sizes.trained + sizes.frozen) == (trained, sum(p.numel() for p in made.parameters()))
    assert sizes.states == len({*made.drafter().aux_layer_ids, info.text.num_hidden_layers})


def test_live_memory_and_gradients_as_fsdp_keeps_them():
    with LiveMemory() as memory:
        x = torch.zeros(1024)  # 4 KiB
        y = x.exp() + 1  # one more, and another on the way
        del x
    assert (memory.bytes, max(memory.trace)[0], len(y)) == (4096, 3 * 4096, 1024)
    toy = torch.nn.Module()
    toy.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False) for _ in range(2)])
    toy.head = torch.nn.Linear(8, 8, bias=False)
    for part in toy.parameters():
        part.grad = torch.zeros_like(part)
    with LiveMemory() as memory:
        keep_gradients(toy, memory)
        toy.head(toy.layers[1](toy.layers[0](torch.ones(1, 8)))).sum().backward()
    kept = [kept for _, _, kept in memory.trace]
    assert (max(kept), kept[-1], memory.kept) == (256, 256, 256)  # the head's; a layer's are sent


def test_what_a_measured_step_holds():
    class Silu(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2**16))

        def forward(self, x):
            return None, torch.nn.functional.silu(self.weight * x).sum()

    step = measured_step(Silu(), dict(x=torch.ones(2**16)))
    assert step.held == step.backward == 4 * 2**16 + 4  # 4 bytes: the sum, its gradient


def test_muons_update_is_counted():
    matrix = torch.nn.Parameter(torch.randn(24, 40))
    matrix.grad = torch.randn(24, 40)
    assert count_flops(torch.optim.Muon([matrix]).step) == muon_flops(24, 40) == muon_flops(40, 24)


SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)


def result(name):
    return json.loads((ROOT / f"benchmarks/{name}").read_text())


def test_shares_of_a_cpu_and_a_card_are_those_measured():
    "Of the rate of its products: of a train step, and of a verifier's forward pass, each in its own benchmark."
    step = result("train_step/results/results.json")
    ours = [row["cpu_over_floor"] for row in step["rows"] if (row["algorithm"], row["side"]) == ("eagle3", "ours")]
    assert 1 / median(ours) == pytest.approx(planning.CPU_TRAINING, abs=0.05)
    shape = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8)
    sizes = verifier_sizes(Qwen3Config(vocab_size=2048, num_key_value_heads=4, head_dim=64, **shape))
    rows = result("features/results/features-2026-11-21-amd-epyc.json")["extraction"]
    (bare,) = [row["tokens_per_cpu_s"] for row in rows if (row["verifier"][:6], row["side"]) == ("random", "bare")]
    reached = bare * forward_flops(sizes, 140) / step["rates"]["layer_fp32"]
    assert reached == pytest.approx(planning.CPU_FORWARD, abs=0.05)
    names = {"EAGLE-3": "eagle3", "P-EAGLE": "peagle", "DFlash": "dflash", "MTP": "mtp"}
    card = result("gpu/results/nvidia-h100-80gb-hbm3/results.json")["rows"]
    peak, lowest = planning.H100["tflops"] * 1e12, {}
    for row in card["step"]:
        if row["side"] == "ours" and row.get("flops"):
            name = names[row["setting"].split()[0]]
            lowest[name] = min(lowest.get(name, 1), row["flops"] / row["seconds"] / peak)
    assert {name: pytest.approx(share, abs=0.01) for name, share in lowest.items()} == planning.MFU


@pytest.mark.nightly
def test_features_and_training_take_what_make_real_took(tmp_path):
    """Within a quarter of benchmarks/real, two idle cores. The rates are those of one core in another benchmark. The
    training there includes three evaluations; the plan has none."""
    SMOLLM2.save_pretrained(tmp_path / "verifier")
    rows = [json.loads(line) for line in (ROOT / "data/smollm2/answers.jsonl").read_text().splitlines()]
    columns = {name: [row[name] for row in rows] for name in ("input_ids", "loss_mask")}
    columns["seq_len"] = [len(ids) for ids in columns["input_ids"]]
    save_prepared(Dataset.from_dict(columns), tmp_path / "prepared")
    usual = settings("eagle3", 4)
    train = dict(
        data_dir=str(tmp_path / "features"),
        output_dir=str(tmp_path / "drafter"),
        algorithm="eagle3",
        draft_vocab_size=8000,
        num_train_epochs=2,
        total_seq_len=usual["total_seq_len"],
        optimizer="muon",
        extra=dict(ttt_steps=usual["ttt_steps"]),
    )
    features = dict(data=str(tmp_path / "prepared"), output_dir=train["data_dir"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(dict(verifier=str(tmp_path / "verifier"), features=features, train=train)))
    sections = {stage.name: stage.values for stage in stages_of(recipe)[0]}
    rates = result("train_step/results/results.json")["rates"]
    machine = planning.Machine(
        tflops=2 * rates["head_bf16_8000"] / 1e12,
        float32=2 * rates["head_fp32_8000"] / 1e12,
        mfu=planning.CPU_TRAINING,
        forward=planning.CPU_FORWARD,
        kind="cpu",
    )
    found = planning.requirements(sections, machine=machine)
    assert (found.data.rows, found.data.tokens) == (2000, 345_700)
    with open(ROOT / "benchmarks/real/results/make_real.csv") as file:
        took = {row["what"]: float(row["value"]) for row in csv.DictReader(file)}
    for stage, seconds in found.stages.items():
        assert seconds == pytest.approx(took[f"seconds of {stage}"], rel=0.25), stage


def test_a_cpu_without_bfloat16_is_not_timed_in_it(monkeypatch):
    "One product took three seconds."
    timed, randn = [], torch.randn
    monkeypatch.setattr(planning, "product_dtype", lambda device: torch.float32)
    monkeypatch.setattr(planning, "_fastest", lambda device, work: 1.0)
    monkeypatch.setattr(torch, "randn", lambda *size, dtype, **given: timed.append(dtype) or randn(*size, dtype=dtype))
    assert planning.measured_machine("eagle3").tflops > 0 and set(timed) == {torch.float32}


def test_without_options_the_plan_is_about_this_machine(quick, tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"a": 1}\n' * 30)
    train = dict(data_dir=str(tmp_path / "f"), output_dir=str(tmp_path / "d"), algorithm="eagle3")
    features = dict(data=str(tmp_path / "rows"), output_dir=train["data_dir"])
    prepare = dict(data=str(tmp_path / "chats.jsonl"), output_dir=features["data"], max_samples=50)
    recipe = dict(verifier=str(TINY), prepare=prepare, features=features, train=train)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, text = run("plan", tmp_path / "recipe.yaml")
    assert code == 0 and text.startswith("data      30 rows of 1,000 tokens"), text
    assert "measured now, " in text and "CPU threads" in text and "H100" not in text
