"""A tiny Qwen2-VL made here: pictures through its processor into rows, features and the tapped verifier; and what a
stranger's data may not do."""

import base64
import copy
import io
import json
import pickle
import shutil
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from speculators_nb.data import images
from speculators_nb.data.chat_encoding import read_conversation
from speculators_nb.data.chat_template import ChatTemplate
from speculators_nb.data.images import (
    RowInputs,
    carry_mask,
    fetch_picture,
    for_server,
    for_template,
    inputs_of,
    is_public,
    load_processor,
    open_picture,
    pictures_of,
    process,
    public_addresses,
    resolve_images,
    shown_address,
)
from speculators_nb.data.messages import BadRow, map_parts, parts_of
from speculators_nb.data.prepare import prepare_data
from speculators_nb.data.prepared_folder import load_prepared
from speculators_nb.evaluate import load
from speculators_nb.evaluate.prompts import encode_each, prompt_of, read_prompts
from speculators_nb.features.extraction import HiddenStatesClient
from speculators_nb.features.feature_folder import FeatureDataset, origin
from speculators_nb.features.from_server import chat_request
from speculators_nb.features.in_process import LiveFeatures, extract_features
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.verifier.tapped_model import Verifier

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18") and find_spec("torchvision") is None,
    reason="transformers before 5.18 needs torchvision to read pictures",
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' "
    "%}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TEXT = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_parameters=ROPE,
    bos_token_id=None,
)
FAMILIES = {
    "qwen2_vl": (
        Qwen2VLConfig,
        {},
        dict(depth=2, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=14),
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        {},
        dict(
            depth=2,
            hidden_size=16,
            out_hidden_size=32,
            intermediate_size=32,
            num_heads=2,
            patch_size=14,
            window_size=56,
            fullatt_block_indexes=[1],
        ),
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        dict(head_dim=8),
        dict(
            depth=3,
            hidden_size=16,
            out_hidden_size=32,
            intermediate_size=32,
            num_heads=2,
            patch_size=14,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
    ),
}
FAMILIES["qwen3_vl_moe"] = (
    Qwen3VLMoeConfig,
    dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    FAMILIES["qwen3_vl"][2],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("vl")
    bpe = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=CHATML)
    number = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL)))
    for name, (config, text, vision) in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(
            config(
                text_config=TEXT | text | dict(vocab_size=len(tokenizer), eos_token_id=number["<|im_end|>"]),
                vision_config=vision,
                image_token_id=number["<|image_pad|>"],
                video_token_id=number["<|video_pad|>"],
                vision_start_token_id=number["<|vision_start|>"],
                vision_end_token_id=number["<|vision_end|>"],
            )
        )
        for part in (tokenizer, Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 12), model):
            part.save_pretrained(root / name)
    (root / "pictures").mkdir()
    rng = np.random.default_rng(0)
    for name, size in (("a.png", (56, 84, 3)), ("b.png", (28, 56, 3))):
        Image.fromarray(rng.integers(0, 255, size).astype(np.uint8)).save(root / "pictures" / name)
    return root


def chats(folder):
    small = base64.b64encode((folder / "pictures/b.png").read_bytes()).decode()
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "path": "pictures/a.png"}, {"type": "text", "text": "What?"}],
                },
                {"role": "assistant", "content": "Noise."},
                {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image", "base64": small}]},
                {"role": "assistant", "content": "More noise."},
            ]
        },
        {
            "image": "pictures/b.png",
            "conversations": [{"from": "human", "value": "<image>\nColour?"}, {"from": "gpt", "value": "Many."}],
        },
        {"messages": [{"role": "user", "content": "no picture"}, {"role": "assistant", "content": "right"}]},
        {
            "images": ["pictures/a.png"],
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
                {"role": "assistant", "content": "!"},
            ],
        },
    ]


def asked(*pictures, answer="Cat."):
    parts = [{"type": "image", "path": f"pictures/{name}"} for name in pictures]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": answer},
    ]


@pytest.fixture(scope="module")
def prepared(folder):
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats(folder))))
    return prepare_data(folder / "chats.jsonl", folder / "qwen2_vl", folder / "prepared", shuffle=False)


@pytest.mark.statement("release-08")
def test_rows_with_pictures(folder, prepared):
    processor = load_processor(folder / "qwen2_vl")
    tok = processor.tokenizer
    said = [tok.decode(r["input_ids"][r["loss_mask"].bool()]) for r in prepared.rows]
    assert said == [
        "Noise.<|im_end|>\nMore noise.<|im_end|>\n",
        "Many.<|im_end|>\n",
        "right<|im_end|>\n",
        "!<|im_end|>\n",
    ]
    assert prepared.rows[2]["messages"] == [] and prepared.rows[1]["messages"][0]["content"][0]["type"] == "image_url"
    for row in prepared.rows:  # what the processor's own one-call path gives
        text = [
            m | {"content": [{"type": "image"} if p["type"] == "image_url" else p for p in m["content"]]}
            if isinstance(m["content"], list)
            else m
            for m in row["messages"]
        ]
        if text:
            theirs = processor(
                text=[tok.apply_chat_template(text, tokenize=False)],
                images=pictures_of(row["messages"]),
                return_tensors="pt",
            )
            assert theirs["input_ids"][0].tolist() == row["input_ids"].tolist()
    (stored,) = (folder / "prepared-images").iterdir()
    assert stored.read_bytes() == (folder / "pictures/b.png").read_bytes()
    again = load_prepared(folder / "prepared")
    assert again.rows[0]["messages"] == prepared.rows[0]["messages"] and again.token_freq == prepared.token_freq


@pytest.mark.statement("release-08")
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_models_own(folder, prepared, tmp_path, family):
    verifier, processor = Verifier.from_pretrained(str(folder / family)), load_processor(folder / family)
    extract_features(verifier, prepared.rows, tmp_path / "features", dtype=torch.float32, max_tokens=10_000)
    data, live = FeatureDataset(tmp_path / "features"), LiveFeatures(verifier, prepared.rows, torch.float32)
    layers = [*verifier.aux_layer_ids, verifier.num_layers]
    for i, row in enumerate(prepared.rows):
        if row["messages"]:
            whole = process(ChatTemplate(processor)(for_template(row["messages"]))[0], row["messages"], processor)
        else:
            whole = {"input_ids": row["input_ids"][None]}
        grabbed = {}
        hooks = [
            verifier.layers[j].register_forward_pre_hook(
                lambda m, a, k, j=j: grabbed.update({j: a[0] if a else k["hidden_states"]}), with_kwargs=True
            )
            for j in layers[:-1]
        ]
        hooks.append(verifier.norm.register_forward_pre_hook(lambda m, a: grabbed.update({layers[-1]: a[0]})))
        with torch.no_grad():
            verifier.model(**whole, use_cache=False)  # the model's own forward pass, from the processor's own output
        for h in hooks:
            h.remove()
        for sample in (data[i], live[i]):
            torch.testing.assert_close(
                sample["hidden_states"], torch.cat([grabbed[j][0] for j in layers[:-1]], -1), rtol=1e-5, atol=1e-6
            )  # batched text beside alone
            torch.testing.assert_close(
                sample["verifier_last_hidden_states"], grabbed[layers[-1]][0], rtol=1e-5, atol=1e-6
            )
    assert extract_features(verifier, prepared.rows, tmp_path / "features", dtype=torch.float32) == {
        "written": 0,
        "kept": 4,
    }


@pytest.mark.statement("release-09")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_drafter_is_trained_on_pictures(folder, prepared, tmp_path, family):
    "The loss falls on rows most of which have pictures."
    verifier = Verifier.from_pretrained(str(folder / family))
    extract_features(verifier, prepared.rows, tmp_path / "features", dtype=torch.float32, max_tokens=10_000)
    trainer = train_drafter(
        tmp_path / "features",
        tmp_path / "out",
        folder / family,
        "eagle3",
        eval_share=0,
        max_steps=12,
        learning_rate=3e-3,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 12 and sum(losses[-3:]) < 0.9 * sum(losses[:3])
    drafter = SpeculatorModel.from_pretrained(tmp_path / "out").drafter()
    assert drafter.aux_layer_ids == tuple(verifier.aux_layer_ids)


def test_another_picture_of_the_same_size_is_another_row(folder, tmp_path):
    "The tokens are the same, and features of the picture before would be kept."
    shutil.copytree(folder / "pictures", tmp_path / "pictures")
    verifier, chats = Verifier.from_pretrained(str(folder / "qwen2_vl")), [asked("a.png"), asked("b.png")]
    places = {"output_dir": tmp_path / "p", "image_folder": tmp_path, "val_fraction": 0, "shuffle": False}
    out = prepare_data(chats, folder / "qwen2_vl", **places)
    extract_features(verifier, out.rows, tmp_path / "features", indices=[0])
    assert len(prepare_data(chats, folder / "qwen2_vl", **places)) == 2
    old = Image.open(tmp_path / "pictures/a.png").convert("RGB")
    old.rotate(180).save(tmp_path / "pictures/a.png")
    with pytest.raises(ValueError, match="was prepared from something else: there is another picture .*/a.png"):
        prepare_data(chats, folder / "qwen2_vl", **places)
    for read in (RowInputs(out.rows, folder / "qwen2_vl"), chat_request(out.rows)):
        assert read(1)
        with pytest.raises(ValueError, match="a.png: the picture has changed since the row was prepared"):
            read(0)
    again = prepare_data(chats, folder / "qwen2_vl", overwrite=True, **places)
    assert all(a["input_ids"].tolist() == b["input_ids"].tolist() for a, b in zip(out.rows, again.rows))
    with pytest.raises(ValueError, match="another origin: data.fingerprint was"):
        extract_features(verifier, again.rows, tmp_path / "features")


def test_the_pictures_matter(folder, prepared):
    verifier = Verifier.from_pretrained(str(folder / "qwen2_vl"))
    row, template = prepared.rows.with_format(None)[0], ChatTemplate(load_processor(folder / "qwen2_vl"))
    ids, inputs = torch.tensor(row["input_ids"])[None], inputs_of(row, template)
    assert (verifier(ids, inputs=inputs).hidden_states - verifier(ids).hidden_states).abs().max() > 1e-2
    with pytest.raises(ValueError, match="Prepare the data again"):
        inputs_of(row | {"input_ids": row["input_ids"][:-1]}, template)


def test_row_inputs_that_were_read_can_be_sent_to_a_process(folder, prepared):
    "As a loader does again for each epoch; the processor is loaded anew from its folder."
    read = RowInputs(prepared.rows, folder / "qwen2_vl")
    mine, theirs = read(0), pickle.loads(pickle.dumps(read))(0)
    assert mine and mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_without_a_processor_a_verifier_reads_texts(folder, tmp_path):
    "As one that was trained on and saved with its tokenizer alone; pictures are refused by name."
    whole, alone = folder / "qwen2_vl", tmp_path / "alone"
    shutil.copytree(whole, alone, ignore=shutil.ignore_patterns("*processor_config.json"))
    talk = [{"role": "user", "content": "3 7"}, {"role": "assistant", "content": "7 3"}]

    def prepared_for(verifier, name):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"conversations": talk}))
        return prepare_data(str(file), verifier, str(tmp_path / f"{name}-rows"), val_fraction=0)

    ids = [prepared_for(v, v.name).rows[0]["input_ids"].tolist() for v in (whole, alone)]
    assert ids[0] == ids[1]
    talk[0]["content"] = [{"type": "image", "image": "data:image/png;base64,AA=="}]
    with pytest.raises(ValueError, match="prepare it with the processor of a vision-language verifier"):
        prepared_for(alone, "pictures")


def test_a_processor_that_only_the_tokenizer_names(folder, tmp_path):
    "By its own code, which needs no file of settings."
    alone = tmp_path / "alone"
    shutil.copytree(folder / "qwen2_vl", alone, ignore=shutil.ignore_patterns("*processor_config.json"))
    settings = json.loads((alone / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoProcessor": "processing_own.OwnProcessor"}
    settings.pop("processor_class", None)
    (alone / "tokenizer_config.json").write_text(json.dumps(settings))
    (alone / "processing_own.py").write_text("""
class OwnProcessor:
    register_for_auto_class = classmethod(lambda cls: None)
    from_pretrained = classmethod(lambda cls, path, **given: cls())
""")
    assert type(load_processor(alone, trust_remote_code=True)).__name__ == "OwnProcessor"


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_decoded_as_the_model_decodes_it(folder, family):
    verifier = Verifier.from_pretrained(str(folder / family))
    ids = torch.tensor([[5, 6, 7, 8]])
    theirs = verifier.model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()[4:]
    cache, token, said = None, ids, []
    for _ in range(8):
        out = verifier(token, past_key_values=cache)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        said.append(int(token))
    assert said[: len(theirs)] == theirs


def test_a_row_with_pictures_is_never_cut(folder, prepared, tmp_path):
    out = prepare_data(folder / "chats.jsonl", folder / "qwen2_vl", tmp_path / "p", max_length=40, shuffle=False)
    assert len(out) == 3 and "longer than 40 tokens" in out.dropped.index


def test_another_number_of_tokens_for_a_picture_is_another_folder(folder, prepared, tmp_path):
    "Where there are pictures; rows of text are the same, and stay."
    text = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}]
    old = prepare_data(text, folder / "qwen2_vl", tmp_path / "text")
    shutil.copytree(folder / "qwen2_vl", tmp_path / "v")
    settings = json.loads((tmp_path / "v/preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] //= 3
    (tmp_path / "v/preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="prepared from something else: image_processor was "):
        prepare_data(folder / "chats.jsonl", tmp_path / "v", folder / "prepared", shuffle=False)
    again = prepare_data(text, tmp_path / "v", tmp_path / "text")
    assert again.config["origin"] == old.config["origin"] and "image_processor" not in old.config["origin"]


@pytest.mark.parametrize(
    "part, words",
    [
        ({"type": "image", "path": "../secret.png"}, "lies outside"),
        ({"type": "image", "path": "/etc/hostname"}, "lies outside"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, "lies outside"),
        ({"type": "image", "path": "link.png"}, "lies outside"),
        ({"type": "image", "path": "none.png"}, "no such picture in .* as image_folder .'none.png'.$"),
        ({"type": "image", "url": "http://127.0.0.1:9/x.png"}, "fetched from the network"),
        ({"type": "image"}, "none left in 'images'"),
        ({"type": "video", "path": "a.mp4"}, "type 'video'"),
        ({"type": "image", "base64": "%%%"}, "base64 is damaged"),
        ({"type": "image", "base64": base64.b64encode(b"no picture").decode()}, "no picture in a format that is known"),
    ],
)
def test_what_a_data_set_may_not_do(tmp_path, part, words):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    (tmp_path / "data/link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(Exception, match=words):
        resolve_images(
            {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]},
            tmp_path / "data",
            store=tmp_path / "store",
        )
    assert not list(tmp_path.glob("store/*"))


def picture(kind, size=(8, 8)):
    with io.BytesIO() as f:
        Image.new("RGB", size).save(f, kind)
        return f.getvalue()


def test_formats_and_sizes_of_pictures(tmp_path):
    """Five formats of some forty that Pillow opens, whatever the name says, and no more pixels than fit into memory;
    seen in the header, in a data set's bytes and in its files."""
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        assert open_picture(picture(kind)).format == kind
    huge = bytearray(picture("PNG"))
    huge[16:24] = (20_000).to_bytes(4, "big") * 2
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    refused = {
        kind: (picture(kind), "no picture in a format that is known; convert it to one of PNG")
        for kind in ("TIFF", "PPM", "EPS", "ICO", "PDF", "TGA", "PCX", "ICNS")
    }
    refused["pixels"] = (bytes(huge), "pixels; make it smaller")
    for name, (content, words) in refused.items():
        (tmp_path / f"{name}.png").write_bytes(content)
        for part in (
            {"type": "image", "path": f"{name}.png"},
            {"type": "image", "base64": base64.b64encode(content).decode()},
        ):
            with pytest.raises(ValueError, match=words):
                resolve_images(
                    {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]},
                    tmp_path,
                    store=tmp_path / "store",
                )
    assert not list(tmp_path.glob("store/*"))


def test_pictures_of_datasets_and_pillow(tmp_path):
    with io.BytesIO() as f:
        Image.new("RGB", (8, 8), "red").save(f, "PNG")
        data = f.getvalue()
    for image in ({"bytes": data, "path": None}, Image.new("RGB", (8, 8), "red")):
        messages = resolve_images(
            {"images": [image], "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            tmp_path,
            store=tmp_path / "store",
        )
        assert pictures_of(messages)[0].getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(ValueError, match="more pictures than the messages have places for .* .1 more.$"):
        resolve_images({"images": [data], "messages": [{"role": "user", "content": "x"}]}, tmp_path)


def test_pictures_are_loaded_as_transformers_loads_them(tmp_path):
    "Of any mode, turned by its EXIF data, from a file and from memory; a server is sent what it reads alike."
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 40, 3)).astype(np.uint8))
    turned = Image.Exif()
    turned[images.ORIENTATION] = 6
    transparent = noise.convert("RGBA")
    transparent.putalpha(noise.convert("L"))
    for name, picture, how, is_sent in (
        ("a.jpg", noise, {}, True),
        ("b.jpg", noise, {"exif": turned}, False),
        ("c.jpg", noise.convert("CMYK"), {}, False),
        ("d.png", noise.convert("P"), {}, False),
        ("e.png", transparent, {}, False),
        ("f.gif", noise, {"save_all": True, "append_images": [noise.rotate(180)]}, False),
    ):
        file = tmp_path / name
        picture.save(file, **how)
        theirs = np.array(load_image(str(file)))
        kind, content = for_server(file)
        assert (content == file.read_bytes()) == is_sent and kind == ("jpeg" if is_sent else "png")
        sent = Image.open(io.BytesIO(content))
        assert sent.mode == "RGB" and (np.array(sent) == theirs).all()
        with Image.open(file) as opened:
            for source in (name, opened):
                chat = {"images": [source], "messages": [{"role": "user", "content": [{"type": "image"}]}]}
                (ours,) = pictures_of(resolve_images(chat, tmp_path, store=tmp_path))
                assert (np.array(ours) == theirs).all(), (name, source)


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_exif_data_that_cannot_be_read_turn_nothing(tmp_path, kind):
    "Pictures of the web have such data; those of a JPEG are passed over by Pillow itself."
    file = tmp_path / f"a.{kind}"
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 40, 3)).astype(np.uint8))
    picture.save(file, exif=b"Exif\0\0no data of EXIF", **({"lossless": True} if kind == "webp" else {}))
    assert for_server(file) == (kind, file.read_bytes())
    with Image.open(file) as opened:
        for source in (file.name, opened):
            chat = {"images": [source], "messages": [{"role": "user", "content": [{"type": "image"}]}]}
            (ours,) = pictures_of(resolve_images(chat, tmp_path, store=tmp_path))
            assert (np.array(ours) == np.array(picture)).all()


def test_a_damaged_picture_in_memory_is_named(tmp_path):
    "As `datasets` gives one, which has only read its header; the report says what is wrong, and where."
    file = tmp_path / "a.jpg"
    Image.effect_noise((200, 200), 50).convert("RGB").save(file)
    with Image.open(io.BytesIO(file.read_bytes()[:3000])) as picture:
        chat = {"images": [picture], "messages": [{"role": "user", "content": [{"type": "image"}]}]}
        with pytest.raises(BadRow, match="message 0: the picture is damaged; save it again"):
            resolve_images(chat, tmp_path, store=tmp_path)


def test_the_same_fault_of_many_pictures_is_one_line_of_the_report(folder, tmp_path):
    (tmp_path / "pictures").mkdir()
    content = (folder / "pictures/a.png").read_bytes()
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / "pictures" / name).write_bytes(content if name == "a.png" else content[: len(content) // 2])
    chats = [asked(f"{name}.png", answer=name) for name in "abcxyz"]
    for answer in ("one", "two"):
        chats.append(asked("a.png", answer=answer))
        chats[-1][0]["content"][-1]["text"] = f"Is <|image_pad|> read, {answer}?"
    out = prepare_data(chats, folder / "qwen2_vl", tmp_path / "p", val_fraction=0, image_folder=tmp_path)
    assert out.dropped["count"].to_dict() == {
        f"no such picture in {str(tmp_path)!r}; pass the folder that the paths start from as image_folder": 3,
        "the picture is damaged; save it again": 2,
        "a text spells '<|image_pad|>', which stands for a picture; take it out": 2,
    }
    assert out.dropped["first"].tolist() == [
        "conversation 3, message 0: 'pictures/x.png'",
        f"conversation 1, {tmp_path}/pictures/b.png: image file is truncated",
        "conversation 6, message 0",
    ]


def test_processes_that_read_pictures_do_not_wait_for_threads_of_their_parent(folder, tmp_path, monkeypatch):
    "A child has none of them, and torch would wait for them without end; processors of torchvision compute with torch."
    process = images.process

    def process_alone(*arguments):
        assert torch.get_num_threads() == 1
        return process(*arguments)

    monkeypatch.setattr(images, "process", process_alone)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        chats = [asked("b.png", answer=f"{i}") for i in range(8 * 64)]
        out = prepare_data(chats, folder / "qwen2_vl", tmp_path / "p", image_folder=folder, num_proc=2)
    finally:
        torch.set_num_threads(threads)
    assert len(out) == len(chats)


def test_which_conversations_hold_pictures():
    said = {"role": "user", "content": "x"}
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "a.png"}]
    for row, places in (
        ({"image": "a.png", "messages": [said]}, [""]),
        ({"messages": [said, said | {"content": parts}]}, ["message 1"]),
        ({"images": [], "messages": [said | {"content": parts[:1]}]}, []),
        ({"input_ids": [1], "loss_mask": [1], "images": [], "messages": [said]}, []),
    ):
        assert read_conversation(row).pictured == places


def test_tokens_without_their_pictures_are_refused(folder, prepared, tmp_path):
    "As `regenerate` writes them, with what a server answered to pictures; and those of a prepared folder."
    ids = {"input_ids": [1], "loss_mask": [1]}
    asks = asked("a.png")
    for row in (ids | {"images": ["x"]}, ids | {"messages": asks}, ids | {"messages": json.dumps(asks)}):
        with pytest.raises(ValueError, match="is tokenised, and has pictures, which would be lost"):
            read_conversation(row)
    out = prepare_data(folder / "prepared", folder / "qwen2_vl", tmp_path / "p", val_fraction=0)
    assert len(out) == 1 and out.dropped["count"].tolist() == [3]


def test_a_server_is_asked_for_a_row_with_pictures_as_it_was_rendered(folder, prepared, tmp_path):
    "With its tools and the arguments of the template; the pictures are inside."
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    chat = {"messages": asked("a.png"), "tools": tools}
    kwargs = {"enable_thinking": False}
    out = prepare_data(
        [chat, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]],
        folder / "qwen2_vl",
        tmp_path / "p",
        shuffle=False,
        val_fraction=0,
        image_folder=folder,
        template_kwargs=kwargs,
    )
    content = base64.b64encode((folder / "pictures/a.png").read_bytes()).decode()
    inside = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    question, answer = asked("a.png")
    question["content"][0] = inside
    request = chat_request(out.rows)
    assert request(0) == {
        "messages": [question, answer],
        "tools": tools,
        "tool_choice": "none",
        "chat_template_kwargs": kwargs,
    }
    assert request(1) is None and chat_request(prepared.rows)(0).keys() == {"messages"}

    client, sent = object.__new__(HiddenStatesClient), []
    client.model, client._post = "m", lambda path, body: sent.append((path, body)) or ({}, [1, 2])
    client._post_row("name", [1, 2], request(0))
    ((path, body),) = sent
    assert path == "/v1/chat/completions" and not body["add_generation_prompt"] and request(0).items() <= body.items()


def test_prompts_with_pictures_are_for_a_server(folder, tmp_path):
    "Held-out ones; this library's decoder would read their placeholders, and no picture."
    chats = [asked("a.png", answer="1"), asked("b.png", answer="2")]
    prepare_data(chats, folder / "qwen2_vl", tmp_path / "p", image_folder=folder, val_fraction=0.5)
    (prompt,) = read_prompts(tmp_path / "p/heldout.jsonl")
    tokenizer = load_processor(folder / "qwen2_vl").tokenizer
    (refused,) = encode_each([prompt], tokenizer)
    assert "a prompt has pictures, which are read by a server alone" in str(refused)
    (message,) = map_parts(prompt.messages, load._as_sent)
    assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    elsewhere = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]}]
    assert map_parts(elsewhere, load._as_sent) == elsewhere
    for messages in (elsewhere, json.dumps(elsewhere)):
        assert prompt_of({"input_ids": [1, 2], "messages": messages}).messages == elsewhere


def test_what_is_no_file_here_is_for_the_server_to_read():
    "A file of its machine, an address beside a text that spells one; a call of a tool has no content."
    for url in ("file:///no/such/folder/a.png", "https://x.org/a.png"):
        content = [{"type": "text", "text": "file:///tmp"}, {"type": "image_url", "image_url": {"url": url}}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "tool_calls": []}]
        assert map_parts(messages, load._as_sent) == messages


def test_messages_that_a_table_holds_as_text(folder, prepared):
    "As upstream's library writes them: the pictures in them are read."
    row = prepared.rows.with_format(None)[0]
    table = Dataset.from_list([row | {"messages": json.dumps(row["messages"])}])
    processor = load_processor(folder / "qwen2_vl")
    ours, theirs = RowInputs(table, processor)(0), RowInputs(prepared.rows, processor)(0)
    assert ours.keys() == theirs.keys() and (ours["pixel_values"] == theirs["pixel_values"]).all()
    assert chat_request(table)(0) == chat_request(prepared.rows)(0)


def test_a_table_whose_parts_all_have_the_same_fields(prepared):
    "As `datasets` infers them: a text has a digest of None, and so has a picture of a row that was prepared without."
    row = prepared.rows.with_format(None)[0]
    row["messages"] = row["messages"][::2]  # the questions
    before = copy.deepcopy(row)
    pictures = [part for part in parts_of(before["messages"]) if part.pop("sha256", None)]
    table = Dataset.from_list([row, before])
    assert pictures and None in [part["sha256"] for part in parts_of(table[0]["messages"])]
    assert origin({}, [1], table, "bfloat16")["data"]["fingerprint"]
    request = chat_request(table)
    urls = [
        [part["image_url"]["url"] for part in parts_of(request(i)["messages"]) if part["type"] == "image_url"]
        for i in (0, 1)
    ]
    assert urls[0] == urls[1] and len(urls[0]) == len(pictures)


def test_a_mask_is_carried_or_refused():
    mask = np.array([0, 0, 1, 0, 1], bool)
    assert carry_mask(mask, [1, 9, 2, 9, 2], [1, 8, 9, 9, 9, 8, 2, 8, 9, 9, 8, 2]).tolist() == [False] * 6 + [True] + [
        False
    ] * 4 + [True]
    with pytest.raises(ValueError, match="trained tokens are not in what the processor made of the text, .* .1 of 2.$"):
        carry_mask(mask, [1, 9, 2, 9, 2], [1, 9, 9, 2])


def test_a_mask_is_carried_over_turns_that_are_alike():
    "Also where borders of a picture change the tokens beside it (8), and a picture in an answer (4, 9, 5) is no text."
    turn, expanded = [1, 9, 6, 2, 3], [1, 9, 9, 9, 6, 2, 3]
    trained = np.array([0, 0, 0, 1, 1], bool)
    mask = carry_mask(np.tile(trained, 4), turn * 4, expanded * 4)
    assert mask.tolist() == ([False] * 5 + [True] * 2) * 4
    mask = carry_mask(np.array([0, 0, 0, 1, 1], bool), [7, 9, 1, 7, 2], [8, 9, 9, 9, 1, 7, 2])
    assert mask.tolist() == [False] * 5 + [True] * 2
    mask = carry_mask(np.array([0, 1, 1, 1, 1, 1], bool), [1, 2, 4, 9, 5, 3], [1, 2, 4, 9, 9, 5, 3])
    assert mask.tolist() == [False, True, True, False, False, True, True]


def test_the_same_question_of_several_pictures(folder, tmp_path):
    chat = {"messages": [message for name in "abab" for message in asked(f"{name}.png")]}
    out = prepare_data(
        [chat], folder / "qwen2_vl", tmp_path / "p", val_fraction=0, image_folder=folder, max_length=1000
    )
    tokenizer, (row,) = load_processor(folder / "qwen2_vl").tokenizer, out.rows
    assert tokenizer.decode(row["input_ids"][row["loss_mask"].bool()]) == "Cat.<|im_end|>\n" * 4


def test_pictures_without_an_answer_are_counted(folder, tmp_path):
    chats = [asked("a.png"), asked("b.png")[:1], [{"role": "assistant", "content": asked("a.png")[0]["content"]}]]
    out = prepare_data(chats, folder / "qwen2_vl", tmp_path / "p", val_fraction=0, image_folder=folder)
    assert out.dropped["count"].to_dict() == {"no assistant message that answers another": 2}


PUBLIC = ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"]
V4 = "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255"
V6 = "::1 :: fe80::1 fc00::1 ff02::1 ::ffff:127.0.0.1 ::127.0.0.1 64:ff9b::a00:1 2002:7f00:1:: 2001:0:53aa:64c::1"


def test_which_addresses_are_public():
    assert [a for a in [*PUBLIC, *V4.split(), *V6.split()] if is_public(a)] == PUBLIC


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "127.1", "localhost"])
def test_a_host_inside_is_found_however_it_is_spelt(host):
    with pytest.raises(ValueError, match="inside of this network"):
        public_addresses(host, 80)
    with pytest.raises(ValueError, match="inside of this network"):
        fetch_picture(f"http://{host}:9/")


class Page(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        path, _, rest = self.path[1:].partition("/")
        self.send_response(302 if path == "to" else 404 if path == "absent" else 200)
        if path == "to":
            self.send_header("Location", rest or "/to/")
        self.end_headers()
        while path == "endless":
            self.wfile.write(bytes(1 << 20))
        for _ in range(100 if path == "slow" else 0):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)
        if path == "picture":
            self.wfile.write(b"a picture")


@pytest.fixture
def server(monkeypatch):
    "On a free port of this machine, which counts as public."
    real = images.is_public
    monkeypatch.setattr(images, "is_public", lambda a: a == "127.0.0.1" or real(a))
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_pictures_are_fetched(server):
    assert fetch_picture(server + "picture") == fetch_picture(server + "to/" + server + "picture") == b"a picture"


@pytest.mark.parametrize(
    "path, limits, words",
    [
        ("absent", {}, "status 404"),
        ("to/http://10.0.0.1/", {}, "the host '10.0.0.1' is 10.0.0.1, an address inside of this network"),
        ("to/http://[::ffff:10.0.0.1]/", {}, "is ::ffff:10.0.0.1, an address inside of this network"),
        ("to/file:///etc/passwd", {}, "the scheme 'file' is not fetched: only http and https are"),
        ("to/", {}, "more than 5 redirections"),
        ("endless", {"PICTURE_BYTES": 1 << 20}, "the reply is larger than 1 MiB"),
        ("slow", {"PICTURE_SECONDS": 0.3}, "not there within 0.3 s"),
    ],
)
def test_what_is_not_fetched(server, monkeypatch, path, limits, words):
    for name, limit in limits.items():
        monkeypatch.setattr(images, name, limit)
    with pytest.raises(ValueError) as e:
        fetch_picture(server + path)
    assert words in str(e.value)


def test_an_address_is_shown_without_its_secrets():
    assert shown_address("https://me:word@example.org/a.png?signature=secret#x") == "https://example.org/a.png"
