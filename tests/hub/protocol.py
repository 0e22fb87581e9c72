"""Loading and pushing as the real hub does it, and where it fails: large files on a storage of another host,
connections cut in the middle, a hub that is busy, tokens, revisions. `test_hub.py` runs this file."""

from loopback import HUB, same, size  # before all that imports the hub's client

# isort: split
import json

import pytest
import torch
from huggingface_hub import constants

from speculators_nb.core.checkpoints import hub_access, resolve_checkpoint
from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.core.provenance import identify
from speculators_nb.data.sources import read_conversations
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.verifier.parts import HubIndex, load_verifier_tensors

pytest_plugins = ["loopback"]  # its fixtures

WEIGHTS = ".safetensors"


@pytest.fixture(autouse=True)
def quick(clean, monkeypatch):
    "The client does not wait between its attempts; large files are on the storage."
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)  # what is written at once, and so what a cut leaves
    HUB.large = (WEIGHTS,)
    return slept


def one_line(call, *words):
    "The one line in which a call fails, which holds the words."
    with pytest.raises((OSError, ValueError)) as e:
        call()
    text = str(e.value)
    assert "\n" not in text and all(word in text for word in words), text
    return text


def kept(folder):
    "The files of a cache that a reader would take: complete blobs and copied tensors."
    return {
        p.name: p.stat().st_size
        for p in folder.rglob("*")
        if p.is_file() and not p.is_symlink() and not p.name.endswith((".incomplete", ".lock"))
    }


def test_large_files_come_from_another_host(big, draft, tmp_path):
    "The commit, the digest and the size are those of the first answer, and the storage is not shown the token."
    HUB.tokens["org/draft"] = HUB.tokens["org/big"] = "hf_secret"
    model = SpeculatorModel.from_pretrained("org/draft", token="hf_secret")
    assert same(model.saved_state(), draft.saved_state())
    parts = load_verifier_tensors(big)
    assert torch.equal(model.embed_tokens.weight, parts["embeddings"])
    HUB.sent.clear()
    with hub_access(cache_dir=tmp_path / "new", token="hf_secret"):
        found = load_verifier_tensors("org/big")
    assert all(torch.equal(found[n], parts[n]) for n in ("embeddings", "head", "norm_weight"))
    stored = [s for s in HUB.sent if len(s.path) == 65]
    assert {s.status for s in stored} == {206} and sum(s.size for s in stored) < 1.05 * size(parts)
    assert {s.authorization for s in stored} == {None}
    assert {s.authorization for s in HUB.sent if len(s.path) != 65} == {"Bearer hf_secret"}


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_is_cut_in_the_middle_of_a_file(draft, tmp_path, ranges):
    "The rest is fetched, or all of it from a storage without ranges; what is loaded is whole."
    HUB.ranges = ranges
    whole = (tmp_path / "draft/model.safetensors").stat().st_size
    HUB.fail("/[0-9a-f]{64}$", method="GET", cut=whole // 3)
    folder = resolve_checkpoint("org/draft")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "draft/model.safetensors").read_bytes()
    stored = [(s.status, s.size) for s in HUB.sent if len(s.path) == 65 and s.size]
    assert stored[0] == (200, whole // 3)
    assert stored[1][0] == (206 if ranges else 200) and (stored[1][1] < whole) == ranges


def test_a_connection_that_is_always_cut_leaves_no_half_file(draft, tmp_path):
    with hub_access(cache_dir=tmp_path / "there"):
        HUB.fail("/[0-9a-f]{64}$", method="GET", times=99, cut=0)
        one_line(lambda: resolve_checkpoint("org/draft"), "org/draft", "*.safetensors", "try again")
        assert max(kept(tmp_path / "there").values()) < 100_000  # the config alone
        HUB.faults.clear()
        model = SpeculatorModel.from_pretrained("org/draft")
    assert same(model.saved_state(), draft.saved_state())


def test_a_range_is_cut(big, tmp_path):
    "A tensor of a shard: requested again; where the storage never sends it whole, nothing is kept."
    HUB.fail("/[0-9a-f]{64}$", method="GET", cut=5, times=2)
    parts = load_verifier_tensors("org/big")
    assert torch.equal(parts["head"], load_verifier_tensors(big)["head"])
    with hub_access(cache_dir=tmp_path / "new"):
        HubIndex("org/big").header("model-00016-of-00016.safetensors")
        HUB.fail("/[0-9a-f]{64}$", method="GET", cut=50, times=99)
        call = lambda: load_verifier_tensors("org/big")
        one_line(call, "org/big", "model-00016-of-00016.safetensors", "try again")
        assert not [name for name in kept(tmp_path / "new") if name.endswith(WEIGHTS)]
        HUB.faults.clear()
        assert torch.equal(load_verifier_tensors("org/big")["head"], parts["head"])


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_given_time(big, draft, quick, status):
    HUB.fail("/[0-9a-f]{64}$", status, method="GET", times=2, Retry_After=7)
    assert torch.equal(load_verifier_tensors("org/big")["head"], load_verifier_tensors(big)["head"])
    assert [s for s in quick if s >= 7][:2] == [8.0, 8.0]  # one second more than it says
    HUB.fail("/org/draft/resolve/.*config.json", status, times=99, Retry_After=7)
    one_line(lambda: SpeculatorModel.from_pretrained("org/draft"), "org/draft", "config.json", str(status), "try again")


def test_gated_with_and_without_a_token(draft):
    HUB.gated.add("org/draft")
    HUB.granted["org/draft"] = "hf_member"
    for token in (None, "hf_stranger"):
        line = one_line(lambda: SpeculatorModel.from_pretrained("org/draft", token=token), "org/draft: gated", "token=")
        assert "hf_stranger" not in line
    assert SpeculatorModel.from_pretrained("org/draft", token="hf_member", verifier=False)
    HUB.gated.clear()
    HUB.fail("org/draft", 401, times=99, X_Error_Message="Invalid credentials in Authorization header")
    load = lambda: SpeculatorModel.from_pretrained("org/draft", token="hf_expired", force_download=True)
    assert "hf_expired" not in one_line(load, "org/draft: token= is refused", "hf auth login")


def test_a_revision_is_pinned_in_provenance(draft, tmp_path, monkeypatch):
    "Branch, tag and commit; the commit that was read is what a record names."
    first = HUB.models["org/draft"]["main"][0]
    other = {n: w + 1 if w.is_floating_point() else w for n, w in draft.saved_state().items()}
    draft.save_pretrained(tmp_path / "other", state_dict=other)
    tagged = HUB.add("org/draft", tmp_path / "other", revision="v1.0")
    for revision, commit in (("main", first), ("v1.0", tagged), (tagged, tagged), (first, first)):
        with hub_access(revision=revision):
            assert resolve_checkpoint("org/draft").name == commit
            assert identify("org/draft")["commit"] == commit, revision
    one_line(
        lambda: SpeculatorModel.from_pretrained("org/draft", revision="v2"), "revision='v2'", "branch, tag or commit"
    )
    one_line(lambda: SpeculatorModel.from_pretrained("org/draft", revision="0" * 40), "revision='0000")
    del HUB.models["org/draft"]["v1.0"]


def test_the_branch_moves_while_it_is_read(draft, tmp_path):
    "Config and weights are of one commit, also where the branch has moved between the two."
    commit = HUB.models["org/draft"]["main"][0]
    folder = resolve_checkpoint("org/draft")
    assert folder.name == commit
    other = {n: w + 1 if w.is_floating_point() else w for n, w in draft.saved_state().items()}
    draft.save_pretrained(tmp_path / "other", state_dict=other)
    moved = HUB.add("org/draft", tmp_path / "other")
    assert resolve_checkpoint("org/draft").name == moved != commit
    fetched = SpeculatorModel.from_pretrained("org/draft")
    assert torch.equal(fetched.fc.weight, draft.fc.weight + 1)


def test_push_large_files_and_load_them(draft, monkeypatch):
    "Preupload, the batch request of Git LFS, the storage, the check, the commit; a second push uploads nothing."
    draft.push_to_hub("me/large")
    commit, _ = HUB.models["me/large"]["main"]
    puts = [s for s in HUB.sent if s.method == "PUT"]
    assert len(puts) == 1 and "/api/verify" in [s.path for s in HUB.sent]
    assert {s.authorization for s in puts} == {None}
    again = SpeculatorModel.from_pretrained("me/large")
    assert same(again.saved_state(), draft.saved_state()) and again.config == draft.config
    assert identify("me/large")["commit"] == commit
    HUB.sent.clear()
    draft.push_to_hub("me/large")
    assert not [s for s in HUB.sent if s.method == "PUT"] and HUB.models["me/large"]["main"][0] == commit


def test_a_push_that_is_interrupted(draft):
    "An upload is tried again; where the storage refuses for good nothing is committed, and the line says what to do."
    HUB.stored.clear()
    HUB.fail("/[0-9a-f]{64}$", 503, method="PUT", times=2)
    draft.push_to_hub("me/patient")
    assert same(SpeculatorModel.from_pretrained("me/patient").saved_state(), draft.saved_state())
    HUB.stored.clear()
    HUB.fail("/[0-9a-f]{64}$", 403, method="PUT", times=99)
    one_line(lambda: draft.push_to_hub("me/refused"), "me/refused", "403")
    assert HUB.models["me/refused"]["main"][1] == {}
    HUB.faults.clear()
    HUB.fail("/api/repos/create", 401, times=99, X_Error_Message="Invalid credentials in Authorization header")
    line = one_line(lambda: draft.push_to_hub("me/private", token="hf_wrong"), "me/private", "token=", "hf auth login")
    assert "hf_wrong" not in line
    one_line(lambda: draft.config.push_to_hub("me/private", token="hf_wrong"), "me/private", "token=", "hf auth login")


def test_a_data_set_is_cut_and_a_model_is_no_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    lines = "\n".join(json.dumps({"messages": said, "id": i}) for i in range(300)).encode()
    HUB.add("org/chats", files={"a.jsonl": lines, "README.md": b""})
    HUB.datasets.add("org/chats")
    HUB.fail("/datasets/org/chats/resolve/.*a.jsonl", method="GET", cut=1000)
    assert [row["id"] for row in read_conversations("org/chats:a.jsonl")] == list(range(300))
    one_line(lambda: SpeculatorModel.from_pretrained("org/chats"), "org/chats: neither a local folder nor a model")
    one_line(lambda: list(read_conversations("hf:org/none")), "hf:org/none")
    for fault in (dict(status=401), dict(status=503)):
        HUB.fail("/datasets/org/gone", times=99, **fault)
        one_line(lambda: list(read_conversations("org/gone:a.jsonl")), "org/gone/a.jsonl: cannot be fetched")
        HUB.faults.clear()


def test_what_is_not_a_hub(draft, monkeypatch):
    "Pages where a config should be, redirects in a circle, an etag that changes."
    HUB.fail("/org/draft/resolve/main/config.json", method="GET", change=lambda c: b"<!DOCTYPE html>".ljust(len(c)))
    load = lambda: SpeculatorModelConfig.from_pretrained("org/draft", force_download=True)
    one_line(load, "config.json", "not JSON")
    HUB.faults.clear()
    circle = dict(Location="/org/draft/resolve/main/config.json", X_Repo_Commit="0" * 40)
    HUB.fail("/org/draft/resolve/", 302, times=99, **circle)
    one_line(load, "org/draft", "try again")
    HUB.faults.clear()
    HUB.fail("/org/draft/resolve/main/config.json", 200, times=99, body=b"<html>portal</html>")
    one_line(load, "org/draft", "HF_ENDPOINT")
    HUB.faults.clear()
    assert load() == draft.config
    assert HUB.url == constants.ENDPOINT
