"""Feature files: what is wrong with one is found before it is trained on, and an interrupted extraction keeps what it
finished."""

import errno
import json
import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Subset
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from speculators_nb.core.checkpoints import save_tensors
from speculators_nb.data.prepared_folder import read_data_config
from speculators_nb.features import feature_rows
from speculators_nb.features.feature_folder import FeatureDataset, FeatureFolder, origin, table_of
from speculators_nb.features.feature_rows import (
    FP8,
    FeatureError,
    feature_path,
    from_fp8,
    read_features,
    to_fp8,
    write_features,
)
from speculators_nb.features.in_process import LiveFeatures, extract_features, states_of, token_batches
from speculators_nb.train.run_record import data_record
from speculators_nb.train.train_drafter import open_features, train_drafter
from speculators_nb.verifier.folders import layout_of
from speculators_nb.verifier.tapped_model import Verifier

N = 24


def make_verifier(seed=0, aux=None):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Verifier(LlamaForCausalLM(config), aux)


def make_rows(n=N, seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 64, k) for k in rng.integers(3, 30, n)]
    return Dataset.from_dict(
        {"input_ids": rows, "loss_mask": [np.arange(len(r)) >= 2 for r in rows], "seq_len": [len(r) for r in rows]}
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    extract_features(make_verifier(), make_rows(), folder, dtype=torch.float32)
    return folder


@pytest.mark.statement("release-22")
def test_states_are_those_of_the_row_alone(made):
    verifier, rows = make_verifier(), make_rows()
    for i in range(N):
        ids = torch.tensor(rows[i]["input_ids"])[None]
        hf = verifier.model(ids, output_hidden_states=True)
        states = read_features(feature_path(made, i), ids[0])
        assert states.shape == (ids.shape[1], 4, 16)
        for slot, layer in enumerate(
            verifier.aux_layer_ids
        ):  # float32 sums in another order: 1e-5 of values of order one
            torch.testing.assert_close(states[:, slot], hf.hidden_states[layer][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(verifier.norm(states[:, -1]), hf.hidden_states[-1][0], rtol=1e-5, atol=1e-5)


def test_dataset_raises_or_skips(tmp_path, caplog):
    rows = make_rows()
    extract_features(make_verifier(), rows, tmp_path)
    data = FeatureDataset(tmp_path)
    assert data.lengths == rows["seq_len"][:] and (data.slots, data.hidden_size) == (4, 16)
    assert {k: tuple(v.shape) for k, v in data[1].items()} == {
        "input_ids": (data.lengths[1],),
        "loss_mask": (data.lengths[1],),
        "hidden_states": (data.lengths[1], 48),
        "verifier_last_hidden_states": (data.lengths[1], 16),
    }
    feature_path(tmp_path, 0).write_bytes(b"x")  # the first file: the shape has to come from another
    feature_path(tmp_path, 9).unlink()
    with pytest.raises(FeatureError, match="hs_0"):
        FeatureDataset(tmp_path)
    data = FeatureDataset(tmp_path, on_bad="skip")
    samples = [data[i] for i in range(N)] + [data[9]]
    assert data.bad.nonzero().flatten().tolist() == [0, 9]
    assert sum("skipped" in r.message for r in caplog.records) == 2  # named once each
    assert not samples[0]["loss_mask"].any() and not samples[0]["hidden_states"].any() and samples[1]["loss_mask"].any()
    with pytest.raises(ValueError, match="on_bad='ignore'"):
        FeatureDataset(tmp_path, on_bad="ignore")
    with pytest.raises(FileNotFoundError, match="no folder 'rows'"):
        FeatureDataset(tmp_path / "elsewhere")
    for i in range(N):
        feature_path(tmp_path, i).unlink(missing_ok=True)
    with pytest.raises(FeatureError, match="every other file"):
        FeatureDataset(tmp_path, on_bad="skip")


def test_rows_are_counted_as_torch_s_users_count_them(made):
    "From the end, by a tensor, by NumPy's numbers; a row that is not there is named as such."
    for data in (FeatureDataset(made), LiveFeatures(make_verifier(), make_rows(), dtype=torch.float32)):
        chosen = Subset(data, torch.tensor([2, N - 1]))
        for i, same in ((-1, N - 1), (torch.tensor(2), 2), (np.int64(2), 2)):
            assert torch.equal(data[i]["input_ids"], data[same]["input_ids"])
            assert torch.equal(data.tokens(i)[0], data.tokens(same)[0])
        (batch,) = DataLoader(chosen, batch_size=2, collate_fn=list)
        assert [len(sample["input_ids"]) for sample in batch] == [data.lengths[2], data.lengths[-1]]
        assert data_record(chosen) == data_record(Subset(data, [2, N - 1]))
        with pytest.raises(IndexError):
            data[N]


def test_live_features_are_the_stored_ones(made):
    stored, live = FeatureDataset(made), LiveFeatures(make_verifier(), make_rows(), dtype=torch.float32)
    assert stored.lengths == live.lengths
    for i in (0, 5):
        for k, v in live[i].items():
            torch.testing.assert_close(stored[i][k], v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda: dict(verifier=make_verifier(seed=1)), "model.fingerprint"),
        (lambda: dict(verifier=make_verifier(aux=[0, 1])), "hidden_states.layer_ids"),
        (lambda: dict(dtype=torch.bfloat16), "hidden_states.dtype"),
        (lambda: dict(dataset=make_rows(seed=1)), "data.fingerprint"),
    ],
)
def test_another_origin_is_refused(made, change, field):
    kwargs = dict(verifier=make_verifier(), dataset=make_rows(), out_dir=made, dtype=torch.float32) | change()
    before = sorted(p.stat().st_mtime_ns for p in made.glob("hs_*"))
    with pytest.raises(ValueError, match=field.replace(".", r"\.")):
        extract_features(**kwargs)
    assert sorted(p.stat().st_mtime_ns for p in made.glob("hs_*")) == before


def test_rows_that_are_masked_anew_are_trained_by_the_new_mask(tmp_path):
    verifier, rows = make_verifier(), make_rows(2)
    extract_features(verifier, rows, tmp_path, dtype=torch.float32)
    shorter = [[False] * (len(mask) - 1) + [True] for mask in rows["loss_mask"]]
    again = rows.remove_columns("loss_mask").add_column("loss_mask", shorter)
    assert extract_features(verifier, again, tmp_path, dtype=torch.float32) == {"written": 0, "kept": 2}
    assert [row["loss_mask"].tolist() for row in FeatureDataset(tmp_path)] == shorter


def test_rows_that_are_split_anew_are_held_out_anew(tmp_path):
    rows = make_rows(6)
    config = origin({"fingerprint": "x"}, [1, 2], rows, "bfloat16")
    for val, known in ((1, True), (2, True), (2, False)):  # a table without its folder says nothing of a split
        split = {"split": {"train": 6 - val, "val": val}} if known else {}
        FeatureFolder(tmp_path, rows, config | {"data": config["data"] | split})
        assert read_data_config(tmp_path)["data"]["split"] == {"train": 6 - val, "val": val}


def test_a_rank_beyond_the_last_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rank=2: must be less than world_size=2"):
        extract_features(make_verifier(), make_rows(2), tmp_path, rank=2, world_size=2)


def test_resume_makes_only_what_is_missing(tmp_path):
    verifier, rows = make_verifier(), make_rows()
    assert extract_features(verifier, rows, tmp_path, indices=range(0, N, 2)) == {"written": 12, "kept": 0}
    feature_path(tmp_path, 4).write_bytes(feature_path(tmp_path, 4).read_bytes()[:-5])
    (tmp_path / ".hs_7.dead.safetensors").write_bytes(b"what a killed writer leaves")
    assert extract_features(verifier, rows, tmp_path) == {"written": 13, "kept": 11}
    assert not list(tmp_path.glob(".hs_*"))
    assert extract_features(verifier, rows, tmp_path) == {"written": 0, "kept": N}


def test_full_disk_keeps_what_is_done(tmp_path, monkeypatch):
    verifier, rows, left = make_verifier(), make_rows(), [10]

    def save(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_tensors(*args)

    monkeypatch.setattr(feature_rows, "save_tensors", save)
    with pytest.raises(OSError, match="10 of 24 rows are complete and kept") as e:
        extract_features(verifier, rows, tmp_path, max_tokens=64)
    assert e.value.errno == errno.ENOSPC and "No space left" in str(e.value)
    monkeypatch.undo()
    assert extract_features(verifier, rows, tmp_path) == {"written": 14, "kept": 10}


def test_overflow_is_not_written(tmp_path):
    verifier = make_verifier()
    with torch.no_grad():
        verifier.layers[3].mlp.down_proj.weight.fill_(1e37)
    with pytest.raises(FeatureError, match="not finite"):
        extract_features(verifier, make_rows(), tmp_path, dtype=torch.float16)
    assert not list(tmp_path.glob("hs_*"))


def test_provenance_is_written(made):
    config = json.loads((made / "data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == [1, 2, 3, 4] and config["data"]["num_samples"] == N
    assert (made / "rows" / "token_freq.json").exists()


def test_batches_respect_the_budget():
    lengths = [5, 90, 7, 200, 3, 3]
    batches = token_batches(lengths, range(6), 100)
    assert sorted(i for b in batches for i in b) == list(range(6))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 100 for b in batches)
    assert batches[0] == [3]


def test_a_row_does_not_see_its_neighbours():
    verifier = make_verifier()
    (short,) = states_of(verifier, [[1, 2, 3]], torch.float32)
    beside = states_of(verifier, [[1, 2, 3], list(range(20))], torch.float32)[0]
    torch.testing.assert_close(short, beside, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_what_is_stored_is_read(tmp_path, dtype):
    states = torch.randn(7, 4, 16) * torch.logspace(-1, 2, 7)[:, None, None]
    write_features(feature_path(tmp_path, 0), states, range(7), dtype)
    assert load_file(feature_path(tmp_path, 0))["hidden_states"].dtype == getattr(torch, dtype)
    # half a step of the mantissa; fp8 is read as bfloat16
    eps = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0, "float8_e4m3fn": 2**-4 + 2**-8}[dtype]
    assert (
        (read_features(feature_path(tmp_path, 0), range(7)).float() - states).abs()
        <= eps * states.abs() + 1e-4 * states.abs().amax((1, 2), keepdim=True)
    ).all()


def test_a_flipped_bit_is_found(tmp_path):
    """Every byte of the tensors is covered by the checksum; a number that still looks like a number is not passed
    on."""
    path = feature_path(tmp_path, 0)
    write_features(path, torch.randn(5, 2, 8), range(5))
    data = path.read_bytes()
    for at in range(8 + int.from_bytes(data[:8], "little"), len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(FeatureError, match="checksum|other tokens"):
            read_features(path, range(5))


def test_scales_are_read_in_either_spelling_and_shape(tmp_path):
    states = torch.randn(6, 3, 8)
    codes, scales = to_fp8(states)
    for name, s in (
        ("hidden_states_scales", scales),
        ("hidden_states_scale", scales),
        ("hidden_states_scales", scales.expand(-1, 3, 1).clone()),
    ):
        save_file({"hidden_states": codes, name: s, "token_ids": torch.arange(6)}, feature_path(tmp_path, 0))
        assert torch.equal(read_features(feature_path(tmp_path, 0)), from_fp8(codes, scales))
    assert codes.dtype is FP8 and scales.shape == (6, 1, 1) and codes.float().abs().amax((1, 2)).eq(448).all()


@pytest.mark.statement("release-23")
def test_mixture_of_experts(tmp_path):
    """Tokens are routed one by one: a row's states are those of the row alone, in any batch."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            decoder_sparse_step=2,
        )
    )
    verifier, rows = Verifier(model), make_rows()
    extract_features(verifier, rows, tmp_path, dtype="float32")
    for i in range(N):
        ids = torch.tensor(rows[i]["input_ids"])[None]
        hf = model(ids, output_hidden_states=True).hidden_states
        states = read_features(feature_path(tmp_path, i), ids[0])
        for slot, layer in enumerate(verifier.aux_layer_ids):
            torch.testing.assert_close(states[:, slot], hf[layer][0], rtol=1e-5, atol=1e-5)


def upstream_folder(made, folder, layout):
    """The samples of `made` as upstream 0.9, or 0.3 and 0.4, would have left them."""
    rows = table_of(made)
    folder.mkdir()
    if layout == "upstream":
        rows.remove_columns(
            [c for c in rows.column_names if c not in ("input_ids", "loss_mask", "seq_len")]
        ).save_to_disk(folder)
        (folder / "hidden_states").mkdir()
    else:
        (folder / "data_config.json").write_text(
            json.dumps({"version": "2.0", "hidden_states": {"layer_ids": [0, 1, 2, 3]}})
        )
        (folder / "sample_lengths.json").write_text(json.dumps({str(i): n for i, n in enumerate(rows["seq_len"])}))
    for i, row in enumerate(rows):
        states, ids = read_features(feature_path(made, i)), torch.as_tensor(row["input_ids"]).long()
        if layout == "upstream":
            save_file({"hidden_states": states, "token_ids": ids}, feature_path(folder / "hidden_states", i))
        else:
            torch.save(
                {
                    "input_ids": ids,
                    "loss_mask": torch.as_tensor(row["loss_mask"]).long(),
                    "hidden_states": [*states.unbind(1)],
                },
                folder / f"data_{i}.pt",
            )
    return folder


def test_a_wrong_length_is_named_and_no_row_is_packed_by_it(made, tmp_path):
    folder = upstream_folder(made, tmp_path / "f", "legacy")
    lengths = json.loads((folder / "sample_lengths.json").read_text())
    (folder / "sample_lengths.json").write_text(json.dumps(lengths | {"1": lengths["1"] - 1}))
    data = FeatureDataset(folder)
    assert len(data[0]["input_ids"]) == lengths["0"]
    with pytest.raises(FeatureError, match=f"the row has {lengths['1']} tokens, {lengths['1'] - 1} by the table"):
        data[1]


@pytest.mark.statement("release-20")
@pytest.mark.parametrize("layout", ["upstream", "legacy"])
def test_upstream_folders_train_the_same_drafter(made, tmp_path, layout):
    verifier = tmp_path / "verifier"
    make_verifier().model.save_pretrained(verifier)
    folder = upstream_folder(made, tmp_path / layout, layout)
    assert layout_of(folder) == layout
    given = dict(
        algorithm="eagle3",
        verifier=verifier,
        draft_vocab_size=32,
        eval_share=0,
        ttt_steps=2,
        total_seq_len=64,
        max_steps=3,
        disable_tqdm=True,
        save_strategy="no",
    )
    losses = [
        train_drafter(data, tmp_path / f"out-{i}", **given).state.log_history[-1]["train_loss"]
        for i, data in enumerate((made, folder))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("conversations", [False, True])
def test_live_features_can_be_sent_to_a_process(conversations):
    "As a loader does whose workers are spawned (macOS), or come from a fork server (Python 3.14)."
    rows = make_rows(3)
    if conversations:
        rows = rows.add_column("messages", [json.dumps([dict(role="user", content="a")])] * 3)
    live = LiveFeatures(make_verifier(), rows, torch.float32)
    sent = pickle.loads(pickle.dumps(live))
    for mine, theirs in zip(live.__getitems__([0, 2]), sent.__getitems__([0, 2])):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_live_features_train_too(tmp_path):
    """A prepared folder and no features: the verifier runs beside the training, and sees what extraction would have
    stored."""
    verifier = make_verifier()
    verifier.model.save_pretrained(tmp_path / "verifier")
    make_rows().save_to_disk(tmp_path / "prepared")
    extract_features(verifier, tmp_path / "prepared", tmp_path / "features")
    given = dict(
        algorithm="eagle3",
        verifier=tmp_path / "verifier",
        ttt_steps=2,
        total_seq_len=64,
        max_steps=3,
        disable_tqdm=True,
    )
    one, other = (
        train_drafter(tmp_path / d, tmp_path / f"{d}-out", **given).state.log_history[-1]["train_loss"]
        for d in ("features", "prepared")
    )
    assert one == pytest.approx(other, rel=1e-3)  # bfloat16 of sums in another order
    with pytest.raises(ValueError, match="dataloader_num_workers=2"):
        train_drafter(tmp_path / "prepared", tmp_path / "x", dataloader_num_workers=2, **given)
    with pytest.raises(ValueError, match="on_bad='skip' with context_parallel_size=2: .* must have the same"):
        asked = dict(url="http://127.0.0.1:1", storage=tmp_path, on_bad="skip", context_parallel_size=2)
        train_drafter(tmp_path / "prepared", tmp_path / "x", **asked, **given)
    with pytest.raises(ValueError, match="has features already"):
        open_features(tmp_path / "features", tmp_path / "verifier", url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="storage=None"):
        open_features(tmp_path / "prepared", tmp_path / "verifier", url="http://127.0.0.1:1")


def test_the_split_of_a_prepared_folder_is_kept(tmp_path):
    rows = make_rows()
    rows.save_to_disk(tmp_path / "prepared")
    (tmp_path / "prepared" / "data_config.json").write_text(json.dumps({"split": {"train": N - 3, "val": 3}}))
    extract_features(make_verifier(), tmp_path / "prepared", tmp_path / "features")
    assert FeatureDataset(tmp_path / "features").split == {"train": N - 3, "val": 3}
    assert LiveFeatures(make_verifier(), table_of(tmp_path / "prepared")).split == {"train": N - 3, "val": 3}
    assert LiveFeatures(make_verifier(), table_of(tmp_path / "prepared").select(range(5))).split is None


def test_products_in_bfloat16(tmp_path):
    "The states are near those of float32, and the folder is that of the same verifier."
    verifier, rows, folders = make_verifier(), make_rows(), {}
    for dtype in (None, torch.bfloat16):
        folder = tmp_path / str(dtype)
        extract_features(verifier, rows, folder, dtype=torch.float32, compute_dtype=dtype)
        folders[dtype] = FeatureDataset(folder)
    exact, rounded = (torch.cat([f.read(i)[2] for i in range(N)]) for f in folders.values())
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact.float(), rounded.float(), dim=-1).mean() > 0.999
    records = [json.loads((tmp_path / str(d) / "data_config.json").read_text()) for d in folders]
    assert len({json.dumps(record | {"generated_at": None}) for record in records}) == 1
