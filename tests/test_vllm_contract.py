"""What `check` says of a checkpoint: violations keep vLLM from serving it as trained, warnings differ on one build or
for some requests."""

import json
import logging

import pytest
from bad.harness import typed
from by_day import by_day
from matrix import drafter
from test_rope import HALF, NESTED, ROPES

from speculators_nb.serve.vllm_contract import check_vllm_contract


def checkpoint(folder, name, **layer):
    drafter(name, "llama", **layer).save_pretrained(folder)
    return folder


def one_layer(folder):
    raw = json.loads((folder / "config.json").read_text())
    raw["transformer_layer_config"] |= dict(num_hidden_layers=1, layer_types=["full_attention"])
    (folder / "config.json").write_text(json.dumps(raw))


def test_two_layers_of_dflash_are_a_warning(tmp_path, caplog):
    "vLLM's build for processors norms the context keys of all layers by the first layer's weight."
    folder = checkpoint(tmp_path, "dflash")
    with caplog.at_level(logging.WARNING):
        assert check_vllm_contract(folder) == []
    (said,) = caplog.messages
    assert (
        "num_hidden_layers is 2" in said and "first layer's k_norm" in said and "on CUDA each layer has its own" in said
    )
    caplog.clear()
    one_layer(folder)  # another model, whose tensors are not all used; but no warning
    assert all("not part of this model" in line for line in check_vllm_contract(folder)) and caplog.messages == []


def test_the_command_still_says_that_vllm_can_serve_it(tmp_path):
    "Exit code 0, the verdict in the output, the warning beside it; other drafters get none."
    code, said, warned = typed(["check", str(checkpoint(tmp_path / "d", "dflash"))])
    assert (code, said.strip()) == (0, "vLLM can serve this drafter.")
    (line,) = [line for line in warned.splitlines() if "warning" in line.lower()]
    assert line == warned.splitlines()[-1] and "k_norm" in line
    code, said, warned = typed(["check", str(checkpoint(tmp_path / "e", "eagle3"))])
    assert (code, warned) == (0, "") and "can serve" in said


# by day one drafter of each kind: whether it drafts blocks is all that counts
@pytest.mark.parametrize(
    "name", by_day(["eagle3", "peagle", "dflash", "dflash2", "dspark vanilla"], ["eagle3", "dflash"])
)
@pytest.mark.parametrize("kind", [*ROPES, *HALF, *NESTED])
def test_rope_as_vllm_reads_it(name, kind, tmp_path, caplog):
    """Parameters by layer type are read otherwise; longrope depends on the server's longest text, and DFlash fails with
    it."""
    folder = checkpoint(tmp_path, name, rope_parameters=(ROPES | HALF | NESTED)[kind])
    with caplog.at_level(logging.WARNING):
        found = [line for line in check_vllm_contract(folder) if "rope_parameters" in line]
    blocks, long = name in ("dflash", "dflash2", "dspark vanilla"), kind.startswith("longrope")
    assert len(found) == (kind in NESTED) + (blocks and long)
    assert ("given by layer type" in " ".join(found)) == (kind in NESTED) and any(
        "long factors" in line for line in caplog.messages
    ) == long


def test_pictures_and_factors(tmp_path, caplog):
    """Three coordinates for a picture's tokens are a warning; a factor that vLLM's proportional RoPE does not have is a
    violation."""
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
    with caplog.at_level(logging.WARNING):
        assert check_vllm_contract(checkpoint(tmp_path / "a", "eagle3", rope_parameters=rope)) == []
    assert any("three coordinates" in line for line in caplog.messages)
    found = check_vllm_contract(
        checkpoint(tmp_path / "b", "eagle3", rope_parameters=ROPES["proportional"] | dict(factor=2.0))
    )
    assert len(found) == 1 and "factor is 2.0" in found[0]


def test_a_model_that_cannot_be_built_gets_all_its_violations(tmp_path):
    "What the layers refuse, and what the algorithm's rules say, in one list."
    folder = checkpoint(tmp_path, "eagle3")
    raw = json.loads((folder / "config.json").read_text())
    raw["transformer_layer_config"] |= dict(attention_dropout=0.1, hidden_act="gelu")
    (folder / "config.json").write_text(json.dumps(raw))
    found = check_vllm_contract(folder)
    assert [("attention_dropout=0.1" in line) + 2 * ("hidden_act is 'gelu'" in line) for line in found] == [1, 2]
