"Feature files, feature folders and their records: what does not belong to the rows, to each other or to the verifier."

import functools
import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from speculators_nb.data.chat_encoding import to_dataset
from speculators_nb.features.feature_folder import FeatureDataset
from speculators_nb.features.feature_rows import FP8
from speculators_nb.features.in_process import extract_features
from speculators_nb.verifier.tapped_model import Verifier

from .harness import GOOD, Case

NAN, INF = float("nan"), float("inf")


def spoiled(name="hs_3.safetensors", **tensors):
    "A copy of the good features with one file whose tensors are replaced; None removes one."

    def copy(path):
        shutil.copytree(GOOD["features"], path)
        made = load_file(path / name) | {k: v(load_file(path / name)) if callable(v) else v for k, v in tensors.items()}
        save_file({k: v.contiguous() for k, v in made.items() if v is not None}, path / name)

    return copy


def recorded(**fields):
    "A copy whose data_config.json is changed: part__field=value."

    def copy(path):
        shutil.copytree(GOOD["features"], path)
        config = json.loads((path / "data_config.json").read_text())
        for name, value in fields.items():
            *parts, last = name.split("__")
            functools.reduce(lambda tree, part: tree[part], parts, config)[last] = value
        (path / "data_config.json").write_text(json.dumps(config))

    return copy


def replaced(name, content):
    "A copy in which one file is other bytes; None removes it."

    def copy(path):
        shutil.copytree(GOOD["features"], path)
        (path / name).unlink()
        if content is not None:
            (path / name).write_bytes(content)

    return copy


def everything(folder):
    data = FeatureDataset(folder / "features")
    return [data[i] for i in range(len(data))]


def file_case(name, expect, **tensors):
    return Case(
        f"FeatureDataset: {name}", everything, f"hs_3.safetensors: .*{expect}", {"features": spoiled(**tensors)}
    )


def train_case(name, expect, copy, more=""):
    return Case(
        name,
        f"train {{here}}/features {{here}}/d --verifier {{verifier}} --total-seq-len 32 {more}",
        expect,
        {"features": copy},
    )


def states(change):
    "The stored states, changed."

    def make(tensors):
        return change(tensors["hidden_states"].clone())

    return make


def put(value, at=(2, 1, 3), dtype=None):
    "One number replaced."

    def change(x):
        x = x.to(dtype or x.dtype)
        x[at] = value
        return x

    return states(change)


FILES = [
    file_case("nan", r"nan at \[position, layer slot, channel\] \[2, 1, 3\]", hidden_states=put(NAN)),
    file_case("infinity", r"inf at .*\[2, 1, 3\]", hidden_states=put(INF)),
    file_case("3e38", "3e\\+38 at|2.9.*e\\+38 at|3.0.*e\\+38 at", hidden_states=put(3e38, dtype=torch.float32)),
    file_case("1e19", "e\\+(18|19) at", hidden_states=put(1e19, dtype=torch.float32)),
    file_case("int64 states", "torch.int64, expected torch.bfloat16", hidden_states=states(lambda x: x.long())),
    file_case("no states", "has no hidden_states", hidden_states=None),
    file_case("no tokens", "has no token_ids", token_ids=None),
    file_case(
        "one slot fewer",
        r"hidden_states \[\d+, 3, 16\], the other rows have \['seq', 4, 16\]",
        hidden_states=states(lambda x: x[:, :3]),
    ),
    file_case(
        "half the hidden size",
        r"hidden_states \[\d+, 4, 8\], the other rows have \['seq', 4, 16\]",
        hidden_states=states(lambda x: x[..., :8]),
    ),
    file_case("two dimensions", r"\[seq, A\+1, H\]", hidden_states=states(lambda x: x.flatten(1))),
    file_case("one position fewer", r"for \d+ tokens", hidden_states=states(lambda x: x[:-1])),
    file_case(
        "other tokens",
        "other tokens than the dataset's row, first at position 0",
        token_ids=lambda t: t["token_ids"] + 1,
    ),
    file_case("fewer tokens", r"for \d+ tokens", token_ids=lambda t: t["token_ids"][:-1]),
    file_case(
        "fp8 without scales", "fp8 states without hidden_states_scales", hidden_states=states(lambda x: x.to(FP8))
    ),
    file_case(
        "nan scale",
        "expected positive numbers",
        hidden_states=states(lambda x: x.to(FP8)),
        hidden_states_scales=lambda t: torch.full((len(t["token_ids"]), 1, 1), NAN),
    ),
    file_case(
        "last token another",
        "first at position",
        token_ids=lambda t: torch.cat([t["token_ids"][:-1], t["token_ids"][-1:] + 1]),
    ),
    file_case(
        "zero scale",
        "expected positive numbers",
        hidden_states=states(lambda x: x.to(FP8)),
        hidden_states_scales=lambda t: torch.zeros(len(t["token_ids"]), 1, 1),
    ),
    file_case(
        "integer scales",
        "scales .*torch.int64",
        hidden_states=states(lambda x: x.to(FP8)),
        hidden_states_scales=lambda t: torch.ones(len(t["token_ids"]), 1, 1).long(),
    ),
    file_case(
        "scales of another length",
        r"scales \[3, 1, 1\]",
        hidden_states=states(lambda x: x.to(FP8)),
        hidden_states_scales=torch.ones(3, 1, 1),
    ),
    file_case(
        "too large a scale",
        "at .position",
        hidden_states=states(lambda x: x.to(FP8)),
        hidden_states_scales=lambda t: torch.full((len(t["token_ids"]), 1, 1), 1e30),
    ),
]

BYTES = {
    "empty": b"",
    "eight zero bytes": bytes(8),
    "no header": b"not a safetensors file at all",
    "a huge header length": (2**60).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": (5).to_bytes(8, "little") + b"{{{{{",
    "half the file": (GOOD["features"] / "hs_3.safetensors").read_bytes()[:900],
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "a zip": b"PK\x03\x04" + bytes(100),
}
TORN = [
    Case(
        f"FeatureDataset: a file that is {name}",
        everything,
        "hs_3.safetensors: cut off or not a safetensors file",
        {"features": replaced("hs_3.safetensors", content)},
    )
    for name, content in BYTES.items()
]


def flipped(position):
    "One bit of the states flipped in a file with a checksum."

    def copy(path):
        shutil.copytree(GOOD["features"], path)
        raw = bytearray((path / "hs_3.safetensors").read_bytes())
        raw[position] ^= 1
        (path / "hs_3.safetensors").write_bytes(bytes(raw))

    return copy


FLIPS = [
    Case(
        f"FeatureDataset: a bit flipped at byte {at} from the end",
        everything,
        "hs_3.safetensors: (the checksum|other tokens)",
        {"features": flipped(-at)},
    )
    for at in (1, 200, 700)
]

RECORDS = [
    train_case("record is cut off", "data_config.json: not JSON", replaced("data_config.json", b'{"model": {"target')),
    train_case("model is a string", "data_config.json: model='qwen', expected an object", recorded(model="qwen")),
    train_case("hidden_states is a number", "data_config.json: hidden_states=3", recorded(hidden_states=3)),
    train_case("layer ids are a string", "hidden_states.layer_ids='1234'", recorded(hidden_states__layer_ids="1234")),
    train_case("a negative layer id", "hidden_states.layer_ids=", recorded(hidden_states__layer_ids=[-1, 2, 3, 4])),
    train_case(
        "fewer layer ids than slots",
        r"layer_ids=\[1, 4\]: 2 layers, but the files",
        recorded(hidden_states__layer_ids=[1, 4]),
    ),
    train_case(
        "layer ids beyond the verifier",
        r"layer_ids has \[9\], the verifier has layers 0 to 4.*--trust-features",
        recorded(hidden_states__layer_ids=[1, 2, 9, 4]),
    ),
    train_case(
        "the last layer is not n",
        r"its last must be 4.*--trust-features",
        recorded(hidden_states__layer_ids=[0, 1, 2, 3]),
    ),
    train_case(
        "hidden size 4096",
        "hidden_size is recorded as 4096, the verifier has 16.*--trust-features",
        recorded(model__hidden_size=4096),
    ),
    train_case(
        "another number of layers",
        "num_hidden_layers is recorded as 32, the verifier has 4",
        recorded(model__num_hidden_layers=32),
    ),
    train_case(
        "another fingerprint",
        "fingerprint of its weights is recorded as 0123456789abcdef.*--trust-features",
        recorded(model__fingerprint="0123456789abcdef"),
    ),
    train_case("fingerprint is a number", "model.fingerprint=7, expected a string", recorded(model__fingerprint=7)),
    train_case(
        "split of other words",
        "data_config.json: data.split={'a': 1}, expected numbers of rows.*Make the folder again",
        recorded(data__split={"a": 1}),
    ),
    train_case(
        "features are of another verifier",
        "hidden_size is recorded as 16, the verifier has 128|states of size 16, the verifier .*hidden_size",
        lambda path: shutil.copytree(GOOD["features"], path),
    )._replace(what="train {here}/features {here}/d --verifier {tiny} --total-seq-len 32"),
]


def other_weights(path):
    "The verifier's folder with other weights under the same name."
    shutil.copytree(GOOD["verifier"], path)
    tensors = load_file(path / "model.safetensors")
    save_file({n: t + 0.01 for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})


RECORDS.append(
    Case(
        "weights were changed under the same name",
        "train {features} {here}/d --verifier {here}/verifier",
        "fingerprint of its weights.*--trust-features",
        {"verifier": other_weights},
    )
)


def extract(*rows):
    "Extraction of rows with these token ids."

    def run(folder):
        table = to_dataset([(torch.tensor(r).numpy(), torch.ones(len(r), dtype=torch.bool).numpy()) for r in rows])
        return extract_features(Verifier.from_pretrained(GOOD["verifier"]), table, folder / "out")

    return run


def no_rows(path):
    shutil.copytree(GOOD["features"], path)
    shutil.rmtree(path / "rows")


EXTRACTION = [
    Case(
        "extract_features: a token id beyond the vocabulary",
        extract([1, 2, 3], [4, 3000, 5]),
        "row 1 has token id 3000, the verifier has 64.*tokenizer",
    ),
    Case("extract_features: a negative id", extract([3, -5]), "row 0 has token id -5"),
    Case(
        "folder without rows",
        "train {here}/features {here}/d --verifier {verifier}",
        "no folder 'rows'",
        {"features": no_rows},
    ),
    Case(
        "an empty folder",
        "train {here}/features {here}/d --verifier {verifier}",
        "no folder 'rows'",
        {"features/x.txt": "nothing"},
    ),
    Case(
        "a file of the folder is missing",
        "train {here}/features {here}/d --verifier {verifier} --total-seq-len 32",
        "hs_3.safetensors: missing",
        {"features": replaced("hs_3.safetensors", None)},
    ),
    Case(
        "the table is cut off",
        "train {here}/features {here}/d --verifier {verifier}",
        "rows: the table cannot be read",
        {"features": replaced("rows/data-00000-of-00001.arrow", b"")},
    ),
    Case(
        "the table's state is no JSON",
        "train {here}/features {here}/d --verifier {verifier}",
        "state.json: not JSON",
        {"features": replaced("rows/state.json", b"{")},
    ),
]

CASES = FILES + TORN + FLIPS + RECORDS + EXTRACTION
