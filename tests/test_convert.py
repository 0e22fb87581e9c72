"""Conversion renames and nothing else: both directions are inverse to the bit, whatever the sizes and options, and what
does not fit is said."""

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3NextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculators_nb.core.config import SpeculatorModelConfig, SpeculatorsConfig
from speculators_nb.decode.generate import generate
from speculators_nb.decode.tree import Sampling
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert, detect, export_native
from speculators_nb.models.formats import FORMATS, NativeCheckpoint, formats
from speculators_nb.models.mtp_native import stitch_mtp
from speculators_nb.nn.draft_vocabulary import vocab_mapping_from_frequencies
from speculators_nb.nn.layers import Rotary, draft_layer_config
from speculators_nb.verifier.tapped_model import Verifier

V, H, LAYERS = 48, 16, 8
SHAPE = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
TINY = settings(max_examples=3, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "Verifiers: `v` for drafters of every kind, `mtp` and `moe` for heads."
    folder = tmp_path_factory.mktemp("verifiers")
    torch.manual_seed(0)
    for name, config in dict(
        v=LlamaConfig(**SHAPE, num_hidden_layers=LAYERS),
        mtp=Qwen3Config(**SHAPE, num_hidden_layers=2),
        moe=Qwen3NextConfig(
            **SHAPE,
            num_hidden_layers=2,
            layer_types=["full_attention"] * 2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        ),
    ).items():
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape) * 0.3)
        model.save_pretrained(folder / name, max_shard_size="20KB" if name == "moe" else "1GB")
    return folder


def random_state(config, seed, dtypes):
    "Every tensor of a drafter at random, in one dtype or in several."
    with torch.device("meta"):
        model = SpeculatorModel.registered_class(config.speculators_model_type)(config)
    g = torch.Generator().manual_seed(seed)
    names = [n for n in model.state_dict() if not n.startswith(model.not_saved)]
    return {
        n: torch.randn(model.state_dict()[n].shape, generator=g).to(dtypes[i % len(dtypes)])
        for i, n in enumerate(names)
        if n not in ("t2d", "d2t")
    }


def save(folder, config, state):
    "A checkpoint of ours, tensors as they are."
    with torch.device("meta"):
        model = SpeculatorModel.registered_class(config.speculators_model_type)(config)
    model.check_state(state, folder)
    floats = [w.dtype for w in state.values() if w.is_floating_point()]
    model.to(max(set(floats), key=lambda d: (floats.count(d), str(d)))).save_pretrained(folder, state_dict=state)
    return folder


def mapping(vd, seed):
    t2d, d2t = vocab_mapping_from_frequencies(
        torch.randint(9, (V,), generator=torch.Generator().manual_seed(seed)), vd, V
    )
    return {"t2d": t2d, "d2t": d2t} if vd < V else {}


def base(kind, home, tokens, verifier="v"):
    return SpeculatorsConfig.greedy(kind, tokens, home / verifier)


def layers(draw, families=("llama", "qwen3"), most=2):
    "The configuration of draft layers: sizes, family, windows, rope."
    n, d, kv = draw(st.integers(1, most)), draw(st.sampled_from([4, 8])), draw(st.sampled_from([1, 2, 4]))
    target = LlamaConfig(
        **SHAPE | dict(head_dim=d, num_key_value_heads=kv, max_position_embeddings=draw(st.sampled_from([128, 512]))),
        num_hidden_layers=LAYERS,
    )
    full = tuple(range(n)) if draw(st.booleans()) else ()
    layer = draft_layer_config(
        target, draw(st.sampled_from(families)), n, full, intermediate_size=draw(st.sampled_from([8, 40]))
    )
    if draw(st.booleans()):
        layer.rope_parameters = dict(rope_type="linear", factor=2.0, rope_theta=draw(st.sampled_from([1e4, 5e5])))
    layer.attention_bias = draw(st.booleans())
    return layer


@st.composite
def drafter(draw, kind):
    "(fields of a config, extra tensors, the verifier's name) of a drafter with random options."
    seed, vd = draw(st.integers(0, 99)), draw(st.sampled_from([20, V - 1, V]))
    K = draw(st.integers(1, 6))
    ids = sorted(draw(st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=4)))
    if kind == "eagle":
        return (
            dict(
                transformer_layer_config=layers(draw, most=1),
                layernorms=draw(st.booleans()),
                fusion_bias=draw(st.booleans()),
            ),
            {},
            "v",
            K,
        )
    if kind in ("eagle3", "peagle"):
        norm = draw(st.sampled_from(["", "norm_before_fc", "fc_norm"]))
        return (
            dict(
                transformer_layer_config=layers(draw),
                draft_vocab_size=vd,
                eagle_aux_hidden_state_layer_ids=ids,
                norm_before_residual=draw(st.booleans()),
                norm_output=draw(st.booleans()),
                embed_requires_grad=draw(st.booleans()),
            )
            | ({norm: True} if norm else {})
            | (dict(mask_token_id=draw(st.integers(0, V - 1)), num_depths=K) if kind == "peagle" else {}),
            mapping(vd, seed),
            "v",
            K,
        )
    if kind in ("dflash", "dflash2", "dspark"):
        layer, B = layers(draw, ("qwen3",)), draw(st.integers(2, 6))
        slides = "sliding_attention" in layer.layer_types
        for option in ("is_causal", "add_swa_attention_sink_bias"):
            if draw(st.booleans()):
                setattr(layer, option, True)
        new, first = {}, 1
        if kind == "dspark":
            heads = dict(markov_head_type=draw(st.sampled_from(["vanilla", "gated", "rnn"])), markov_rank=3)
            reads = draw(st.sampled_from([(True, True), (True, False), (False, False)]))
            new = heads | dict(zip(("enable_confidence_head", "confidence_head_with_markov"), reads))
            new["sample_from_anchor"] = not (first := draw(st.integers(0, 1)))
        if kind == "dflash2":
            vd, sizes = V, st.integers(1, 2)
            new = dict(conv_kernel_size=draw(sizes), conv_group_size=2 * draw(sizes))
            new |= dict(selector_rank=draw(sizes), selector_top_k=draw(sizes))
        return (
            new
            | dict(
                transformer_layer_config=layer,
                draft_vocab_size=vd,
                aux_hidden_state_layer_ids=ids,
                block_size=B,
                mask_token_id=draw(st.integers(0, V - 1)),
                sliding_window_non_causal=draw(st.booleans()) if slides else True,
            ),
            mapping(vd, seed),
            "v",
            draw(st.integers(1, B - first)),
        )
    if kind == "medusa":
        return (
            dict(
                hidden_size=H,
                vocab_size=V,
                num_heads=K,
                num_hidden_layers=draw(st.integers(1, 2)),
                medusa_fc_bias=draw(st.booleans()),
            ),
            {},
            "v",
            K,
        )
    if kind == "mlp":
        return (
            dict(
                hidden_size=H,
                vocab_size=V,
                num_layers=K,
                intermediate_size=draw(st.sampled_from([8, H])),
                tie_weights=K > 1 and draw(st.booleans()),
                inputs_hidden_states_normalized=draw(st.booleans()),
            ),
            {},
            "v",
            K,
        )
    name = draw(st.sampled_from(["mtp", "moe"]))
    return dict(transformer_layer_config=name), {}, name, K


def plain_config(path):
    "config.json without what says nothing: a window that no layer has, and that the verifier has the head."
    raw = json.loads((Path(path) / "config.json").read_text())
    layer = raw.get("transformer_layer_config", raw)
    layer.pop("num_nextn_predict_layers", None)
    if not layer.get("use_sliding_window"):
        for key in ("sliding_window", "use_sliding_window"):
            layer.pop(key, None)
    return raw


def same(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for n in a:
        assert a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]), n


def weights(folder):
    return {n: w for file in sorted(Path(folder).glob("*.safetensors")) for n, w in load_file(file).items()}


KINDS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "peagle": "peagle",
    "dflash": "dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "medusa": "medusa",
    "medusa_original": "medusa",
    "mlp_speculator": "mlp",
    "mtp": "mtp",
}


def test_every_format_is_tested():
    "Layouts with limits have their tests in test_xpress.py, test_domino.py and test_query_only.py."
    others = {"domino": "domino", "lilicorr": "lilicorr", "xpress": "xpress", "gemma4_assistant": "query_only"}
    assert {f.name: f.model_type for f in formats()} == KINDS | others


@pytest.mark.statement("release-53")
@pytest.mark.parametrize("name", KINDS)
@TINY
@given(data=st.data())
def test_both_ways_are_inverse(name, data, home, tmp_path_factory):
    "ours -> native -> ours and native -> ours -> native: the same tensors to the bit and dtype, the same configs."
    kind, work = KINDS[name], tmp_path_factory.mktemp(name)
    fields, extra, verifier, K = data.draw(drafter(kind))
    if kind == "mtp":
        fields["transformer_layer_config"] = json.loads((home / verifier / "config.json").read_text())
    config = SpeculatorModel.registered_class(kind).config_class(
        **fields, speculators_config=base(kind, home, K, verifier)
    )
    dtypes = data.draw(
        st.sampled_from(
            [[torch.float32]] if kind == "mtp" else [[torch.float32], [torch.bfloat16], [torch.float16, torch.float32]]
        )
    )
    ours = save(work / "ours", config, random_state(config, data.draw(st.integers(0, 99)), dtypes) | extra)
    native = export_native(ours, work / "native", name)
    assert detect(native) == name
    again = convert(native, work / "again", home / verifier, speculative_tokens=K if kind in ("mtp",) else None)
    same(weights(ours), weights(again))
    assert plain_config(ours) == plain_config(again)
    export_native(again, work / "native again", name)
    same(weights(native), weights(work / "native again"))
    assert json.loads((work / "native/config.json").read_text()) == json.loads(
        (work / "native again/config.json").read_text()
    )
    shutil.rmtree(work)


sys.path.insert(0, str(Path(__file__).parent / "parity"))
import check_converters as upstream  # noqa: E402


@pytest.mark.statement("release-47")
@pytest.mark.parametrize("name", upstream.CASES)
def test_upstreams_converter_makes_the_same(name, tmp_path):
    "Tensors to the bit, and what the configs say, against what speculators 0.9.0 made of the same folders."
    theirs = json.loads(upstream.RECORD.read_text())[name]
    assert upstream.differences(upstream.here(name, tmp_path), theirs) == []
    theirs["tensors"] = {n: [dtype, shape, "0" * 64] for n, (dtype, shape, _) in theirs["tensors"].items()}
    # the comparison can fail
    assert len(upstream.differences(upstream.here(name, tmp_path / "again"), theirs)) == len(theirs["tensors"])


@pytest.fixture(scope="module")
def eagle3(home, tmp_path_factory):
    "A drafter of ours with half the vocabulary, and its research checkpoint."
    folder = tmp_path_factory.mktemp("eagle3")
    layer = draft_layer_config(LlamaConfig(**SHAPE, num_hidden_layers=LAYERS))
    config = SpeculatorModel.registered_class("eagle3").config_class(
        transformer_layer_config=layer,
        draft_vocab_size=24,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        norm_before_residual=True,
        speculators_config=base("eagle3", home, 4),
    )
    save(folder / "ours", config, random_state(config, 3, [torch.float32]) | mapping(24, 1))
    export_native(folder / "ours", folder / "native")
    return folder


def rewritten(source, folder, tensors=None, config=None, drop=(), file="model.safetensors"):
    "A copy of a native folder with tensors and config changed."
    folder.mkdir()
    raw = {k: v for k, v in json.loads((source / "config.json").read_text()).items() if k not in drop} | (config or {})
    state = {k: v for k, v in weights(source).items() if k not in drop} | (tensors or {})
    save_file({k: v.contiguous() for k, v in state.items()}, folder / file)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


CONTAINERS = {
    "safetensors": lambda state, folder: save_file(state, folder / "model.safetensors"),
    "bin": lambda state, folder: torch.save(state, folder / "pytorch_model.bin"),
    "bin of an old torch": lambda state, folder: torch.save(
        state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    ),
    "sharded safetensors": lambda state, folder: shards(
        state, folder, "model-{}.safetensors", "model.safetensors.index.json", save_file
    ),
    "sharded bin": lambda state, folder: shards(
        state, folder, "pytorch_model-{}.bin", "pytorch_model.bin.index.json", torch.save
    ),
}


def shards(state, folder, name, index, write):
    where = {n: name.format(i % 3) for i, n in enumerate(state)}
    for file in set(where.values()):
        write({n: state[n] for n in where if where[n] == file}, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container(container, eagle3, home, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    CONTAINERS[container](weights(eagle3 / "native"), source)
    shutil.copy(eagle3 / "native/config.json", source)
    assert detect(source) == "eagle3"
    convert(source, tmp_path / "made", home / "v")
    same(weights(tmp_path / "made"), weights(eagle3 / "ours"))
    if "sharded" not in container:  # the file alone, under another name
        file = next(f for f in source.iterdir() if f.name != "config.json").rename(
            source / f"weights{'.bin' if 'bin' in container else '.safetensors'}"
        )
        convert(file, tmp_path / "from file", home / "v")
        same(weights(tmp_path / "from file"), weights(eagle3 / "ours"))
        with pytest.raises(FileNotFoundError, match="looked for .*pytorch_model.bin. If they have another name"):
            detect(source)


@pytest.mark.statement("release-48", "release-68", "release-69")
def test_eagle3_as_others_write_it(eagle3, home, tmp_path):
    """No t2d; no embedding; buffers of old versions; names behind `model.`; layer ids and flags nowhere, or flat; whole
    vocabulary with an empty mapping."""
    ours, native = weights(eagle3 / "ours"), weights(eagle3 / "native")
    made = lambda name, **change: Path(
        convert(
            rewritten(eagle3 / "native", tmp_path / name, **change),
            tmp_path / f"{name} made",
            home / "v",
            config=change.pop("fields", None),
        )
    )
    same(weights(made("no t2d", drop=("t2d",))), ours)
    same(
        weights(made("no embedding", drop=("embed_tokens.weight",))),
        {n: w for n, w in ours.items() if n != "embed_tokens.weight"},
    )
    SpeculatorModel.from_pretrained(tmp_path / "no embedding made")  # the verifier's is there
    same(weights(made("buffer", tensors={"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)})), ours)
    same(
        weights(
            made(
                "prefix",
                tensors={"model." + n: w for n, w in native.items() if n.startswith("midlayer.")},
                drop=tuple(n for n in native if n.startswith("midlayer.")),
            )
        ),
        ours,
    )
    nothing = dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[], use_aux_hidden_state=True))
    assert (
        SpeculatorModelConfig.from_pretrained(made("no layers", config=nothing)).eagle_aux_hidden_state_layer_ids
        == [2, 4, 5]  # as in vLLM
    )
    said = json.loads(
        (
            made(
                "bare",
                drop=(
                    "eagle_config",
                    "norm_before_residual",
                    "speculative_tokens",
                    "layer_types",
                    "num_aux_hidden_states",
                    "model_type",
                ),
            )
            / "config.json"
        ).read_text()
    )
    assert (
        said["eagle_aux_hidden_state_layer_ids"],
        said["norm_before_residual"],
        said["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
    ) == ([2, 4, 5], False, 3)
    flat = json.loads(
        (
            made(
                "flat",
                drop=("eagle_config",),
                config=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 7], torch_dtype="float16", rope_theta=7e5),
            )
            / "config.json"
        ).read_text()
    )
    assert flat["eagle_aux_hidden_state_layer_ids"] == [1, 2, 7]
    whole = made(
        "whole",
        tensors=dict(t2d=torch.ones(V, dtype=torch.bool), d2t=torch.zeros(V, dtype=torch.int64))
        | {"lm_head.weight": torch.randn(V, H)},
        config=dict(draft_vocab_size=V),
    )
    assert not {"t2d", "d2t"} & weights(whole).keys() and SpeculatorModel.from_pretrained(whole).t2d is None
    old = rewritten(
        eagle3 / "native",
        tmp_path / "old rope",
        config=dict(rope_theta=7e5, rope_scaling=dict(type="linear", factor=4.0), max_position_embeddings=64),
        drop=("rope_parameters",),
    )
    layer = SpeculatorModelConfig.from_pretrained(
        convert(old, tmp_path / "old rope made", home / "v", config='{"norm_output": true}')
    )
    assert (
        layer.norm_output
        and layer.transformer_layer_config.rope_parameters["rope_theta"] == 7e5
        and layer.transformer_layer_config.rope_parameters["factor"] == 4
    )
    assert layer.transformer_layer_config.max_position_embeddings == 128  # no shorter than the verifier's


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_layers_like_llamas(family, kind, home, tmp_path):
    """A window on all layers, or biases on q, k, v: written as a Llama's layer, which other projects' code and engines
    read (EAGLE's drafters for Qwen2 are stored so), and read back with the same numbers."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    layer = dict(mistral=MistralConfig, qwen2=Qwen2Config)[family](**shape, num_hidden_layers=1)
    if family == "mistral":
        layer.sliding_window = 3
    fields = dict(transformer_layer_config=layer)
    if kind == "eagle3":
        fields |= dict(draft_vocab_size=V, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    config_class = SpeculatorModel.registered_class(kind).config_class
    config = config_class(**fields, speculators_config=base(kind, home, 3))
    save(tmp_path / "ours", config, random_state(config, 1, [torch.float32]))
    raw = json.loads((Path(export_native(tmp_path / "ours", tmp_path / "native")) / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM" if kind == "eagle" else "LlamaForCausalLMEagle3"]
    assert (raw["model_type"], raw["qkv_bias"]) == ("llama", family == "qwen2")
    convert(tmp_path / "native", tmp_path / "back", home / "v")
    ours, back = (SpeculatorModel.from_pretrained(tmp_path / name) for name in ("ours", "back"))
    same(ours.saved_state(), back.saved_state())
    assert [x.window for x in back.layers] == [x.window for x in ours.layers] == [3 if family == "mistral" else None]
    tokens, features = torch.arange(9), torch.randn(8, len(ours.drafter().aux_layer_ids) * H)
    drafts = [model.drafter().propose(tokens, features, 4, Sampling()).tokens.tolist() for model in (ours, back)]
    assert drafts[0] == drafts[1]


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
ANGLES = {  # whatever of it transformers derives from max_position_embeddings, which is 64
    "default": dict(rope_theta=7e5),
    "linear": dict(rope_scaling=dict(type="linear", factor=2.0)),
    "mrope": dict(rope_scaling=dict(type="mrope", mrope_section=[1, 1, 2])),  # its angles for text
    "proportional": dict(rope_parameters=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e4)),
    "yarn": dict(rope_scaling=dict(rope_type="yarn", factor=4.0)),
    "yarn, ratio": dict(rope_scaling=dict(rope_type="yarn", factor=None, original_max_position_embeddings=16)),
    "yarn, beside": dict(rope_scaling=dict(type="yarn", factor=4.0), original_max_position_embeddings=16),
    "yarn by layers": dict(rope_parameters=dict(full_attention=YARN | dict(rope_theta=1e4))),
    "llama3": dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "dynamic": dict(rope_scaling=dict(type="dynamic", factor=4.0)),
    "longrope": dict(
        rope_scaling=dict(rope_type="longrope", short_factor=[1.0, 2.0, 3.0, 4.0], long_factor=[5.0, 6.0, 7.0, 8.0]),
        original_max_position_embeddings=32,
    ),
}
KEPT = {"dynamic", "longrope"}  # types whose angles depend on the length itself, here or in vLLM


@pytest.mark.parametrize("name", ANGLES)
def test_conversion_keeps_angles(name, home, eagle3, tmp_path, caplog):
    """A drafter trained with 64 positions, its verifier has 128: on texts of each length, and after the way back, in
    words of transformers 5 or 4, the table is that of transformers for the foreign config.json."""
    native, rope = eagle3 / "native", ("rope_parameters", "rope_scaling", "rope_theta")
    fields = dict(max_position_embeddings=64, model_type="llama", layer_types=["full_attention"])
    old = rewritten(native, tmp_path / "old", config=fields | ANGLES[name], drop=rope)
    own = {k: v for k, v in json.loads((old / "config.json").read_text()).items() if k not in ("dtype", "eagle_config")}
    own |= dict(rope_scaling=None) if name == "mrope" else {}
    new = convert(old, tmp_path / "new", home / "v")
    raw = json.loads((Path(export_native(new, tmp_path / "back")) / "config.json").read_text())
    layer = SpeculatorModelConfig.from_pretrained(new).transformer_layer_config
    assert layer.max_position_embeddings == (64 if name in KEPT else 128)
    assert ("stays 64" in caplog.text) == (name in KEPT)
    four = {k: v for k, v in raw.items() if k != "rope_parameters" or name == "yarn by layers"}

    def table(config, n):
        if rope := config.rope_parameters.get("full_attention"):
            config = LlamaConfig(**config.to_dict() | dict(rope_parameters=rope, layer_types=None))
        at = torch.arange(n)[None]
        return torch.stack(LlamaRotaryEmbedding(config)(torch.zeros(1), at))

    for n in (20, 60, 100, 300):
        want = table(LlamaConfig(**copy.deepcopy(own)), n)
        for config in (layer, LlamaConfig(**copy.deepcopy(raw)), LlamaConfig(**four)):
            torch.testing.assert_close(table(config, n), want, rtol=0, atol=0)
        ours = torch.stack(Rotary(layer)(torch.zeros(1), torch.arange(n)))[:, None]
        torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6)


def test_dflash_as_others_write_it(home, tmp_path):
    "Fields flat or in a block, an attention window forced on all layers, copies of the verifier's embedding and head."
    layer = draft_layer_config(LlamaConfig(**SHAPE, num_hidden_layers=LAYERS), "qwen3", 2)
    kind = SpeculatorModel.registered_class("dflash").config_class
    config = kind(
        transformer_layer_config=layer,
        draft_vocab_size=V,
        block_size=5,
        mask_token_id=7,
        aux_hidden_state_layer_ids=[2, 5],
        sliding_window_non_causal=True,
        speculators_config=base("dflash", home, 4),
    )
    save(tmp_path / "ours", config, random_state(config, 1, [torch.bfloat16]))
    native = Path(export_native(tmp_path / "ours", tmp_path / "native"))
    raw = json.loads((native / "config.json").read_text())
    assert raw["dflash_config"] == dict(mask_token_id=7, target_layer_ids=[1, 4]) and (
        raw["block_size"],
        raw["num_target_layers"],
        raw["architectures"],
    ) == (5, LAYERS, ["DFlashDraftModel"])
    theirs = weights(home / "v")
    copies = {
        "embed_tokens.weight": theirs["model.embed_tokens.weight"].bfloat16(),
        "lm_head.weight": theirs["lm_head.weight"].bfloat16(),
    }
    flat = rewritten(
        native,
        tmp_path / "flat",
        copies,
        dict(target_layer_ids=[1, 4], mask_token_id=7),
        ("dflash_config", "layer_types"),
    )
    convert(flat, tmp_path / "flat made", home / "v")
    same(weights(tmp_path / "flat made"), weights(tmp_path / "ours"))
    assert plain_config(tmp_path / "flat made") == plain_config(tmp_path / "ours")
    forced = SpeculatorModelConfig.from_pretrained(
        convert(
            rewritten(
                native,
                tmp_path / "swa",
                config=dict(dflash_config=raw["dflash_config"] | dict(use_swa=True, swa_window_size=9)),
            ),
            tmp_path / "swa made",
            home / "v",
        )
    )
    assert (
        forced.transformer_layer_config.layer_types == ["sliding_attention"] * 2
        and forced.transformer_layer_config.sliding_window == 9
        and forced.sliding_window_non_causal
    )
    window = dict(dflash_config=raw["dflash_config"] | dict(swa_window_size=9), sliding_window=5)
    for change, drop in (
        (window | dict(layer_types=["sliding_attention"] * 2), ()),
        (window | dict(use_sliding_window=True, max_window_layers=0, sliding_window=9), ("layer_types",)),
    ):  # the window without `use_swa`; Qwen3's own words for sliding layers
        source = rewritten(native, tmp_path / f"window{len(drop)}", config=change, drop=drop)
        layer = SpeculatorModelConfig.from_pretrained(
            convert(source, tmp_path / f"window{len(drop)} made", home / "v")
        ).transformer_layer_config
        assert (layer.layer_types, layer.sliding_window) == (["sliding_attention"] * 2, 9)
    for name in ("causal", "causal_head"):  # z-lab's and vLLM's word, JetSpec's
        source = rewritten(native, tmp_path / name, config=dict(dflash_config=raw["dflash_config"] | {name: True}))
        made = SpeculatorModelConfig.from_pretrained(convert(source, tmp_path / f"{name} made", home / "v"))
        assert made.transformer_layer_config.is_causal and not made.sliding_window_non_causal
    for change, says in (
        (
            dict(config=dict(dflash_config=raw["dflash_config"] | dict(target_layer_ids=[1, LAYERS - 1]))),
            "reads the last of the verifier's 8 layers",
        ),
        (dict(config=dict(dflash_config=dict(mask_token_id=7))), "target_layer_ids is not in config.json"),
        (dict(config=dict(input_embedding_scale=4.0)), "input_embedding_scale is 4.0"),
        (dict(config=dict(is_neox_style=False)), "is_neox_style is False"),  # vLLM reads these two
        (dict(config=dict(logit_scale=0.5)), "logit_scale is 0.5"),
        (dict(tensors={"lm_head.weight": torch.randn(V, H)}), "lm_head.weight differs from that of verifier"),
        (
            dict(tensors={"layers.0.self_attn.g_proj.weight": torch.randn(4, H)}),
            "has unknown tensors: layers.0.self_attn.g_proj.weight",
        ),
    ):
        source = rewritten(native, tmp_path / says[:9], **change)
        with pytest.raises(ValueError, match=says):
            convert(source, tmp_path / "no", home / "v")
    (native / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match="mask_embedding.pt replaces"):
        convert(native, tmp_path / "no", home / "v")
    shifted = kind(**config.to_dict() | dict(sample_from_anchor=True))
    save(tmp_path / "shifted", shifted, random_state(config, 1, [torch.bfloat16]))
    with pytest.raises(ValueError, match="sample_from_anchor is True"):
        export_native(tmp_path / "shifted", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def in_four_bits(weight):
    "A matrix as ModelOpt stores it (NVFP4), entry by entry, and what is meant."
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    by_tensor = (weight.abs().max() / 6 / 448).float()
    groups = weight.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / by_tensor).to(torch.float8_e4m3fn)
    nibbles, meant = torch.zeros(weight.shape, dtype=torch.uint8), torch.zeros(weight.shape)
    for row in range(len(weight)):
        for column in range(weight.shape[1]):
            unit = float(scale[row, column // 16]) * float(by_tensor)
            x = float(weight[row, column]) / unit
            code = min(range(8), key=lambda i: abs(values[i] - abs(x)))
            nibbles[row, column] = code + 8 * (x < 0)
            meant[row, column] = (-1 if x < 0 else 1) * values[code] * unit
    return nibbles[:, ::2] + 16 * nibbles[:, 1::2], scale, by_tensor, meant.bfloat16()


def test_dspark_as_released(home, tmp_path):
    """NVIDIA's DSpark of Nemotron 3.5: causal layers with a window and sinks, no confidence head, weights of the MLP in
    four bits. It is read, trains a step, and is written in the same layout."""
    window = dict(use_swa=True, swa_window_size=8, attention_sink_bias=True, causal=True)
    raw = dict(
        {k: v for k, v in SHAPE.items() if k != "tie_word_embeddings"},
        architectures=["Qwen3DSparkModel"],
        model_type="qwen3",
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention"] * 2,
        sliding_window=8,
        rope_parameters=None,
        rope_theta=10000,
        rms_norm_eps=1e-6,
        block_size=4,
        draft_vocab_size=None,
        attention_sink_bias=True,
        dspark_bonus_anchor=True,
        sample_from_anchor=False,
        markov_rank=3,
        markov_head_type="vanilla",
        mask_token_id=7,
        target_layer_ids=[1, 4],
        dflash_config=window | dict(mask_token_id=7, target_layer_ids=[1, 4], sample_from_anchor=False),
    )
    layer = Qwen3Config(**{k: raw[k] for k in raw if k in Qwen3Config().to_dict()}, use_sliding_window=True)
    layer.add_swa_attention_sink_bias = True
    fields = dict(markov_rank=3, enable_confidence_head=False, confidence_head_with_markov=False)
    kind = SpeculatorModel.registered_class("dspark").config_class
    shapes = kind(transformer_layer_config=layer, draft_vocab_size=V, aux_hidden_state_layer_ids=[2, 5], **fields)
    state = random_state(shapes, 1, [torch.bfloat16])
    meant = dict(state)
    for name in [name for name in state if ".mlp." in name]:
        state[name], state[f"{name}_scale"], state[f"{name}_scale_2"], meant[name] = in_four_bits(state[name].float())
    state["embed_tokens.weight"] = weights(home / "v")["model.embed_tokens.weight"].bfloat16()
    (source := tmp_path / "released").mkdir()
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(raw))
    model = SpeculatorModel.from_pretrained(source, verifier=home / "v")
    c = model.config
    assert (c.sample_from_anchor, c.sliding_window_non_causal, c.proposed_tokens) == (False, False, 3)
    assert [(x.window, model.causal_in_block(x)) for x in model.layers] == [(8, True)] * 2
    same(model.saved_state(), meant)
    L = 20
    batch = dict(
        input_ids=torch.randint(V, (1, L)),
        hidden_states=torch.randn(1, L, 2 * H),
        document_ids=torch.zeros(1, L, dtype=torch.long),
        loss_mask=torch.ones(1, L, dtype=torch.bool),
        verifier_last_hidden_states=torch.randn(1, L, H),
    )
    model.float().train()(**batch).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= p.grad
    assert all(x.self_attn.attention_sink_bias.grad.any() for x in model.layers)
    model.bfloat16().save_pretrained(tmp_path / "trained")
    exported = export_native(tmp_path / "trained", tmp_path / "exported")
    stored = json.loads((Path(exported) / "config.json").read_text())
    for name in ("architectures", "sample_from_anchor", "dspark_bonus_anchor", "markov_rank", "target_layer_ids"):
        assert stored[name] == raw[name]
    assert stored["dflash_config"]["attention_sink_bias"] and stored["layer_types"] == raw["layer_types"]
    again = SpeculatorModel.from_pretrained(exported, verifier=home / "v")
    same(again.saved_state(), model.saved_state())


def test_medusa_and_mlp_as_others_write_them(home, tmp_path):
    """Medusa's pickle, heads among a verifier's shards, one matrix for all heads; MLP speculators without prefix, tied
    parts once or copied, without config."""
    kind = SpeculatorModel.registered_class("medusa").config_class
    config = kind(
        hidden_size=H,
        vocab_size=V,
        num_heads=3,
        num_hidden_layers=2,
        medusa_fc_bias=True,
        speculators_config=base("medusa", home, 3),
    )
    save(tmp_path / "ours", config, random_state(config, 1, [torch.float16]))
    native = Path(export_native(tmp_path / "ours", tmp_path / "native", "medusa_original"))
    state = load_file(native / "medusa_lm_head.safetensors")
    assert {"0.0.linear.weight", "2.1.linear.bias", "2.2.weight"} <= state.keys() and len(state) == 3 * 5
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(state, pickled / "medusa_lm_head.pt")  # no config.json: sizes are seen
    inside = tmp_path / "inside"
    shutil.copytree(home / "v", inside)
    save_file(
        load_file(inside / "model.safetensors") | {"medusa_head." + n: w for n, w in state.items()},
        inside / "model.safetensors",
    )
    for i, source in enumerate((pickled, inside)):
        assert detect(source) == "medusa_original"
        same(weights(convert(source, tmp_path / f"made {i}", home / "v")), weights(tmp_path / "ours"))
    one = {
        n: w
        for n, w in weights(tmp_path / "ours").items()
        if not n.startswith("lm_heads.") or n.startswith("lm_heads.0.")
    }
    (tmp_path / "one").mkdir()
    save_file(one, tmp_path / "one/model.safetensors")
    (tmp_path / "one/config.json").write_text(json.dumps(dict(original_lm_head=True)))
    made = weights(convert(tmp_path / "one", tmp_path / "one made", home / "v"))
    assert all(torch.equal(made[f"lm_heads.{i}.weight"], one["lm_heads.0.weight"]) for i in range(3))
    scaled = dict(model_type="medusa", original_lm_head=True, logit_scale=0.5)
    (tmp_path / "one/config.json").write_text(json.dumps(scaled))
    with pytest.raises(ValueError, match="logit_scale is 0.5"):
        convert(tmp_path / "one", tmp_path / "no", home / "v")
    (tmp_path / "one/config.json").write_text(json.dumps(scaled | dict(model_type="cohere")))  # the verifier's
    convert(tmp_path / "one", tmp_path / "inside cohere", home / "v")
    save_file(one | {"token_map": torch.arange(9)}, tmp_path / "one/model.safetensors")
    with pytest.raises(ValueError, match="token_map restricts the heads to 9 tokens"):
        convert(tmp_path / "one", tmp_path / "no", home / "v")

    kind = SpeculatorModel.registered_class("mlp").config_class
    config = kind(
        hidden_size=H,
        vocab_size=V,
        num_layers=3,
        intermediate_size=8,
        tie_weights=True,
        speculators_config=base("mlp", home, 3),
    )
    ours = save(tmp_path / "tied", config, random_state(config, 1, [torch.float32]))
    native = Path(export_native(ours, tmp_path / "tied native"))
    full = weights(native)
    assert len(full) == 3 * 5 and torch.equal(full["speculator.proj.2.weight"], full["speculator.proj.1.weight"])
    bare = {n.removeprefix("speculator."): w for n, w in full.items() if n.removeprefix("speculator.") in weights(ours)}
    for i, tensors in enumerate((bare, {n.removeprefix("speculator."): w for n, w in full.items()})):
        source = rewritten(native, tmp_path / f"bare {i}", tensors, drop=tuple(full))
        same(weights(convert(source, tmp_path / f"bare made {i}", home / "v")), weights(ours))
    source = rewritten(native, tmp_path / "loose", {"speculator.emb.1.weight": torch.randn(V, 8)})
    with pytest.raises(ValueError, match="tie_weights is true, but emb.1.weight differs from emb.0.weight"):
        convert(source, tmp_path / "no", home / "v")


@pytest.mark.parametrize("name", ["mtp", "moe"])
def test_mtp_is_the_verifiers_layout(name, home, tmp_path):
    """A head in a dense verifier and one of experts, stored one by one, in shards: extracted, and stitched back to the
    same verifier."""
    kind = SpeculatorModel.registered_class("mtp").config_class
    config = kind(
        transformer_layer_config=json.loads((home / name / "config.json").read_text()),
        speculators_config=base("mtp", home, 2, name),
    )
    ours = save(tmp_path / "ours", config, random_state(config, 1, [torch.float32]))
    stitched = stitch_mtp(ours, home / name, tmp_path / "stitched")
    assert detect(stitched) == "mtp"
    made = convert(stitched, tmp_path / "made", stitched, speculative_tokens=2)
    same(weights(made), weights(ours))
    back = weights(export_native(made, tmp_path / "back"))
    same(back, weights(stitched))
    assert ("mtp.layers.0.mlp.experts.3.down_proj.weight" in back) == (
        name == "moe"
    ) and "mtp.layers.0.mlp.experts.gate_up_proj" not in back
    assert json.loads((tmp_path / "made/config.json").read_text())["speculators_config"]["verifier"][
        "name_or_path"
    ] == str(stitched)


def test_a_converted_drafter_drafts_the_same(eagle3, home, tmp_path):
    """Decoding with the original weights and with the converted ones: every proposed tree, every accepted count, every
    token."""
    native = Path(export_native(eagle3 / "ours", tmp_path / "native"))
    made = convert(native, tmp_path / "made", home / "v")
    prompts = [torch.arange(4) + i for i in range(3)]
    runs = []
    for folder in (eagle3 / "ours", made):
        drafter = SpeculatorModel.from_pretrained(folder).drafter()
        seen = []
        propose = drafter.propose
        drafter.propose = lambda *a, propose=propose, seen=seen: seen.append(propose(*a)) or seen[-1]
        verifier = Verifier.from_pretrained(str(home / "v"), list(drafter.aux_layer_ids))
        out = [generate(verifier, drafter, [p], k=4, max_new_tokens=12) for p in prompts]
        runs.append((out, seen))
    (a, chains_a), (b, chains_b) = runs
    flat = lambda out: [
        (list(g.tokens) if hasattr(g, "tokens") else str(g)) for r in out for g in (r if isinstance(r, list) else [r])
    ]
    assert flat(a) == flat(b)
    assert len(chains_a) == len(chains_b) > 9 and all(
        torch.equal(x.tokens, y.tokens) for x, y in zip(chains_a, chains_b)
    )


def test_the_wrong_verifier(eagle3, home, tmp_path):
    "Another hidden size, another vocabulary, and the right sizes with another model's weights."
    for name, change in (("wide", dict(hidden_size=32)), ("large", dict(vocab_size=V + 8))):
        LlamaConfig(**SHAPE | change, num_hidden_layers=LAYERS).save_pretrained(tmp_path / name)
    with pytest.raises(ValueError, match="hidden_size 16, .* has 32; give the verifier"):
        convert(eagle3 / "native", tmp_path / "no", tmp_path / "wide")
    with pytest.raises(ValueError, match="vocabulary 48, .* has 56; give the verifier"):
        convert(eagle3 / "native", tmp_path / "no", tmp_path / "large")
    LlamaConfig(**SHAPE | dict(vocab_size=30), num_hidden_layers=LAYERS).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="d2t leads to tokens 1 to 47, .*another verifier"):
        convert(eagle3 / "native", tmp_path / "no", tmp_path / "small")
    layer = draft_layer_config(LlamaConfig(**SHAPE, num_hidden_layers=LAYERS))
    config = SpeculatorModel.registered_class("eagle").config_class(
        transformer_layer_config=layer, speculators_config=base("eagle", home, 2)
    )
    save(tmp_path / "ours", config, random_state(config, 0, [torch.float32]))
    native = export_native(tmp_path / "ours", tmp_path / "native")
    assert torch.equal(weights(native)["embed_tokens.weight"], weights(home / "v")["model.embed_tokens.weight"])
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, num_hidden_layers=LAYERS)).save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match="embed_tokens.weight differs from that of verifier .*is the drafter for another verifier"
    ):
        convert(native, tmp_path / "no", tmp_path / "other")
    (tmp_path / "other/model.safetensors").unlink()  # its config alone: believed
    convert(native, tmp_path / "made", tmp_path / "other")
    assert not (tmp_path / "no").exists()


def test_errors(eagle3, home, tmp_path):
    source, v = eagle3 / "native", home / "v"
    go = lambda change, **args: convert(
        rewritten(source, tmp_path / f"source {len(list(tmp_path.iterdir()))}", **change), tmp_path / "no", v, **args
    )
    with pytest.raises(ValueError, match="misses tensors: layers.0.mlp.up_proj.weight"):
        go(dict(drop=("midlayer.mlp.up_proj.weight",)))
    with pytest.raises(ValueError, match="has unknown tensors: more"):
        go(dict(tensors=dict(more=torch.ones(1, 1, 48))))
    with pytest.raises(ValueError, match=r"misshapen tensors: norm.weight \(15,\) instead of \(16,\)"):
        go(dict(tensors={"norm.weight": torch.ones(15)}))
    with pytest.raises(ValueError, match="use_aux_hidden_state is False"):
        go(dict(config=dict(eagle_config=dict(use_aux_hidden_state=False))))
    with pytest.raises(ValueError, match="logit_scale is 0.5, and a drafter of this kind has no such option"):
        go(dict(config=dict(logit_scale=0.5)))  # vLLM reads it
    with pytest.raises(ValueError, match="fc.weight reads 2 layers and config.json does not say which"):
        go(dict(tensors={"fc.weight": torch.ones(H, 2 * H)}, drop=("eagle_config",)))
    with pytest.raises(ValueError, match="not ascending"):
        go(dict(config=dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[5, 2, 4]))))
    with pytest.raises(ValueError, match=r"outside \[0, 8\]"):
        go(dict(config=dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[2, 4, 9]))))
    with pytest.raises(ValueError, match="is not a JSON object"):
        go({}, config="norm_before_residual=true")
    with pytest.raises(ValueError, match="format='eagle4': known are .*eagle3"):
        go({}, format="eagle4")
    with pytest.raises(ValueError, match="there is no fc.weight|misses"):
        go(dict(drop=("fc.weight",)))
    with pytest.raises(ValueError, match="is a checkpoint of this library already"):
        detect(eagle3 / "ours")
    with pytest.raises(
        ValueError,
        match=(
            "(?s)no known format. Looked for.*dflash.*fc.weight and hidden_norm.weight.*midlayer.*The checkpoint has "
            "lm_head.weight.*LlamaForCausalLM"
        ),
    ):
        detect(v)
    with pytest.raises(FileExistsError, match="exists already"):
        convert(source, eagle3 / "ours", v)
    with pytest.raises(FileNotFoundError, match="neither a local folder nor"):
        convert(tmp_path / "nowhere", tmp_path / "no", v)
    with pytest.raises(ValueError, match="format='dflash': a drafter of type 'eagle3' can be written as eagle3"):
        export_native(eagle3 / "ours", tmp_path / "no", "dflash")
    bare = rewritten(source, tmp_path / "no config")
    (bare / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json with hidden_size beside model.safetensors"):
        convert(bare, tmp_path / "no", v)
    (bare / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not JSON"):
        convert(bare, tmp_path / "no", v)
    (bare / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json: holds .*must hold an object"):
        convert(bare, tmp_path / "no", v)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        detect(tmp_path / "cut")
    assert not (tmp_path / "no").exists()


def test_peagle_as_released(home, tmp_path):
    "The mask token under the name that Amazon's checkpoints have, `mask_hidden` with fewer dimensions."
    layer = draft_layer_config(LlamaConfig(**SHAPE, num_hidden_layers=LAYERS), num_layers=2)
    fields = dict(transformer_layer_config=layer, draft_vocab_size=V, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    config_class = SpeculatorModel.registered_class("peagle").config_class
    config = config_class(**fields, mask_token_id=3, speculators_config=base("peagle", home, 4))
    save(tmp_path / "ours", config, random_state(config, 0, [torch.float32]))
    native = Path(export_native(tmp_path / "ours", tmp_path / "native"))
    flat = {"mask_hidden": weights(native)["mask_hidden"].view(1, -1)}
    missing = ("mask_token_id", "eagle_config", "num_depths", "speculative_tokens", "embed_requires_grad")
    released = rewritten(native, tmp_path / "released", flat, drop=(*missing, "mask_hidden"))
    made = SpeculatorModel.from_pretrained(released, verifier=home / "v")
    same(made.saved_state(), weights(tmp_path / "ours"))
    assert (made.config.mask_token_id, made.config.proposed_tokens, made.config.num_depths) == (3, 8, 8)
    without = rewritten(released, tmp_path / "without", drop=("ptd_token_id",))
    with pytest.raises(ValueError, match="mask_token_id, pard_token, ptd_token_id: none is in config.json"):
        convert(without, tmp_path / "no", home / "v")


def test_types_without_a_foreign_format(home, tmp_path, monkeypatch):
    monkeypatch.delitem(FORMATS, "peagle")
    layer = draft_layer_config(LlamaConfig(**SHAPE, num_hidden_layers=LAYERS), "qwen3")
    config = SpeculatorModel.registered_class("peagle").config_class(
        transformer_layer_config=layer,
        draft_vocab_size=V,
        mask_token_id=3,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=base("peagle", home, 4),
    )
    save(tmp_path / "ours", config, random_state(config, 0, [torch.float32]))
    with pytest.raises(
        ValueError,
        match="'peagle', which no other project stores in a way of its own; there are dflash, dflash2, domino, dspark",
    ):
        export_native(tmp_path / "ours", tmp_path / "no")


def test_names_without_weights_are_read(home, monkeypatch):
    "Of a sharded verifier detection reads the index alone."
    monkeypatch.setattr("speculators_nb.models.formats.load_tensors", lambda *a: pytest.fail("read a tensor"))
    native = NativeCheckpoint(home / "moe")
    assert native.file.name == "model.safetensors.index.json" and len(native.index) > 10
