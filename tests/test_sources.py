"""Where conversations come from: every kind of source, every kind of damage, and who is who."""

import gzip
import json
import random

import forked
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from speculators_nb.data import sources as files
from speculators_nb.data.messages import ROLES, BadRow, content_hash, identity, normalize
from speculators_nb.data.sources import (
    conversation_count,
    hub_name,
    load_table,
    located,
    read_conversations,
)

CHAT = {"id": "a", "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows)
    (gzip.open if path.suffix == ".gz" else open)(path, "wt").write(text) if path.suffix != ".gz" else path.write_bytes(
        gzip.compress(text.encode())
    )
    return path


@pytest.mark.statement("release-42")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_lines(tmp_path, name):
    path = write(tmp_path / name, CHAT, "", SHAREGPT)  # .json that holds lines is common
    assert list(read_conversations(path)) == [CHAT, SHAREGPT]
    assert list(read_conversations(str(path), 1)) == [CHAT]


@pytest.mark.parametrize(
    "whole, rows",
    [
        ([CHAT, SHAREGPT], [CHAT, SHAREGPT]),
        (CHAT, [CHAT]),
        (CHAT["messages"], [{"messages": CHAT["messages"]}]),
        ([], []),
        ([CHAT["messages"]] * 2, [{"messages": CHAT["messages"]}] * 2),
    ],
)
def test_json(tmp_path, whole, rows):
    assert list(read_conversations(write(tmp_path / "a.json", json.dumps(whole, indent=1)))) == rows


def test_a_byte_order_mark_is_no_content_and_another_code_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(CHAT).encode() + b'\n{"x": "\xff"}')
    read = read_conversations(tmp_path / "a.jsonl")
    assert next(read) == CHAT
    with pytest.raises(ValueError, match="a.jsonl, line 2: not UTF-8"):
        next(read)


def test_parquet_and_tables(tmp_path):
    pq.write_table(pa.Table.from_pylist([CHAT, CHAT]), tmp_path / "a.parquet")
    two = [CHAT, CHAT | {"id": "b"}]
    Dataset.from_list(two).save_to_disk(str(tmp_path / "table"), num_shards=2)
    assert list(read_conversations(tmp_path / "a.parquet")) == [CHAT, CHAT]
    assert list(read_conversations(tmp_path / "table")) == two


@pytest.mark.parametrize("read", ["a.parquet", "table"])
def test_a_table_gives_no_call_the_arguments_of_another(tmp_path, read):
    "Nor one tool the parameters of another: columns have the fields of all rows, and None where a row lacks one."

    def row(name, **arguments):
        properties = {k: {"type": "string"} for k in arguments}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        asked = {"role": "user", "content": name}
        says = {"role": "assistant", "tool_calls": [call]}
        return {"messages": [asked, says], "tools": [{"type": "function", "function": function}]}

    rows = [row("weather", city="Bern"), row("add", a="1", b="2")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "table"))
    assert list(read_conversations(tmp_path / read)) == list(read_conversations(Dataset.from_list(rows))) == rows


@pytest.mark.statement("release-42")
def test_a_folder_is_read_below_in_order_and_records_are_passed_over(tmp_path):
    write(tmp_path / "b/2.jsonl", {"id": 2, "messages": []})
    write(tmp_path / "a.jsonl", {"id": 1, "messages": []})
    write(tmp_path / "c.json.gz", json.dumps([{"id": 3, "messages": []}]))
    for name in ("a.jsonl.provenance.json", "out.errors.jsonl", "b/data_config.json", ".hidden/x.jsonl", "notes.txt"):
        write(tmp_path / name, "{}")
    assert [r["id"] for r in read_conversations(tmp_path)] == [1, 2, 3]
    assert [w.removeprefix(str(tmp_path)) for w, _ in located(tmp_path)] == [
        "/a.jsonl, line 1",
        "/b/2.jsonl, line 1",
        "/c.json.gz, item 0",
    ]


def test_hub_ids_through_datasets(tmp_path):
    write(tmp_path / "data/train.jsonl", CHAT, CHAT)
    write(tmp_path / "data/test.jsonl", CHAT)
    assert len(list(read_conversations(f"hf:{tmp_path}"))) == 2
    assert len(list(read_conversations(f"hf:{tmp_path}:test"))) == 1
    assert len(list(read_conversations(f"hf:{tmp_path}:default:test"))) == 1
    assert len(list(read_conversations(f"hf:{tmp_path}:default", 1))) == 1
    with pytest.raises(ValueError, match="split 'validation' cannot be loaded"):
        list(read_conversations(f"hf:{tmp_path}:validation"))


@pytest.mark.parametrize("spec", ["hf:", "hf:a::b", "hf:a:b:c:d", "hf://datasets/a/b", "hf://models/a/b/c.jsonl"])
def test_malformed_hub_ids(spec):
    with pytest.raises(ValueError, match="expected hf:"):
        list(read_conversations(spec))


def test_iterables_stream_and_mix(tmp_path):
    path = write(tmp_path / "a.jsonl", CHAT)

    def endless():
        while True:
            yield SHAREGPT

    assert list(read_conversations(endless(), 3)) == [SHAREGPT] * 3
    assert list(read_conversations([path, CHAT["messages"], SHAREGPT, str(tmp_path)])) == [
        CHAT,
        {"messages": CHAT["messages"]},
        SHAREGPT,
        CHAT,
    ]


def test_a_link_does_not_lead_out_either(tmp_path):
    Dataset.from_list([CHAT]).save_to_disk(str(tmp_path / "out"))
    Dataset.from_list([CHAT]).save_to_disk(str(tmp_path / "table"))
    (file,) = (tmp_path / "table").glob("*.arrow")
    file.unlink()
    file.symlink_to(next((tmp_path / "out").glob("*.arrow")))
    with pytest.raises(ValueError, match="leads out of the folder"):
        load_table(tmp_path / "table")


def test_identity():
    assert identity({"id": 0}) == "0" and identity({"uuid": "u"}) == "u" and identity({"id": "", "uuid": "u"}) == "u"
    assert identity(CHAT) == "a" and identity(SHAREGPT) == content_hash(SHAREGPT)


def test_content_is_what_is_said():
    assert content_hash(CHAT) == content_hash(SHAREGPT) == content_hash(CHAT | {"id": 9, "domain": "x"})
    others = [
        CHAT | {"tools": [{"name": "f"}]},
        {"messages": CHAT["messages"][:1]},
        {"messages": CHAT["messages"][::-1]},
        CHAT | {"images": ["a.png"]},
        {"messages": [CHAT["messages"][0], CHAT["messages"][1] | {"reasoning_content": "2 and 2"}]},
        {"input_ids": [1], "loss_mask": [1]},
        {"input_ids": [1], "loss_mask": [0]},
        {"input_ids": [1, 1], "loss_mask": [0]},
        {"dialog": ["hello", 3]},
        {"dialog": ["good bye", 3]},
    ]
    assert len({content_hash(x) for x in [CHAT, *others]}) == len(others) + 1


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=8)), max_size=5))
def test_hash_ignores_the_order_of_keys(turns):
    a = {"messages": [{"role": r, "content": t} for r, t in turns]}
    b = {"messages": [{"content": t, "role": r} for r, t in turns], "id": 1}
    assert content_hash(a) == content_hash(b)


def test_a_chat_has_one_hash_in_every_spelling():
    talk = [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4"), ("tool", "seen")]
    plain = content_hash({"messages": [{"role": r, "content": t} for r, t in talk]})
    for word, role in [
        pair for pair in ROLES.items() if pair[0] != "function_call"
    ]:  # bot, model, human, developer, observation, …
        words = [word if r == role else r for r, _ in talk]
        for who, what in (("role", "content"), ("from", "value")):
            for spell in (
                str,
                lambda t: [{"type": "text", "text": t}],
                lambda t: [t],
                lambda t: [{"type": "text", "text": t[:2], "image": None}, t[2:]],
            ):
                turns = [{who: w, what: spell(t)} for w, (_, t) in zip(words, talk)]
                for row in (
                    {"messages": turns},
                    {"conversations": turns, "id": 7},
                    {"messages": json.dumps(turns)},
                    turns,
                    {"messages": None, "conversations": [t | {"weight": None} for t in turns]},
                ):
                    assert content_hash(row) == plain, row
    assert (
        content_hash({"messages": [{"role": "assistant" if r == "tool" else r, "content": t} for r, t in talk]})
        != plain
    )
    thought = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    for name in ("reasoning", "thinking"):
        assert (
            content_hash({"messages": [thought["messages"][0], thought["messages"][1] | {name: "hm"}]})
            == content_hash(
                {"messages": [thought["messages"][0], thought["messages"][1] | {"reasoning_content": "hm"}]}
            )
            != content_hash(thought)
        )
    tools = [{"name": "f"}]
    assert (
        content_hash(thought | {"tools": tools})
        == content_hash(thought | {"tools": json.dumps(tools)})
        == content_hash(thought | {"tools": [json.dumps(tools[0])]})
    )


def test_hashes_of_the_first_release():
    "A run of `regenerate` that was begun with 0.1.0 finds what it has done."
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    rows = [
        CHAT,
        SHAREGPT,
        {
            "messages": [
                *CHAT["messages"],
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "x", "tool_call_id": "c", "name": "f"},
            ],
            "tools": [{"name": "f"}],
        },
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}], "images": ["a"]},
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"input_ids": [1, 2], "loss_mask": [False, True]},
        {"messages": []},
    ]
    assert [content_hash(r) for r in rows] == HASHES


HASHES = [
    "350217b1061c7242a52eafee2e1a2d78",
    "350217b1061c7242a52eafee2e1a2d78",
    "621ea0904698b4d00223500418f489ed",
    "7b9219871aee1452409a9e58061d3c71",
    "9b081a2c86639cdeb0894e6f87e9a483",
    "e184dc5b0565f2c8f66e72149fe9dd54",
    "e184dc5b0565f2c8f66e72149fe9dd54",
    "b4848660d62b08b3c9acbc73afa64564",
]


def test_a_long_line_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE", 100)
    rows = [{"id": n, "x": "y" * n} for n in (10, 200, 20, 80, 81, 82, 400)]
    path = write(tmp_path / "a.jsonl.gz", *rows)
    lengths = [len(json.dumps(r)) for r in rows]
    assert 100 in lengths and 101 in lengths  # the limit itself
    read = list(located(path))
    assert [w.rpartition(" ")[2] for w, _ in read] == list("1234567")
    assert [r if isinstance(r, dict) else "" for _, r in read] == [r if n <= 100 else "" for r, n in zip(rows, lengths)]
    assert {r.reason for _, r in read if isinstance(r, BadRow)} == {files.TOO_LONG}


@given(
    st.lists(
        st.one_of(
            st.integers(),
            st.text(max_size=30),
            st.lists(st.integers(-9, 9), max_size=5),
            st.dictionaries(st.text(max_size=3), st.text(max_size=20), max_size=3),
        ),
        max_size=9,
    ),
    st.sampled_from([None, 0, 1]),
    st.integers(1, 40),
)
def test_lists_are_read_piece_by_piece(tmp_path_factory, rows, indent, piece):
    path = tmp_path_factory.mktemp("list") / "a.json"
    path.write_text(
        json.dumps(rows, indent=indent, ensure_ascii=piece % 2 == 0), encoding="utf-8", errors="surrogatepass"
    )
    expected = [r if isinstance(r, dict) else {"messages": r} if isinstance(r, list) else None for r in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE", piece)  # so many characters at a time
        found = [None if isinstance(r, BadRow) else r for _, r in files.read_rows(path)]
    assert found == expected or (rows and isinstance(rows[0], dict) and {"role", "from"} & rows[0].keys())


def test_an_item_without_end_is_no_reason_to_read_on(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE", 1000)
    path = tmp_path / "a.json"
    path.write_text('[{"id": 1},\n{"x": "' + "y" * 10**7)
    with pytest.raises(ValueError, match="a.json, line 2: an item has no end, or is longer than"):
        list(located(path))
    path.write_text(json.dumps([{"role": "user", "content": "y" * 99}] * 50))
    with pytest.raises(ValueError, match="a.json, line 1: one conversation is longer than"):
        list(located(path))


def test_flipped_bits_in_a_table_end_no_process(tmp_path):
    "One of seven in the offsets ended the process before the offsets were looked at."
    Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": "x" * i}], "input_ids": list(range(i)), "loss_mask": [True] * i}
            for i in range(30)
        ]
    ).save_to_disk(str(tmp_path / "t"))
    (file,) = (tmp_path / "t").glob("*.arrow")
    whole, rng = file.read_bytes(), random.Random(0)

    def read_spoilt():
        ends = set()
        for _ in range(60):
            data = bytearray(whole)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.unlink()  # the one that was read may be mapped still
            file.write_bytes(data)
            try:
                list(located(tmp_path / "t"))
                ends.add("read")
            except ValueError:
                ends.add("refused")
        assert ends == {"read", "refused"}

    process = forked.begin(read_spoilt)
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "row",
    [
        dict(question="2 + 2?", answer="4"),
        dict(instruction="2 + 2?", input="", output="4", text="…"),
        dict(prompt="2 + 2?", response="4"),
        dict(prompt=[{"role": "user", "content": "2 + 2?"}], completion=[{"role": "assistant", "content": "4"}]),
        dict(input=[{"role": "user", "content": "2 + 2?"}], output="4", messages=None),
        dict(question="another", messages=CHAT["messages"]),
        dict(id="0", data=["2 + 2?", "4"]),
        dict(problem="2 + 2?", solution="4", answer="…"),
        dict(conversation=CHAT["messages"], model="x"),
    ],
)
def test_questions_and_answers_in_columns(row):
    wanted = normalize([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])
    if "another" in row.values():
        wanted = normalize(CHAT)
    assert normalize(row) == wanted and content_hash(row) == content_hash(wanted)


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("gsm8k") and hub_name("a/b:c.jsonl") == "hf://datasets/a/b/c.jsonl"
    write(tmp_path / "gsm8k/x.jsonl", CHAT)
    assert hub_name("gsm8k") is None and list(read_conversations("gsm8k")) == [CHAT]
    with pytest.raises(FileNotFoundError, match="hf:sharegtp, one file .* known by a name are sharegpt"):
        list(read_conversations("sharegtp"))


@pytest.mark.parametrize(
    "row, wanted",
    [
        (dict(system_prompt="Be short.", question="a", response="b"), [("system", "Be short."), ("user", "a")]),
        (dict(instruction="Add.", input="2, 2", output="4"), [("user", "Add.\n\n2, 2"), ("assistant", "4")]),
        (dict(instruction="Add.", context="2, 2", response="4"), [("user", "Add.\n\n2, 2"), ("assistant", "4")]),
        (dict(messages=[{"role": "system", "content": "x"}], system="y"), [("system", "x")]),
    ],
)
def test_instructions_and_systems(row, wanted):
    assert [(m["role"], m["content"]) for m in normalize(row)][: len(wanted)] == wanted


def test_reasoning_and_calls():
    assert normalize(dict(question="a", answer="b", thinking="c"))[1]["reasoning_content"] == "c"
    (turn,) = normalize([{"from": "function_call", "value": '{"name": "add"}'}])
    assert turn["tool_calls"][0]["function"] == {"name": "add"}


def test_how_many_conversations(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"messages": []}\n\nnot JSON\n')
    assert (conversation_count(file), conversation_count(tmp_path, 1)) == (2, 1)
    assert [conversation_count(d) for d in ([{}, {}], iter([{}]), "gsm8k")] == [2, None, None]
