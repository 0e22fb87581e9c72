"""Drafters and verifiers on the disk whose files are torn, of two models, or hold what no model can hold: each is
refused by file and tensor, by whatever opens it."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from speculators_nb.cli.data_commands import open_verifier
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.serve.serve_command import what_to_serve
from speculators_nb.verifier.tapped_model import Verifier

from .harness import GOOD, RELEASE, Case

DRAFTER, VERIFIER, HEADS = GOOD["drafter"], GOOD["verifier"], RELEASE / "medusa"


def copy_of(source, tensors=None, config=None, drop=(), files=None, index=None):
    """A function that puts a copy of a checkpoint at a path, changed: `tensors` name -> new tensor or a function of the
    old one, `drop` names left out, `config` a function that changes config.json in place, `files` name -> content
    (None: removed), `index` what model.safetensors.index.json says of the files."""

    def put(path):
        shutil.copytree(source, path, ignore=lambda *_: ["checkpoint-2"])
        state = {n: w for n, w in load_file(path / "model.safetensors").items() if n not in drop}
        for name, new in (tensors or {}).items():
            state[name] = new(state[name].clone()) if callable(new) else new
        save_file({n: w.contiguous() for n, w in state.items()}, path / "model.safetensors", {"format": "pt"})
        if config:
            said = json.loads((path / "config.json").read_text())
            config(said)
            (path / "config.json").write_text(json.dumps(said))
        for name, content in (files or {}).items():
            (path / name).unlink(missing_ok=True)
            if content is not None:
                (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        if index:
            index(path, state)

    return put


def one(value):
    "A tensor with one value replaced."

    def change(w):
        w.view(-1)[w.numel() // 2] = value
        return w

    return change


def shards(path, state, names=None, lost=None, foreign=None):
    "Two shards and their index; `lost` is not written, `foreign` stands in the index for the second."
    halves = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for i, n in enumerate(sorted(state)):
        halves[list(halves)[i % 2]][n] = state[n]
    (path / "model.safetensors").unlink()
    for name, part in halves.items():
        if name != lost:
            save_file(part, path / name)
    weight_map = {
        n: (foreign or name) if name.endswith("2-of-00002.safetensors") else name
        for name, part in halves.items()
        for n in part
    }
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | (names or {})}))


def beside(path, state):
    "An index of two shards beside a whole model.safetensors of another time."
    whole = (path / "model.safetensors").read_bytes()
    shards(path, state)
    (path / "model.safetensors").write_bytes(whole)


HALF = (DRAFTER / "model.safetensors").read_bytes()
ENTRY = "layers.0.mlp.up_proj.weight"
DRAFTERS = {  # what is wrong -> (how it is made, what must be answered)
    "NaN in a layer": (
        dict(tensors={ENTRY: one(torch.nan)}),
        f"checkpoint '.*new': tensor {ENTRY} holds NaN or infinity; train it anew, or take an earlier",
    ),
    "all NaN": (
        dict(
            tensors={
                n: lambda w: w * torch.nan if w.is_floating_point() else w
                for n in ("fc.weight", ENTRY, "norm.weight", "layers.0.mlp.down_proj.weight")
            }
        ),
        "tensor fc.weight holds NaN or infinity; tensor layers.0.mlp.down_proj.weight .* …",
    ),
    "a tensor is missing": (dict(drop=[ENTRY]), f"misses tensors: {ENTRY}; its config.json describes another model"),
    "t2d is missing": (dict(drop=["t2d"]), "misses tensors: t2d"),
    "a tensor too many": (dict(tensors={"extra.weight": torch.ones(2)}), "has unknown tensors: extra.weight"),
    "another shape": (
        dict(tensors={"norm.weight": torch.ones(15)}),
        "has misshapen tensors: norm.weight \\(15,\\) instead of \\(16,\\)",
    ),
    "transposed": (
        dict(tensors={ENTRY: lambda w: w.T}),
        f"has misshapen tensors: {ENTRY} \\(16, 32\\) instead of \\(32, 16\\)",
    ),
    "a scalar": (dict(tensors={"norm.weight": torch.ones(())}), "has misshapen tensors: norm.weight \\(\\) instead"),
    "integers for weights": (
        dict(tensors={"norm.weight": torch.ones(16, dtype=torch.int32)}),
        "tensor norm.weight holds torch.int32, the config describes torch.float32",
    ),
    "eight bits for weights": (
        dict(tensors={"norm.weight": torch.ones(16).to(torch.float8_e4m3fn)}),
        "tensor norm.weight holds torch.float8_e4m3fn",
    ),
    "fractions for d2t": (
        dict(tensors={"d2t": lambda w: w.float()}),
        "tensor d2t holds torch.float32, the config describes torch.int64",
    ),
    "t2d keeps another number": (
        dict(tensors={"t2d": torch.ones(64, dtype=torch.bool)}),
        "t2d keeps 64 tokens, but draft_vocab_size=40",
    ),
    "d2t and t2d disagree": (
        dict(tensors={"d2t": lambda w: w.flip(0)}),
        "d2t\\[0\\]=\\d+ maps draft id 0 to verifier id \\d+, but by t2d it is",
    ),
    "another size": (
        dict(config=lambda c: c["transformer_layer_config"].update(hidden_size=32)),
        "misshapen tensors: ",
    ),
    "a giant": (
        dict(config=lambda c: c["transformer_layer_config"].update(hidden_size=2**20, intermediate_size=2**24)),
        "misshapen tensors: ",
    ),
    "two layers by the config": (
        dict(
            config=lambda c: c["transformer_layer_config"].update(
                num_hidden_layers=2, layer_types=["full_attention"] * 2
            )
        ),
        "misses tensors: layers.1",
    ),
    "another algorithm": (
        dict(config=lambda c: c.update(speculators_model_type="dflash", mask_token_id=3)),
        "misses tensors|has unknown tensors|block_size|transformer|aux_hidden_state_layer_ids is None; name",
    ),
    "no weights": (
        dict(files={"model.safetensors": None}),
        "new: no model.safetensors and no model.safetensors.index.json",
    ),
    "half of the weights": (
        dict(files={"model.safetensors": HALF[: len(HALF) // 2]}),
        "model.safetensors: not a complete safetensors file",
    ),
    "text for weights": (
        dict(files={"model.safetensors": "version https://git-lfs.github.com/spec/v1\n"}),
        "model.safetensors: is a pointer of Git LFS",
    ),
    "a header without end": (
        dict(files={"model.safetensors": (2**62).to_bytes(8, "little") + b"{}"}),
        "model.safetensors: not a complete safetensors file",
    ),
    "no config": (dict(files={"config.json": None}), "new: has no config.json, so it is no drafter"),
    "an index without shards": (
        dict(index=lambda p, s: shards(p, s, lost="model-00002-of-00002.safetensors")),
        "model-00002-of-00002.safetensors: no such file, and model.safetensors.index.json says",
    ),
    "an index of other names": (
        dict(index=lambda p, s: shards(p, s, {"extra.weight": "model-00001-of-00002.safetensors"})),
        "no tensor named extra.weight|unknown tensors: extra.weight",
    ),
    "an index out of the folder": (
        dict(index=lambda p, s: shards(p, s, foreign="../x.safetensors")),
        "'../x.safetensors' leads out of the folder",
    ),
    "an index of numbers": (
        dict(files={"model.safetensors": None, "model.safetensors.index.json": '{"weight_map": {"a": 3}}'}),
        "index.json|leads out of the folder|file name 3",
    ),
    "an index cut off": (
        dict(files={"model.safetensors": None, "model.safetensors.index.json": '{"weight_map": {"a'}),
        "model.safetensors.index.json: not JSON",
    ),
    "an index of another time": (
        dict(index=beside),
        (
            "holds model.safetensors and model.safetensors.index.json, which names other files; remove whichever is "
            "the older"
        ),
    ),
}


def in_fp8(w):
    return w.to(torch.float8_e4m3fn)


def method(**fields):
    "Says in config.json how the weights are quantised."
    return lambda c: c["transformer_layer_config"].update(quantization_config=fields)


SCALE, COMPRESSED = f"{ENTRY}_scale", dict(config=method(quant_method="compressed-tensors"))
DRAFTERS |= {
    "FP8 without its scale": (
        dict(tensors={ENTRY: in_fp8}, **COMPRESSED),
        f"new: tensor {ENTRY} is FP8 and has no {SCALE}; fetch the checkpoint again",
    ),
    "FP8 with a scale of another shape": (
        dict(tensors={ENTRY: in_fp8, SCALE: torch.ones(3, 1)}, **COMPRESSED),
        f"new: tensor {SCALE} has shape \\(3, 1\\), for a weight of .*needed is one number, one for each row, or",
    ),
    "FP8 with exponents for scales": (
        dict(tensors={ENTRY: in_fp8, SCALE: torch.ones(1, dtype=torch.uint8)}, **COMPRESSED),
        f"new: tensor {SCALE} holds torch.uint8, no factors; take the checkpoint that is not quantised",
    ),
    "FP8 with a scale that is NaN": (
        dict(tensors={ENTRY: in_fp8, SCALE: torch.tensor(torch.nan)}, **COMPRESSED),
        f"new: tensor {ENTRY} times its scale is NaN or infinity; fetch the checkpoint again",
    ),
    "FP8 in blocks of nothing": (
        dict(
            tensors={ENTRY: in_fp8, SCALE: torch.ones(1)},
            config=method(quant_method="fp8", weight_block_size=[128, "128"]),
        ),
        "new: quantization_config: a block of \\[128, '128'\\]; write rows and columns there",
    ),
    "FP8 of weights that were rotated": (
        dict(
            tensors={ENTRY: in_fp8, SCALE: torch.ones(1)},
            config=method(quant_method="compressed-tensors", transform_config=dict(config_groups=dict(R1={}))),
        ),
        "and transform_config is set; a drafter is read in FP8 .*take its checkpoint that is not quantised",
    ),
    "FP8 by a method that is not known": (
        dict(tensors={ENTRY: in_fp8, SCALE: torch.ones(1)}, config=method(quant_method="quark")),
        f"new: quantization_config.quant_method='quark': {ENTRY} holds torch.float8_e4m3fn; a drafter is read in FP8",
    ),
    "AWQ": (
        dict(
            tensors={ENTRY.replace("weight", "qweight"): torch.ones(4, 4, dtype=torch.int32)},
            drop=[ENTRY],
            config=method(quant_method="awq"),
        ),
        "new: quantization_config.quant_method='awq': .*qweight holds torch.int32; .*take its checkpoint that is not",
    ),
    "NVFP4 of compressed-tensors": (
        dict(
            tensors={
                f"{ENTRY}_packed": torch.ones(4, 4, dtype=torch.uint8),
                SCALE: in_fp8(torch.ones(4, 1)),
                f"{ENTRY}_global_scale": torch.ones(1),
            },
            drop=[ENTRY],
            config=method(quant_method="compressed-tensors", format="nvfp4-pack-quantized"),
        ),
        f"new: quantization_config.quant_method='compressed-tensors': {ENTRY}_packed holds torch.uint8",
    ),
    "eight bits that are whole numbers": (
        dict(tensors={ENTRY: lambda w: w.to(torch.int8), SCALE: torch.ones(1)}, **COMPRESSED),
        f"{ENTRY} holds torch.int8; a drafter is read in FP8",
    ),
}
USERS = {  # who opens it: a command each, and the function
    "from_pretrained": lambda folder: SpeculatorModel.from_pretrained(folder / "new"),
    "evaluate": "evaluate {here}/new {corpus} --verifier {here}/verifier",
    "export": "export {here}/new {here}/out",
}
ALSO = (
    "NaN in a layer",
    "a tensor is missing",
    "d2t and t2d disagree",
    "half of the weights",
    "an index without shards",
    "another size",
    "no config",
    "an index of another time",
    "FP8 without its scale",
    "AWQ",
)  # by every user


def layers(w):
    return torch.cat([w, w])


VERIFIERS = {
    "fewer layers in the config": (
        dict(config=lambda c: c.update(num_hidden_layers=2, layer_types=["full_attention"] * 2)),
        (
            "model.layers.2.input_layernorm.weight is of a layer beyond num_hidden_layers=2.*Take both files from one "
            "checkpoint"
        ),
    ),
    "more layers in the config": (
        dict(config=lambda c: c.update(num_hidden_layers=5, layer_types=["full_attention"] * 5)),
        "config.json and weights do not belong together: model.layers.4.* is missing",
    ),
    "a tensor is missing": (dict(drop=["model.norm.weight"]), "model.norm.weight is missing"),
    "the head is missing": (dict(drop=["lm_head.weight"]), "lm_head.weight is missing"),
    "tied by the config, not by the weights": (
        dict(config=lambda c: c.update(tie_word_embeddings=True)),
        "the head differs from the embeddings, and by the config \\(tie_word_embeddings\\) they are one",
    ),
    "another shape": (
        dict(tensors={"model.norm.weight": torch.ones(15)}),
        "model.norm.weight is \\[15\\], by the config \\[16\\]",
    ),
    "another vocabulary": (
        dict(config=lambda c: c.update(vocab_size=65)),
        "lm_head.weight is \\[64, 16\\], by the config \\[65, 16\\]",
    ),
    "NaN in a layer": (
        dict(tensors={"model.layers.1.mlp.up_proj.weight": one(torch.nan)}),
        "NaN or infinity in model.layers.1.mlp.up_proj.weight; fetch or save the weights again",
    ),
    "no weights": (dict(files={"model.safetensors": None}), "has no weights \\(\\*.safetensors\\)"),
    "half of the weights": (
        dict(files={"model.safetensors": (VERIFIER / "model.safetensors").read_bytes()[:2000]}),
        "its weights cannot be read .*fetch or save them again",
    ),
    "no config": (dict(files={"config.json": None}), "has no config.json"),
    "a config cut off": (dict(files={"config.json": '{"model_type": "qw'}), "config.json: not JSON .*cut off"),
    "a config that says nothing": (dict(files={"config.json": "{}"}), "config.json: .*(model_type|Unrecognized model)"),
    "an unknown family": (dict(config=lambda c: c.update(model_type="no_such_model")), "config.json: .*no_such_model"),
    "a negative size": (
        dict(config=lambda c: c.update(hidden_size=-16)),
        "config.json: hidden_size=-16: must be at least 1",
    ),
    "positions that are text": (
        dict(config=lambda c: c.update(max_position_embeddings="long")),
        "config.json: max_position_embeddings='long': is text, and must be a whole number",
    ),
    "a rope of nothing": (dict(config=lambda c: c.update(rope_parameters=3)), "config.json: .*rope"),
    "a vocabulary of one": (
        dict(config=lambda c: c.update(vocab_size=1)),
        "config.json: pad_token_id=2: must be less than vocab_size=1",
    ),
    "a drafter": (
        dict(config=lambda c: c.update(speculators_model_type="eagle3")),
        "is a drafter \\(speculators_model_type='eagle3'\\); name the verifier",
    ),
}
BORROWED = {  # a verifier that a drafter borrows from
    "NaN in the embeddings": (
        dict(tensors={"model.embed_tokens.weight": one(torch.nan)}),
        "verifier '.*new': its embeddings hold NaN or infinity; fetch or save it again",
    ),
    "NaN in the final norm": (
        dict(tensors={"model.norm.weight": one(torch.nan)}),
        "its norm_weight hold NaN or infinity",
    ),
    "no head of its own": (dict(drop=["lm_head.weight"]), "lm_head.*tie_word_embeddings"),
    "tied by the config, not by the weights": (
        dict(config=lambda c: c.update(tie_word_embeddings=True)),
        "tie_word_embeddings",
    ),
    "another size": (
        dict(config=lambda c: c.update(hidden_size=24)),
        "has hidden_size 24, this drafter's LlamaConfig has 16; they must be equal",
    ),
    "another vocabulary": (
        dict(tensors={n: torch.ones(65, 16) for n in ("lm_head.weight", "model.embed_tokens.weight")}),
        "embeds 65 tokens|its head has 65 rows",
    ),
    "no final norm": (dict(drop=["model.norm.weight"]), "found no tensor for its norm_weight"),
}


def _tokenizer(text, name="tokenizer.json"):
    def put(path):
        shutil.copytree(VERIFIER, path)
        (path / name).write_text(text)

    return put


TOKENIZERS = {
    "none": (copy_of(VERIFIER), "new: has no tokenizer .*save the verifier's there"),
    "cut off": (_tokenizer('{"version": "1.0", "mod'), "new: its tokenizer cannot be read"),
    "a list": (_tokenizer("[]", "tokenizer_config.json"), "new: its tokenizer cannot be read"),
}


def _with_tokenizer(path):
    shutil.copytree(VERIFIER, path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOOD["tiny"] / name, path)


def _native(path):
    "A folder that somebody else filled."
    path.mkdir()
    (path / "config.json").write_text("{}")


CASES = [
    *(
        Case(f"from_pretrained: {name}", USERS["from_pretrained"], expect, {"new": copy_of(DRAFTER, **how)})
        for name, (how, expect) in DRAFTERS.items()
    ),
    *(
        Case(
            f"{user}: {name}",
            USERS[user],
            DRAFTERS[name][1],
            {"new": copy_of(DRAFTER, **DRAFTERS[name][0]), "verifier": _with_tokenizer},
        )
        for user in ("evaluate", "export")
        for name in ALSO
    ),
    *(
        Case(
            f"Verifier: {name}",
            lambda folder: Verifier.from_pretrained(str(folder / "new")),
            expect,
            {"new": copy_of(VERIFIER, **how)},
        )
        for name, (how, expect) in VERIFIERS.items()
    ),
    *(
        Case(
            f"borrowing: {name}",
            lambda folder: SpeculatorModel.from_pretrained(DRAFTER, verifier=folder / "new"),
            expect,
            {"new": copy_of(VERIFIER, **how)},
        )
        for name, (how, expect) in BORROWED.items()
    ),
    *(
        Case(f"tokenizer: {name}", lambda folder: open_verifier(folder / "new"), expect, {"new": put})
        for name, (put, expect) in TOKENIZERS.items()
    ),
    Case(
        "serve: a native folder of another drafter",
        lambda folder: what_to_serve(HEADS, native=folder / "native", verifier=VERIFIER, engine_version="0.32"),
        "native='.*native': holds the layout of another drafter; name another",
        {"native": _native},
    ),
    Case(
        "from_pretrained: features",
        lambda folder: SpeculatorModel.from_pretrained(GOOD["features"]),
        "features: has no config.json, so it is no drafter, but features; train a drafter",
    ),
    Case(
        "from_pretrained: nothing",
        lambda folder: SpeculatorModel.from_pretrained(folder / "none"),
        "none: neither a local folder nor a model",
    ),
    Case(
        "from_pretrained: neither path nor config",
        lambda folder: SpeculatorModel.from_pretrained(),
        "from_pretrained needs a path or a config",
    ),
]
