"""MTP heads that transformers computes: a tiny random verifier of every family that transformers lists, its head under
the names of its checkpoints. The reference is transformers' own `MtpModel`."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from speculators_nb.cli import main as cli
from speculators_nb.core.files import NotSupported
from speculators_nb.decode.generate import generate
from speculators_nb.decode.tree import Sampling
from speculators_nb.features.in_process import extract_features
from speculators_nb.models import mtp_transformers
from speculators_nb.models.base import SpeculatorModel, verify_training_compatible
from speculators_nb.models.convert import convert
from speculators_nb.models.mtp import MTPDraftModel, MTPSpeculatorConfig, MTPStackModel
from speculators_nb.models.mtp_native import extract_mtp, stitch_mtp
from speculators_nb.models.mtp_transformers import new_stack, skeleton
from speculators_nb.nn.target_head import text_config
from speculators_nb.plan.sizes import empty_drafter
from speculators_nb.serve.speculative_config import SpeculativeConfig
from speculators_nb.verifier.identity import VerifierInfo
from speculators_nb.verifier.tapped_model import Verifier, auto_class

OLD = tuple(map(int, mtp_transformers.transformers.__version__.split(".")[:2])) < (5, 18)
pytestmark = pytest.mark.skipif(OLD, reason="refused before transformers 5.18")
V, H, K = 60, 32, 4
SMALL = dict(vocab_size=V, hidden_size=H, num_hidden_layers=2, intermediate_size=40, max_position_embeddings=256)
SMALL |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
LATENT = dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=16)
LATENT |= dict(qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
GROUPS = dict(n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1)
TYPES = ["sliding_attention", "full_attention"]

# family -> config of a verifier
CONFIGS = {
    "deepseek_v3": SMALL | LATENT | EXPERTS | GROUPS | dict(num_nextn_predict_layers=2),
    "glm4_moe": SMALL | ATTENTION | EXPERTS | GROUPS | dict(num_nextn_predict_layers=2, use_qk_norm=True),
    "inkling_text": SMALL
    | ATTENTION
    | EXPERTS
    | dict(num_hidden_layers=3, n_routed_experts=4, n_shared_experts=1, mlp_layer_types=["dense", "sparse", "sparse"])
    | dict(swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=6)
    | dict(d_rel=4, rel_extent=8, log_scaling_n_floor=4, local_layer_ids=[0], logits_mup_width_multiplier=2.0)
    | dict(num_mtp_layers=3, mtp_local_layer_ids=[1], chain_hidden_post_norm=True),
    "step3p7": dict(
        text_config=SMALL
        | ATTENTION
        | EXPERTS
        | dict(num_nextn_predict_layers=3, layer_types=[*TYPES, *TYPES[:1] * 3], moe_layers_enum=[1], sliding_window=6)
        | dict(num_sliding_attention_heads=6, n_routed_experts=4, share_expert_dim=16),
        vision_config=dict(width=16, layers=1, heads=2, image_size=28, patch_size=14),
    ),
    "mellum": SMALL
    | ATTENTION
    | EXPERTS
    | dict(num_experts=4, num_nextn_predict_layers=1, sliding_window=6, layer_types=TYPES),
    "sarvam_mla": SMALL | LATENT | EXPERTS | GROUPS | dict(num_nextn_predict_layers=1),
    "sarvam_moe": SMALL | ATTENTION | EXPERTS | GROUPS | dict(num_nextn_predict_layers=1),
    "bailing_hybrid": SMALL
    | LATENT
    | EXPERTS
    | GROUPS
    | dict(num_experts=4, num_nextn_predict_layers=1, layer_group_size=2, head_dim=8)
    | dict(mtp_layer_types=["full_attention"], mtp_mlp_layer_types=["sparse"]),
}
del CONFIGS["bailing_hybrid"]["n_routed_experts"]


def lists_mtp(kind):
    "Whether a config of transformers has MTP layers."
    return "num_mtp_layers" in {*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "attribute_map", ())}


# of these families, those that this release of transformers has
FAMILIES = [
    name
    for name in CONFIGS
    if any(known in CONFIG_MAPPING and lists_mtp(CONFIG_MAPPING[known]) for known in (name, name.replace("3p7", "3p5")))
]


def test_every_family_that_transformers_lists_has_a_test():
    listed = {name for name in CONFIG_MAPPING if lists_mtp(CONFIG_MAPPING[name])}
    assert {name.replace("3p7", "3p5") for name in FAMILIES} == listed


def native_name(family, name, layers):
    "The checkpoint's name of a tensor of `MtpModel`; `layers` of the verifier come before."
    if not name.startswith("layers."):
        return "model.mtp.chain_norm.weight"
    _, k, rest = name.split(".", 2)
    if family == "inkling_text":
        for ours, theirs in dict(enorm="embed_norm", hnorm="hidden_norm", eh_proj="input_proj").items():
            rest = re.sub(rf"^{ours}", theirs, rest)
        return f"model.mtp.layers.{k}.{rest.replace('mtp_block', 'transformer_block')}"
    rest = re.sub("^post_norm", "shared_head.norm", rest.removeprefix("mtp_block."))
    return f"mtp.layers.{k}.{rest}" if family == "mellum" else f"model.layers.{layers + int(k)}.{rest}"


def one_by_one(state):
    "Experts as checkpoints store them."
    out = {}
    for name, tensor in state.items():
        head, _, part = name.rpartition(".")
        for e, w in enumerate(tensor if head.endswith(".experts") else ()):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            out |= {f"{head}.{e}.{n}.weight": p for n, p in zip(names, w.chunk(len(names)))}
        if not head.endswith(".experts"):
            out[name] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def moved(model, g, offset):
    "Random weights; those of norms near one."
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=g) + (p.ndim == 1) * offset)


class Case:
    "A verifier on disk, its model in transformers, and its MTP model."

    def __init__(self, family, folder):
        self.family, self.folder = family, folder
        config = AutoConfig.for_model(family, **CONFIGS[family])
        torch.manual_seed(0)
        self.model = auto_class(config).from_config(config).eval()
        g, offset = torch.Generator().manual_seed(1), float(family != "step3p7")  # whose norms multiply by 1 + w
        moved(self.model, g, offset)
        with torch.no_grad():  # the next token depends mostly on the last one: some drafts are right
            embed = self.model.get_input_embeddings().weight.normal_(generator=g).mul_(2)
            self.model.lm_head.weight.copy_(embed[torch.randperm(V, generator=g)])
        self.model.save_pretrained(folder)
        text = config.get_text_config()
        self.n = text.num_mtp_layers
        self.mtp = MtpModel(self.model, self.n).eval()
        if family == "step3p7" and not hasattr(MtpModel, "forward_layer"):  # before 5.20 transformers cannot draft
            rotary = self.mtp._modules.pop("rotary_emb")
            self.mtp.rotary_emb = lambda x, position_ids: rotary(x, position_ids, "sliding_attention")
        moved(self.mtp.layers, g, offset)
        with torch.no_grad():  # the token counts more than the state
            halves = [2 * torch.eye(H), 0.2 * torch.eye(H)]
            halves = halves[::-1] if getattr(text, "mtp_hidden_states_first", False) else halves
            for layer in self.mtp.layers:
                layer.eh_proj.weight.add_(torch.cat(halves, 1))
        state = {n: w for n, w in self.mtp.state_dict().items() if n.startswith(("layers.", "shared_post_norm."))}
        self.state = {f"mtp_layers.{name}": w.clone() for name, w in state.items()}
        self.native = {native_name(family, name, text.num_hidden_layers): w for name, w in one_by_one(state).items()}
        copies = {}
        if family in ("deepseek_v3", "glm4_moe"):  # as released: copies of the verifier's embedding and head
            copies = {
                f"model.layers.2.{name}": w.clone()
                for name, w in (("embed_tokens.weight", embed), ("shared_head.head.weight", self.model.lm_head.weight))
            }
        file = folder / "model.safetensors"
        save_file(load_file(file) | self.native | copies, file, {"format": "pt"})

    def states(self, ids):  # [1, L] -> [1, L, H] before and after the final norm
        before = Verifier(self.model)(ids).last_hidden_states
        return before, self.model.get_decoder().norm(before)

    def all_logits(self, ids, after):  # [1, L], [1, L, H] -> depth by depth [L-1, V]
        """What `MtpModel.forward` makes of a row, and its sum of losses. With labels it begins at None and adds, which
        raises TypeError; what it adds is caught here."""
        depths = []

        class Loss:
            def __init__(self, logits, labels, shift_labels, **kwargs):
                depths.append(logits[0])
                self.value = F.cross_entropy(logits[0], shift_labels[0], ignore_index=-100)

            def __radd__(self, before):
                self.value = self.value + getattr(before, "value", 0)
                return self

            __add__ = __radd__

        self.mtp.loss_type, self.mtp._loss_function = "ours", None
        type(self.mtp).loss_function = Loss
        try:
            positions = torch.arange(1, ids.shape[1])[None]
            labels = F.pad(ids[:, 2:], (0, 1), value=-100)  # of depth 0; the others are shifted by it
            cache = MtpCache(config=self.mtp.config)
            loss = self.mtp(ids[:, 1:], after[:, :-1], torch.ones_like(positions), positions, cache, labels=labels)[2]
        finally:
            del type(self.mtp).loss_function
        return depths, loss.value

    def drafted(self, ids, after):  # [1, n] decided, [1, n-1, H] -> a token for each layer
        "What `MtpModel` drafts, all read anew."
        positions = torch.arange(1, ids.shape[1])[None]
        cache = MtpCache(config=self.mtp.config)
        return self.mtp(ids[:, 1:], after, torch.ones_like(positions), positions, cache)[0][0].tolist()


def loaded_by_transformers(folder):
    "A verifier that finds its MTP layers; transformers' own patterns are of the released numbers of layers."
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    model._keys_to_ignore_on_load_unexpected = skeleton(folder)._keys_to_ignore_on_load_unexpected
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param) / "verifier")


def drafter_of(case, steps=None, **options):
    return MTPDraftModel.from_training_args(
        verifier_name_or_path=str(case.folder), num_speculative_steps=steps or case.n, **options
    )


def tokens(n, seed=0):
    return torch.randint(3, V, (1, n), generator=torch.Generator().manual_seed(seed))


def test_read_from_the_verifiers_checkpoint(case, tmp_path):
    "Every tensor to the bit, whatever it is called; `convert` reads it too."
    found = extract_mtp(case.folder)
    assert found.keys() == case.state.keys() and all(torch.equal(w, case.state[n]) for n, w in found.items())
    model = drafter_of(case)
    assert type(model) is MTPStackModel and model.config.verifier_norm and len(model.layers) == case.n
    row = dict(document_ids=torch.tensor([[0, 0, 1]]))
    assert model.training_mask(row).mask.dense(3, 3).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    verify_training_compatible(model)
    converted = SpeculatorModel.from_pretrained(convert(case.folder, tmp_path / "d", verifier=str(case.folder)))
    assert all(torch.equal(w, converted.state_dict()[n]) for n, w in found.items())


@pytest.mark.parametrize("first", ["bias", "norm"])
def test_a_head_of_two_dtypes_loses_nothing(tmp_path, first):
    "A router's bias in float32 beside weights in bfloat16, as released; whichever tensor is the first of the index."
    case = Case("deepseek_v3", tmp_path / "v")
    file = case.folder / "model.safetensors"
    state = load_file(file)
    biases = [name for name in sorted(state) if name.endswith("e_score_correction_bias")]
    kept = {n: torch.randn(4) if n in biases else w.bfloat16() for n, w in state.items()}
    save_file(kept, file, {"format": "pt"})
    if first == "norm":  # in shards the order is that of the index
        file.rename(case.folder / "model-00001-of-00001.safetensors")
        index = dict.fromkeys(sorted(kept, key=lambda n: "e_score" in n), "model-00001-of-00001.safetensors")
        (case.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    found = extract_mtp(case.folder)
    read = [found[name] for name in sorted(found) if name.endswith("e_score_correction_bias")]
    assert len(read) == case.n and all(torch.equal(w, kept[name]) for w, name in zip(read, biases[-case.n :]))
    plain = {name: w for name, w in found.items() if not name.endswith("e_score_correction_bias")}
    assert all(torch.equal(w, case.state[name].bfloat16()) for name, w in plain.items())
    assert {w.dtype for w in plain.values()} == {torch.bfloat16}


def test_logits_loss_and_gradients_are_transformers(case):
    """Depth by depth. transformers adds each depth's mean over its own positions; here a position counts only where
    all of its document is known, which for one document is the same, and depths have weights (1 each)."""
    ids = tokens(17)
    before, after = case.states(ids)
    depths, loss = case.all_logits(ids, after)
    loss.backward()
    model = drafter_of(case).train()
    logits, dense, _ = model(ids, before, lean=False, step_weights=[1.0] * case.n)
    lean = model(ids, before, step_weights=[1.0] * case.n).loss
    lean.backward()
    torch.testing.assert_close(torch.stack([dense, lean]), loss.expand(2), rtol=1e-5, atol=1e-6)
    for step, (ours, theirs) in enumerate(zip(logits, depths, strict=True)):
        rows = len(theirs) - step  # behind them transformers reads tokens that it drafts
        torch.testing.assert_close(ours[0, :rows], theirs[:rows], rtol=1e-5, atol=2e-5)
    theirs = dict(case.mtp.named_parameters())
    for name, p in model.mtp_layers.named_parameters():
        expected = theirs[name].grad
        if expected is None:  # no token chose it
            assert not p.grad.any(), name
        else:
            assert (p.grad - expected).norm() <= 1e-3 * expected.norm().clamp_min(1e-6), name
    case.mtp.zero_grad()


def test_documents_of_a_row_are_apart(case):
    "A packed row with padding, whose documents of similar lengths run together: the sums of its documents' losses."
    model, lengths = drafter_of(case, K), (13, 6, 9)
    texts = [tokens(n, seed) for seed, n in enumerate(lengths, 1)]
    states = [case.states(ids)[0] for ids in texts]
    packed = dict(
        input_ids=torch.cat([*texts, torch.zeros(1, 3, dtype=torch.long)], 1),
        hidden_states=F.pad(torch.cat(states, 1), (0, 0, 0, 3)),
        position_ids=torch.tensor([[*(i for n in lengths for i in range(n)), 0, 0, 0]]),
        document_ids=torch.tensor([[*(doc for doc, n in enumerate(lengths) for _ in range(n)), -1, -1, -1]]),
    )
    with torch.no_grad():
        together, own = model(**packed).metrics, [model(ids, h).metrics for ids, h in zip(texts, states)]
    for step in range(K):
        name = f"loss_step_{step}_sum"
        torch.testing.assert_close(together[name], sum(each[name] for each in own), rtol=1e-5, atol=1e-5)


def test_drafts_are_transformers(case):
    "In one stream with caches, against all read anew; beyond the last layer that one again, alone."
    model, ids = drafter_of(case, K).eval(), tokens(30, 3)
    before, after = case.states(ids)
    drafter, read = model.drafter(), 0
    for n, k in ((2, K), (3, 1), (9, case.n), (10, K), (12, 1), (25, K + 2), (26, case.n)):
        chain = drafter.propose(ids[0, :n], before[0, read : n - 1], k, Sampling()).tokens.tolist()
        again = model.drafter().propose(ids[0, :n], before[0, : n - 1], k, Sampling()).tokens.tolist()
        assert chain == again and len(chain) == k
        assert chain[: case.n] == case.drafted(ids[:, :n], after[:, : n - 1])[:k]
        read = n - 1


def test_text_is_the_verifiers(case):
    "Greedy text of transformers alone, of transformers with its MTP layers, and of `generate`."
    prompt, verifier = tokens(6, 4), Verifier.from_pretrained(case.folder)
    options = dict(max_new_tokens=20, do_sample=False)
    alone = case.model.generate(prompt, **options)[0, 6:].tolist()
    drafts_there = case.family != "step3p7" or hasattr(MtpModel, "forward_layer")
    if drafts_there and case.family != "bailing_hybrid":  # transformers refuses verifiers with a state
        beside = loaded_by_transformers(case.folder).generate(prompt, use_mtp=True, **options)
        assert beside[0, 6:].tolist() == alone
    drafter = drafter_of(case, K).drafter()
    for k in (1, case.n, K):
        written = generate(verifier, drafter, prompt[0].tolist(), max_new_tokens=20, k=k)
        assert written.tokens == alone
    assert sum(step.accepted for step in written.steps)
    if case.family in ("deepseek_v3", "glm4_moe", "inkling_text", "step3p7"):  # vLLM has a class for the head
        served = SpeculativeConfig(method="mtp", target_model_config=case.folder)
        assert served.num_speculative_tokens == case.n
        assert generate(verifier, served.drafter(verifier), prompt[0], max_new_tokens=20, k=case.n).tokens == alone


def test_trained_saved_and_put_back(case, tmp_path):
    "Five steps; the folder loads to the same numbers, and transformers reads the mended verifier."
    model, ids = drafter_of(case).train(), tokens(24, 5)
    before, _ = case.states(ids)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(model(ids, before).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "d")
    loaded = SpeculatorModel.from_pretrained(tmp_path / "d")
    assert torch.equal(loaded(ids, before).loss, model.eval()(ids, before).loss)
    out = stitch_mtp(tmp_path / "d", case.folder, tmp_path / "out")
    old, new = load_file(case.folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert old.keys() == new.keys() and all(old[n].shape == w.shape for n, w in new.items())
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed and changed <= case.native.keys()
    assert (out / "config.json").read_bytes() == (case.folder / "config.json").read_bytes()
    mended = MtpModel.from_pretrained(loaded_by_transformers(out))
    for name, weight in mended.layers.state_dict().items():
        assert torch.equal(weight, model.mtp_layers.layers.state_dict()[name]), name


# by day one: what differs between families is what the tests above hold
@pytest.mark.parametrize(
    "case", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES[1:])], indirect=True
)
def test_the_commands_train_check_stitch_and_plan(case, tmp_path, caplog):
    "Features, `train` from the verifier's own head, `check`, `stitch-mtp` and `plan`, by the CLI's functions."
    rows = [tokens(n, n)[0].tolist() for n in (20, 24, 17, 30, 21, 22)]
    masks = [[i > 2 for i in range(len(row))] for row in rows]
    data = Dataset.from_dict(dict(input_ids=rows, loss_mask=masks, seq_len=[*map(len, rows)]))
    extract_features(Verifier.from_pretrained(case.folder, [1]), data, tmp_path / "f", dtype=torch.float32)
    options = dict(algorithm="mtp", verifier=str(case.folder), eval_share=0.2, total_seq_len=64, num_train_epochs=2)
    trainer = cli.train(tmp_path / "f", tmp_path / "d", extra=[f"num_speculative_steps={K}"], **options)
    history = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert type(trainer.model) is MTPStackModel and history[-1] < history[0]
    caplog.clear()
    violations = cli.check(tmp_path / "d").violations
    assert len(violations) == 1 and "stitch_mtp" in violations[0] and not caplog.records
    out = Path(cli.stitch_mtp(tmp_path / "d", case.folder, tmp_path / "out"))
    trained = {n: w for n, w in trainer.model.state_dict().items() if n.startswith("mtp_layers.")}
    assert all(torch.equal(w.float(), trained[n].float()) for n, w in extract_mtp(out).items())
    empty = empty_drafter("mtp", VerifierInfo.of(case.folder), num_speculative_steps=K)
    assert type(empty) is MTPStackModel
    counts = [sum(p.numel() for p in m.mtp_layers.parameters()) for m in (empty, trainer.model)]
    assert counts[0] == counts[1]
    train = dict(data_dir=str(tmp_path / "f"), output_dir=str(tmp_path / "d"), algorithm="mtp", total_seq_len=64)
    recipe = dict(verifier=str(case.folder), features=dict(data="rows", output_dir=train["data_dir"]), train=train)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    planned = cli.plan(tmp_path / "recipe.yaml", conversations=100, memory=80, disk=100)
    assert planned.algorithm == "mtp" and planned.training.memory.weights > 0 and not planned.problems


def test_a_fresh_head_trains_and_is_not_stitched_where_no_names_are(case, tmp_path):
    "Its matrices are drawn, its norms one; a verifier without a head does not say what one would be called."
    state = {n: w for n, w in load_file(case.folder / "model.safetensors").items() if n not in case.native}
    bare = tmp_path / "bare"
    shutil.copytree(case.folder, bare)
    save_file(
        {n: w for n, w in state.items() if not re.search(r"layers\.2\.(embed|shared)", n)}, bare / "model.safetensors"
    )
    with pytest.raises(ValueError, match=f"has no MTP head .no tensor those of {case.n} MTP layers"):
        extract_mtp(bare)
    torch.manual_seed(0)
    model = MTPDraftModel.from_training_args(verifier_name_or_path=str(bare), fresh_head=True)
    assert all(0.005 < w.std() < 0.5 for w in model.mtp_layers.parameters() if w.ndim > 1)
    assert model(tokens(9), torch.randn(1, 9, H)).loss.isfinite()
    model.save_pretrained(tmp_path / "d")
    with pytest.raises(ValueError, match="would say what a head of .* is called; stitch into"):
        stitch_mtp(tmp_path / "d", bare, tmp_path / "out")


@pytest.mark.parametrize("name", ["as_served", "cross_document_targets"])
def test_other_definitions_are_refused(case, name):
    with pytest.raises(NotSupported, match=f"^{name}=True: each of transformers' MTP layers has a past of its own"):
        drafter_of(case)(tokens(9), torch.randn(1, 9, H), **{name: True})


def test_what_cannot_be_read_is_refused_in_a_line(case, tmp_path, monkeypatch):
    """Another number of layers; a head that lacks a tensor, is quantised or padded; layers that transformers cannot
    know; a transformers that is too old."""
    layer = text_config(case.model.config)
    with pytest.raises(
        ValueError, match=f"num_nextn_predict_layers={case.n + 1}: .* has an MTP head of {case.n}, whose"
    ):
        MTPSpeculatorConfig(transformer_layer_config=layer, num_nextn_predict_layers=case.n + 1)
    shutil.copytree(case.folder, tmp_path / "lacks")
    state = load_file(case.folder / "model.safetensors")
    save_file({n: w for n, w in state.items() if n != sorted(case.native)[0]}, tmp_path / "lacks/model.safetensors")
    with pytest.raises(ValueError, match=r"^verifier '.*lacks': .* are missing from [^\n]*$"):
        extract_mtp(tmp_path / "lacks")
    first = sorted(case.native)[0]
    save_file(state | {first: state[first].to(torch.float8_e4m3fn)}, tmp_path / "lacks/model.safetensors")
    with pytest.raises(
        ValueError, match=r"lacks': .* \(torch.float8_e4m3fn\) of its MTP layers is quantised; name the"
    ):
        extract_mtp(tmp_path / "lacks")
    padded = copy.deepcopy(layer)
    padded.unpadded_vocab_size = V - 4
    with pytest.raises(NotSupported, match="unpadded_vocab_size=56 of 60: a verifier whose head"):
        new_stack(padded)
    turning = copy.deepcopy(layer)
    turning.rope_parameters = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    with pytest.raises(NotSupported, match="^rope_type='dynamic' depends on the length of a text; .* another drafter$"):
        new_stack(turning)
    if case.family == "glm4_moe":  # a context of 256 tokens
        long = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 2, long_factor=[2.0] * 2)
        turning.rope_parameters = long | dict(original_max_position_embeddings=128)
        with pytest.raises(NotSupported, match="^rope_type='longrope' depends on the length of a text"):
            new_stack(turning)
        turning.rope_parameters = long | dict(original_max_position_embeddings=256)
        assert new_stack(turning)  # no text is long enough
    if getattr(layer, "layer_types", None) and case.family != "inkling_text":
        unknown = copy.deepcopy(layer)
        unknown.mtp_layer_types = None
        with pytest.raises(NotSupported, match="transformers makes no MTP layers of .*ambiguous"):
            new_stack(unknown)
    monkeypatch.setattr(mtp_transformers.transformers, "__version__", "5.17.0")
    with pytest.raises(NotSupported, match=r"^transformers 5\.17\.0: .*; take 5\.18 or later$"):
        new_stack(layer)
