"""What llama.cpp can draft with, and the GGUF file that it is given; `make llama-cpp-test` drafts with the real one."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from matrix import DRAFTERS, V, verifier
from test_on_a_cluster import check as check_line
from typer.testing import CliRunner

from speculators_nb.cli.main import app
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.llama_cpp import check_llama_cpp, neighbouring_rows
from speculators_nb.nn.layers import Rotary, draft_layer_config, rotate

gguf = pytest.importorskip("gguf", reason="the extra 'dev' has it")
PAGE = (Path(__file__).parents[1] / "docs/llama_cpp.md").read_text()
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=32)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def verifier_file(path, size=V, width=32):
    "A GGUF file with what is read of a verifier's."
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(width)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(size)])
    writer.add_token_scores([0.5] * size)
    writer.add_mask_token_id(3)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(tmp_path, name, layer=None, **changes):
    "A drafter's folder, and the drafter; `layer` overrides entries of its layers' config, `changes` its arguments."
    folder, target, _ = verifier("llama")
    algorithm, arguments, _ = DRAFTERS[name]
    arguments = arguments | changes
    layers = [arguments.pop(name, default) for name, default in (("draft_arch", "llama"), ("num_layers", 1))]
    config = draft_layer_config(target.model.config, *layers, sliding_window=arguments.pop("sliding_window", None))
    for key, value in (layer or {}).items():
        setattr(config, key, value)
    made = SpeculatorModel.registered_class(algorithm).from_training_args
    model = made(config, verifier_name_or_path=str(folder), **arguments)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p) * p.requires_grad
    model.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter", model


def export(folder, tmp_path):
    "The exported file's tensors and metadata, and what the command prints."
    done = run(
        "export", folder, tmp_path / "new", "--to", "llama.cpp", "--verifier", verifier_file(tmp_path / "v.gguf")
    )
    assert done.exit_code == 0, done.output
    reader = gguf.GGUFReader(tmp_path / "new/drafter.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return {t.name: torch.tensor(np.array(t.data)) for t in reader.tensors}, fields, done.output


def test_eagle3(tmp_path):
    folder, model = stored(tmp_path, "eagle3")
    tensors, fields, said = export(folder, tmp_path)
    state, layer = model.saved_state(), model.config.transformer_layer_config
    assert len(tensors) == len([name for name in state if name != "t2d"])
    torch.testing.assert_close(tensors["fc.weight"], state["fc.weight"], rtol=0, atol=0)
    torch.testing.assert_close(tensors["enc.output_norm.weight"], state["input_norm.weight"], rtol=0, atol=0)
    torch.testing.assert_close(tensors["blk.0.ffn_up.weight"], state["layers.0.mlp.up_proj.weight"], rtol=0, atol=0)
    assert fields["eagle3.target_layers"] == model.config.eagle_aux_hidden_state_layer_ids
    assert fields["eagle3.norm_before_fc"] is True and fields["eagle3.block_count"] == 1
    assert fields["eagle3.attention.head_count_kv"] == layer.num_key_value_heads
    assert fields["tokenizer.ggml.tokens"][5] == "token5" and fields["tokenizer.ggml.scores"][5] == 0.5
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    assert "Next: llama-server -m" in said and "--spec-type draft-eagle3" in said


def test_token_ids_of_a_draft_vocabulary_are_the_verifiers(tmp_path):
    t2d = torch.arange(V) % 3 > 0
    ids = t2d.nonzero()[:, 0]
    folder, _ = stored(tmp_path, "eagle3", t2d=t2d, d2t=ids - torch.arange(len(ids)))
    tensors, _, _ = export(folder, tmp_path)
    assert tensors["d2t"].tolist() == ids.tolist() and "t2d" not in tensors
    assert tensors["output.weight"].shape[0] == len(ids)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_neighbours_that_are_rotated_are_the_halves_here(share):
    "A score of a query and a key does not change where both have their rows moved."
    torch.manual_seed(0)
    heads, size, n = 2, 8, 5
    rotated = int(size * share)
    weights = torch.randn(2, heads * size, 12)
    x, angles = torch.randn(n, 12), torch.randn(n, rotated // 2)
    cos, sin = angles.cos(), angles.sin()

    def scores(weight, turn):
        query, key = ((x @ w.T).unflatten(1, (heads, size)).transpose(0, 1) for w in weight)
        return turn(query) @ turn(key).transpose(1, 2)

    def neighbours(states):
        first, rest = states[..., :rotated], states[..., rotated:]
        a, b = first[..., ::2], first[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        return torch.cat([turned, rest], -1)

    halves = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    moved = [neighbouring_rows(w, heads, rotated) for w in weights]
    torch.testing.assert_close(scores(moved, neighbours), scores(weights, lambda states: rotate(states, halves)))


def test_scaled_frequencies_are_written_as_divisors(tmp_path):
    rope = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    folder, model = stored(tmp_path, "eagle3", dict(rope_parameters=rope | dict(original_max_position_embeddings=32)))
    tensors, fields, _ = export(folder, tmp_path)
    plain = fields["eagle3.rope.freq_base"] ** -(torch.arange(0, 8, 2) / 8)
    frequencies = Rotary(model.config.transformer_layer_config).inv_freq
    torch.testing.assert_close(plain / tensors["rope_freqs.weight"], frequencies)
    assert not torch.allclose(plain, frequencies)


def test_block_drafters(tmp_path):
    folder, model = stored(tmp_path, "dspark vanilla")
    tensors, fields, said = export(folder, tmp_path)
    state = model.saved_state()
    assert {"markov_w1.weight", "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"} <= tensors.keys()
    assert len(tensors) == len(state)
    torch.testing.assert_close(
        tensors["blk.1.attn_q.weight"], state["layers.1.self_attn.q_proj.weight"], rtol=0, atol=0
    )
    assert fields["dflash.sample_from_anchor"] is True and fields["dflash.block_size"] == 4
    assert fields["tokenizer.ggml.mask_token_id"] == V - 1  # and not the verifier's
    assert "--spec-type draft-dspark" in said


@pytest.mark.parametrize(
    "name,changes,sentence",
    [
        ("eagle3 qwen3", {}, "num_hidden_layers is 2; llama.cpp's EAGLE-3 has one layer"),
        ("eagle3 qwen3", dict(num_layers=1), "tensor fc_norm.0.weight: llama.cpp's eagle3 has no place for it"),
        ("eagle3 qwen3", dict(num_layers=1, fc_norm=False), "tensor layers.0.self_attn.q_norm.weight"),
        ("eagle3", dict(target_layer_ids=[1, 3]), "eagle_aux_hidden_state_layer_ids is [1, 3]"),
        ("eagle3", dict(sliding_window=8), "layer_types has sliding_attention"),
        ("eagle3", dict(layer=dict(hidden_act="gelu")), "hidden_act is 'gelu'"),
        ("eagle3", dict(layer=dict(rope_parameters=YARN)), "rope_type is 'yarn'"),
        ("dflash", dict(sample_from_anchor=True), "sample_from_anchor is True"),
        ("dflash", dict(attention_sink_bias=True), "attention_sink_bias: llama.cpp's dflash has no place"),
        ("dspark gated", {}, "markov_head_type is 'gated'"),
        ("dspark vanilla", dict(confidence_head_with_markov=False), "confidence_head_with_markov is False"),
        ("peagle", {}, "speculators_model_type is 'peagle'; llama.cpp drafts with dflash, dspark, eagle3"),
    ],
)
def test_what_llama_cpp_does_not_have(tmp_path, name, changes, sentence):
    folder, _ = stored(tmp_path, name, **changes)
    assert any(sentence in line for line in check_llama_cpp(folder))
    done = run("check", folder, "--engine", "llama.cpp")
    assert done.exit_code == 1 and sentence in done.stdout
    refused = run(
        "export", folder, tmp_path / "new", "--to", "llama.cpp", "--verifier", verifier_file(tmp_path / "v.gguf")
    )
    assert refused.exit_code == 2 and "llama.cpp cannot draft with it" in refused.output
    assert not (tmp_path / "new").exists()


def test_a_norm_that_is_left_out_is_a_warning(tmp_path, caplog):
    folder, _ = stored(tmp_path, "eagle3", norm_output=True)
    assert check_llama_cpp(folder) == [] and "norm_output is True" in caplog.text
    done = run("check", folder, "--engine", "llama.cpp")
    assert done.exit_code == 0 and "llama.cpp can serve this drafter." in done.output


def test_what_cannot_be_exported(tmp_path):
    folder, _ = stored(tmp_path, "eagle3")
    (tmp_path / "text.gguf").write_text("GG")
    line = ["export", folder, tmp_path / "new", "--to", "llama.cpp"]
    for words, sentence in (
        ([], "verifier=None: name the GGUF file"),
        (["--verifier", tmp_path / "none.gguf"], "no such file"),
        (["--verifier", tmp_path / "text.gguf"], "is no GGUF file"),
        (["--verifier", verifier_file(tmp_path / "a.gguf", size=V + 1)], f"is for a verifier with vocabulary {V}"),
        (["--verifier", verifier_file(tmp_path / "b.gguf", width=64)], "is for a verifier with hidden_size"),
        (["--verifier", verifier_file(tmp_path / "c.gguf"), "--format", "eagle3"], "format='eagle3': has no effect"),
    ):
        done = run(*line, *words)
        assert done.exit_code == 2 and sentence in done.output, done.output
        assert not (tmp_path / "new").exists()
    refused = run("check", folder, "--engine", "llama.cpp", "--engine-version", "0.33")
    assert refused.exit_code == 2 and "is a version of vLLM" in refused.output


def test_the_drafter_is_read_as_it_was_saved(tmp_path):
    "bfloat16 stays bfloat16, but in vectors."
    folder, _ = stored(tmp_path, "eagle3")
    SpeculatorModel.from_pretrained(folder).bfloat16().save_pretrained(tmp_path / "half")
    export(tmp_path / "half", tmp_path)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "new/drafter.gguf").tensors}
    assert kinds["fc.weight"] == "BF16" and kinds["output_norm.weight"] == "F32"


@pytest.mark.parametrize("line", re.findall(r"^speculators-nb .*", PAGE, flags=re.M))
def test_a_command_of_the_page_is_one_of_the_program(line):
    check_line(line)
