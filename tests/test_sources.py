"""Where conversations come from: every kind of source, every kind of damage, and who is who."""
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from speculators_nb.data_generation.sources import content_hash, files_of, identity, load_table, located, read_conversations

CHAT = {"id": "a", "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows)
    (gzip.open if path.suffix == ".gz" else open)(path, "wt").write(text) if path.suffix != ".gz" else path.write_bytes(gzip.compress(text.encode()))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_lines(tmp_path, name):
    path = write(tmp_path / name, CHAT, "", SHAREGPT)  # .json that holds lines is common
    assert list(read_conversations(path)) == [CHAT, SHAREGPT]
    assert list(read_conversations(str(path), 1)) == [CHAT]


@pytest.mark.parametrize("whole, rows", [([CHAT, SHAREGPT], [CHAT, SHAREGPT]), (CHAT, [CHAT]), (CHAT["messages"], [{"messages": CHAT["messages"]}]), ([], []),
                                         ([CHAT["messages"]] * 2, [{"messages": CHAT["messages"]}] * 2)])
def test_json(tmp_path, whole, rows):
    assert list(read_conversations(write(tmp_path / "a.json", json.dumps(whole, indent=1)))) == rows


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(CHAT).encode())
    assert list(read_conversations(tmp_path / "a.jsonl")) == [CHAT]


def test_parquet_and_tables(tmp_path):
    pq.write_table(pa.Table.from_pylist([CHAT, CHAT]), tmp_path / "a.parquet")
    Dataset.from_list([CHAT]).save_to_disk(str(tmp_path / "table"))
    assert list(read_conversations(tmp_path / "a.parquet")) == [CHAT, CHAT]
    assert list(read_conversations(tmp_path / "table")) == [CHAT]


def test_a_folder_is_read_below_in_order_and_records_are_passed_over(tmp_path):
    write(tmp_path / "b/2.jsonl", {"id": 2, "messages": []})
    write(tmp_path / "a.jsonl", {"id": 1, "messages": []})
    write(tmp_path / "c.json.gz", json.dumps([{"id": 3, "messages": []}]))
    for name in ("a.jsonl.provenance.json", "out.errors.jsonl", "b/data_config.json", ".hidden/x.jsonl", "notes.txt"):
        write(tmp_path / name, "{}")
    assert [r["id"] for r in read_conversations(tmp_path)] == [1, 2, 3]
    assert [w.removeprefix(str(tmp_path)) for w, _ in located(tmp_path)] == ["/a.jsonl, line 1", "/b/2.jsonl, line 1", "/c.json.gz, item 0"]


def test_hub_ids_through_datasets(tmp_path):
    write(tmp_path / "data/train.jsonl", CHAT, CHAT)
    write(tmp_path / "data/test.jsonl", CHAT)
    assert len(list(read_conversations(f"hf:{tmp_path}"))) == 2
    assert len(list(read_conversations(f"hf:{tmp_path}:test"))) == 1
    assert len(list(read_conversations(f"hf:{tmp_path}:default:test"))) == 1
    assert len(list(read_conversations(f"hf:{tmp_path}:default", 1))) == 1
    with pytest.raises(ValueError, match="split 'validation' cannot be loaded"): list(read_conversations(f"hf:{tmp_path}:validation"))


@pytest.mark.parametrize("spec", ["hf:", "hf:a::b", "hf:a:b:c:d", "hf://datasets/a/b", "hf://models/a/b/c.jsonl"])
def test_malformed_hub_ids(spec):
    with pytest.raises(ValueError, match="expected hf:"): list(read_conversations(spec))


def test_iterables_stream_and_mix(tmp_path):
    path = write(tmp_path / "a.jsonl", CHAT)

    def endless():
        while True:
            yield SHAREGPT
    assert list(read_conversations(endless(), 3)) == [SHAREGPT] * 3
    assert list(read_conversations([path, CHAT["messages"], SHAREGPT, str(tmp_path)])) == [CHAT, {"messages": CHAT["messages"]}, SHAREGPT, CHAT]


@pytest.mark.parametrize("rows, words", [((CHAT, '{"id": "b", "mess'), "a.jsonl, line 2: not JSON"), ((CHAT, "", "7"), "a.jsonl, line 3: holds a int"), (('"text"',), "line 1: holds a str")])
def test_broken_lines_are_named(tmp_path, rows, words):
    with pytest.raises(ValueError, match=words): list(read_conversations(write(tmp_path / "a.jsonl", *rows)))


def test_broken_json_is_named(tmp_path):
    with pytest.raises(ValueError, match="a.json, line 3: not JSON"): list(read_conversations(write(tmp_path / "a.json", "[", "{},", "{]")))
    with pytest.raises(ValueError, match="item 1: holds a int"): list(read_conversations(write(tmp_path / "b.json", "[{}, 3]")))


def test_a_cut_off_gzip_file_is_an_error_after_what_could_be_read(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", *[CHAT | {"id": str(i)} for i in range(3000)])
    path.write_bytes(path.read_bytes()[:-20])
    seen = []
    with pytest.raises(ValueError, match=r"a.jsonl.gz, after line \d+: the compressed file is cut off"):
        for row in read_conversations(path): seen.append(row)
    assert 0 < len(seen) <= 3000


def test_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{}\n{"x": "\xff"}')
    with pytest.raises(ValueError, match="a.jsonl, line 2: not UTF-8"): list(read_conversations(tmp_path / "a.jsonl"))


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="hf:"): list(read_conversations(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="holds no file"): files_of(tmp_path)
    with pytest.raises(ValueError, match="cannot read this kind"): files_of(write(tmp_path / "a.txt", "x"))


@pytest.mark.parametrize("name", ["../out.arrow", "/etc/passwd", "..", ""])
def test_a_table_cannot_name_files_elsewhere(tmp_path, name):
    Dataset.from_list([CHAT]).save_to_disk(str(tmp_path / "out"))
    Dataset.from_list([CHAT]).save_to_disk(str(tmp_path / "table"))
    state = json.loads((tmp_path / "table/state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (tmp_path / "table/state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="leads out of the folder"): load_table(tmp_path / "table")


def test_a_link_does_not_lead_out_either(tmp_path):
    Dataset.from_list([CHAT]).save_to_disk(str(tmp_path / "out"))
    Dataset.from_list([CHAT]).save_to_disk(str(tmp_path / "table"))
    (file,) = (tmp_path / "table").glob("*.arrow")
    file.unlink()
    file.symlink_to(next((tmp_path / "out").glob("*.arrow")))
    with pytest.raises(ValueError, match="leads out of the folder"): load_table(tmp_path / "table")


def test_a_torn_table_is_refused(tmp_path):
    Dataset.from_list([CHAT] * 50).save_to_disk(str(tmp_path / "table"))
    (file,) = (tmp_path / "table").glob("*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="cannot be read|leads out"): load_table(tmp_path / "table")
    with pytest.raises(FileNotFoundError, match="no state.json"): load_table(tmp_path)


def test_identity():
    assert identity({"id": 0}) == "0" and identity({"uuid": "u"}) == "u" and identity({"id": "", "uuid": "u"}) == "u"
    assert identity(CHAT) == "a" and identity(SHAREGPT) == content_hash(SHAREGPT)


def test_content_is_what_is_said():
    assert content_hash(CHAT) == content_hash(SHAREGPT) == content_hash(CHAT | {"id": 9, "domain": "x"})
    others = [CHAT | {"tools": [{"name": "f"}]}, {"messages": CHAT["messages"][:1]}, {"messages": CHAT["messages"][::-1]}, CHAT | {"images": ["a.png"]},
              {"messages": [CHAT["messages"][0], CHAT["messages"][1] | {"reasoning_content": "2 and 2"}]}, {"input_ids": [1], "loss_mask": [1]}, {"input_ids": [1], "loss_mask": [0]},
              {"input_ids": [1, 1], "loss_mask": [0]}]
    assert len({content_hash(x) for x in [CHAT, *others]}) == len(others) + 1


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=8)), max_size=5))
def test_hash_ignores_the_order_of_keys(turns):
    a = {"messages": [{"role": r, "content": t} for r, t in turns]}
    b = {"messages": [{"content": t, "role": r} for r, t in turns], "id": 1}
    assert content_hash(a) == content_hash(b)
