"""Hubs that refuse, fail or send something else, and config.json files of other versions, projects and engines: each is
one line that names the model, the field or the file, and what helps."""

import json
import logging
import time

from hub.server import Hub
from huggingface_hub import constants

from speculators_nb.core.checkpoints import hub_access
from speculators_nb.core.config import SpeculatorModelConfig
from speculators_nb.data.sources import read_conversations
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.models.convert import convert
from speculators_nb.models.eagle3 import Eagle3DraftModel
from speculators_nb.verifier.parts import load_verifier_tensors

from .configs import changed, top, verifier, without
from .harness import GOOD, Case, _type

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"
PAGE = b"<!doctype html><title>Sign in</title>"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
STORED = "/[0-9a-f]{64}$"


def from_hub(change, call):
    """A call with a hub on this machine that has the drafter org/draft and the verifier org/verifier; `change` makes
    something of them wrong."""

    def what(folder):
        time.sleep = lambda seconds: None  # between the client's attempts; of this process alone
        hub = Hub()
        hub.large = (".safetensors",)
        constants.HF_HUB_OFFLINE, constants.ENDPOINT = False, hub.url
        constants.HUGGINGFACE_CO_URL_TEMPLATE = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        constants.HF_HUB_CACHE, constants.HF_HUB_DISABLE_XET = str(folder / "cache"), True
        hub.add("org/draft", GOOD["drafter"])
        hub.add("org/verifier", GOOD["verifier"])
        hub.folder = folder
        change(hub)
        with hub_access(cache_dir=folder / "cache"):
            return call()

    return what


def replaced(name="org/draft", **files):
    "Publish a model again with other contents; names of files with `__` for a dot, None: left out."

    def change(hub):
        new = {file.replace("__", "."): content for file, content in files.items()}
        old = {file: content for file, content in hub.models[name]["main"][1].items() if file not in new}
        hub.add(name, files=old | {file: content for file, content in new.items() if content is not None})

    return change


def failing(path, *status, **fault):
    return lambda hub: hub.fail(path, *status, times=99, **fault)


def gate(name, granted=None):
    def change(hub):
        hub.gated.add(name)
        hub.granted[name] = granted

    return change


def load(name="org/draft", **given):
    return lambda: SpeculatorModel.from_pretrained(name, verifier=given.pop("verifier", str(GOOD["verifier"])), **given)


def tensors():
    return load_verifier_tensors("org/verifier")


def nothing(hub):
    pass


INDEX = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
OUT = {"weight_map": {"model.norm.weight": "../../secret.safetensors"}}
AS_MODEL = "neither a local folder nor a model"
HUB = {  # what is wrong -> (how, the call, what must be answered)
    "gated, no token": (gate("org/draft"), load(), "org/draft: gated; ask for access at http.*then give token="),
    "gated, a stranger's token": (gate("org/draft", "hf_b"), load(token="hf_a"), "org/draft: gated; ask for access"),
    "a gated verifier": (gate("org/verifier"), tensors, "org/verifier: gated; ask for access at http.*token="),
    "a gated verifier for a conversion": (
        lambda hub: (gate("org/verifier")(hub), hub.add("org/native", GOOD["verifier"])),
        lambda: convert("org/native", "out", "org/verifier"),
        "org/verifier: gated|org/native",
    ),
    "a token that has expired": (
        failing("org/draft", 401, X_Error_Message="Invalid credentials in Authorization header"),
        load(token="hf_old"),
        "org/draft: token= is refused by http.*give another .hf auth login",
    ),
    "a model that is disabled": (
        failing("org/draft", 403, X_Error_Message="Access to this resource is disabled."),
        load(),
        "org/draft: token= is refused by http.*disabled",
    ),
    "no such model": (nothing, load("org/none"), f"org/none: {AS_MODEL} of the hub http.*check the spelling"),
    "a data set for a model": (
        lambda hub: hub.datasets.add("org/draft"),
        load(),
        f"org/draft: {AS_MODEL} of the hub http.*check the spelling",
    ),
    "a data set's address for a model": (nothing, load("datasets/org/draft"), "datasets/org/draft: .*owner/model"),
    "an address for a model": (
        nothing,
        load("https://huggingface.co/org/draft"),
        "https://huggingface.co/org/draft: .*whose names are owner/model",
    ),
    "no such branch": (
        nothing,
        load(revision="v3"),
        "org/draft: revision='v3' is not a branch, tag or commit of http",
    ),
    "no such commit": (nothing, load(revision="0" * 40), "org/draft: revision='0{40}' is not a branch, tag or commit"),
    "a drafter's revision that is no text": (
        nothing,
        load(revision=3),
        "revision=3: must be text, a branch, tag or commit",
    ),
    "no config": (replaced(config__json=None), load(), "org/draft: has no file config.json; see http.*revision="),
    "no weights": (
        replaced(model__safetensors=None),
        load(),
        "no model.safetensors and no model.safetensors.index.json",
    ),
    "a shard is missing": (
        replaced(model__safetensors=None, model__safetensors__index__json=json.dumps(INDEX).encode()),
        load(),
        "model-00001-of-00002.safetensors: no such file, and model.safetensors.index.json says.*fetch it again",
    ),
    "shards elsewhere": (
        replaced("org/verifier", model__safetensors__index__json=json.dumps(OUT).encode()),
        tensors,
        "'../../secret.safetensors' leads out of the folder",
    ),
    "a pointer of Git LFS for weights": (
        replaced(model__safetensors=POINTER),
        load(),
        "model.safetensors: is a pointer of Git LFS, not the file.*git lfs pull",
    ),
    "a pointer of Git LFS for a verifier's weights": (
        replaced("org/verifier", model__safetensors=POINTER),
        tensors,
        "model.safetensors: not a safetensors file",
    ),
    "a page for the config": (replaced(config__json=PAGE), load(), "config.json: not JSON"),
    "half of the weights": (
        replaced(model__safetensors=(GOOD["drafter"] / WEIGHTS).read_bytes()[:2000]),
        load(),
        "model.safetensors: not a complete safetensors file.*fetch it again",
    ),
    "the connection is cut each time": (
        failing(STORED, method="GET", cut=0),
        load(),
        f"org/draft: {AS_MODEL} whose .*safetensors could be fetched .*; try again",
    ),
    "a verifier's connection is cut each time": (
        failing(STORED, method="GET", cut=3),
        tensors,
        f"org/verifier: {AS_MODEL} whose model.safetensors could be fetched .*; try again",
    ),
    "the storage's link has expired": (failing(STORED, 403), load(), "org/draft: token= is refused|403.*try again"),
    "the storage has lost the file": (failing(STORED, 404), load(), "org/draft: .*(404|no file)"),
    "redirects in a circle": (
        failing("/org/draft/resolve", 302, Location="/org/draft/resolve/main/config.json"),
        load(),
        f"org/draft: {AS_MODEL} whose config.json could be fetched .*redirect.*try again",
    ),
    "a busy hub": (
        failing("/org/draft/", 503, Retry_After=1),
        load(),
        f"org/draft: {AS_MODEL} whose config.json could be fetched .*503.*try again",
    ),
    "too many requests": (failing("/org/draft/", 429, Retry_After=1), load(), "config.json could be .*429.*try again"),
    "a fault of the hub": (failing("/org/draft/", 500), load(), "config.json could be .*500.*try again"),
    "a proxy's page": (failing("/org/draft/", 200, body=PAGE), load(), "config.json .*X-Repo-Commit.*HF_ENDPOINT=http"),
    "a listing that is no JSON": (
        failing("/api/models/org/draft", 200, body=PAGE),
        load(),
        "org/draft: .*(JSON|try again)",
    ),
    "a file of a data set that is not there": (
        lambda hub: hub.add("org/chats", files={"README.md": b""}),
        lambda: list(read_conversations("org/chats:a.jsonl")),
        "org/chats/a.jsonl: cannot be fetched .*check the names of data set and file",
    ),
    "a data set that is gated": (
        lambda hub: (hub.add("org/chats", files={"a.jsonl": b"{}"}), gate("org/chats")(hub)),
        lambda: list(read_conversations("org/chats:a.jsonl")),
        "org/chats/a.jsonl: cannot be fetched .*gated",
    ),
    "a push with a token that may not write": (
        failing("/api/repos/create", 403),
        lambda: Eagle3DraftModel.from_pretrained(GOOD["drafter"], verifier=GOOD["verifier"]).push_to_hub("me/x"),
        "me/x: not pushed to http.*403.*give a token= that may write there",
    ),
    "a push to a name that is none": (
        nothing,
        lambda: SpeculatorModelConfig.from_pretrained(GOOD["drafter"]).push_to_hub("a/b/c"),
        "a/b/c: not pushed to http.*a name is owner/model",
    ),
    "a command on a gated model": (
        gate("org/draft"),
        lambda: _type(f"evaluate org/draft {GOOD['corpus']} --verifier {GOOD['tiny']}", "."),
        "^Error: org/draft: gated; ask for access",
    ),
    "a command on a model that is not there": (
        nothing,
        lambda: _type("check org/none", "."),
        f"^Error: .*org/none: {AS_MODEL} of the hub|- .*org/none: {AS_MODEL}",
    ),
}

CONVERTED = "Convert a foreign checkpoint first|is no drafter of this library"
OTHERS = {  # config.json of other projects and engines -> what must be answered
    "EAGLE-3": (
        dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", draft_vocab_size=40, hidden_size=16),
        CONVERTED,
    ),
    "Medusa": (dict(medusa_num_heads=5, medusa_num_layers=1, base_model_name_or_path="lmsys/vicuna-7b"), CONVERTED),
    "a whole verifier": (json.loads((GOOD["verifier"] / CONFIG).read_text()), CONVERTED),
}
VERSIONS = {  # what of a drafter's config.json is another version's -> (change, what must be answered)
    "0.1: no algorithm": (lambda c: c["speculators_config"].pop("algorithm"), "speculators_config.algorithm"),
    "0.1: no proposal methods": (
        lambda c: c["speculators_config"].pop("proposal_methods"),
        "speculators_config.proposal_methods",
    ),
    "0.1: no verifier": (lambda c: c["speculators_config"].pop("verifier"), "speculators_config.verifier"),
    "0.5: a renamed field of the verifier": (verifier(model_name="x"), "speculators_config.verifier.*model_name='x'"),
    "no default": (
        lambda c: c["speculators_config"].pop("default_proposal_method"),
        "speculators_config.default_proposal_method",
    ),
    "a version that is none": (top(speculators_version="latest"), "speculators_version='latest'"),
    "a version that is a number": (top(speculators_version=0.5), "speculators_version=0.5"),
}


def config_of(folder):
    return SpeculatorModelConfig.from_pretrained(folder / "new")


def warnings_of(folder):
    "What is logged while a config is read."
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("speculators_nb").addHandler(handler)
    config_of(folder)
    return said


CASES = [
    *(Case(f"hub: {name}", from_hub(change, call), expect) for name, (change, call, expect) in HUB.items()),
    *(
        Case(f"config.json of {name}", config_of, expect, {"new/config.json": content})
        for name, (content, expect) in OTHERS.items()
    ),
    *(
        Case(f"config.json, a version: {name}", config_of, expect, {"new": changed(how)})
        for name, (how, expect) in VERSIONS.items()
    ),
    Case(
        "config.json, a version: a newer one",
        warnings_of,
        "speculators_version='9.0' is newer than .* 0.x.*compare a few drafts",
        {"new": changed(top(speculators_version="9.0", tree_drafting=True))},
        counted=True,
    ),
    Case(
        "from_pretrained: no block, and no verifier",
        lambda folder: SpeculatorModel.from_pretrained(folder / "new"),
        "speculators_config|config.json names no verifier",
        {"new": changed(without("speculators_config"), "dflash")},
    ),
]
