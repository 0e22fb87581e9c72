"""What is asked, with which randomness and tools' results; in which language; and the record of what is done."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_nb.evaluate.prompts import prompt_of
from speculators_nb.regenerate.journal import Journal, Report, put_in_order, read_regenerated, still_to_do
from speculators_nb.regenerate.language import code_of, language_of, language_of_row, wanted_languages
from speculators_nb.regenerate.replay import Replay, check_sampling, draw_sampling, questions_of, turns_to_ask


def say(role, content="x", **more):
    return {"role": role, "content": content} | more


def call(*names, ids=True, **more):
    return say(
        "assistant",
        None,
        tool_calls=[
            ({"id": f"{n}-{i}"} if ids else {}) | {"type": "function", "function": {"name": n, "arguments": "{}"}}
            for i, n in enumerate(names)
        ],
        **more,
    )


# -------------------------------------------------------------------------------------------------------- what is asked
def test_the_old_assistant_is_dropped_and_everything_else_is_asked_in_order():
    talk = [
        say("system", "s"),
        say("user", "1"),
        say("assistant"),
        say("user", "2a"),
        say("user", "2b"),
        say("assistant"),
        say("system", "s2"),
        say("user", "3"),
    ]
    assert [[m["content"] for m in t.messages] for t in turns_to_ask(talk)] == [["s", "1"], ["2a", "2b"], ["s2", "3"]]
    assert [t.messages for t in turns_to_ask(talk)] == questions_of(talk)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=12))
def test_nothing_that_was_said_to_the_assistant_is_lost_or_doubled(roles):
    talk = [say(role, str(i)) for i, role in enumerate(roles)]
    if "user" not in roles:
        with pytest.raises(ValueError, match="no user message"):
            turns_to_ask(talk)
        return
    turns = turns_to_ask(talk)
    last_user = max(i for i, r in enumerate(roles) if r == "user")
    asked = [m["content"] for t in turns for m in t.messages]
    expected = [m["content"] for m in talk if m["role"] in ("system", "user")]
    assert asked == expected[: len(asked)] and str(last_user) in asked
    assert all(any(m["role"] == "user" for m in t.messages) for t in turns)


@pytest.mark.parametrize(
    "talk, results",
    [
        ([say("user"), call("f"), say("tool", "1", tool_call_id="f-0")], [("f", "1")]),
        ([say("user"), call("f", ids=False), say("tool", "1")], [("f", "1")]),  # by its place
        (
            [say("user"), call("f", "g"), say("tool", "2", tool_call_id="g-1"), say("tool", "1", tool_call_id="f-0")],
            [("g", "2"), ("f", "1")],
        ),
        ([say("user"), call("f", "g", ids=False), say("tool", "1"), say("tool", "2")], [("f", "1"), ("g", "2")]),
        ([say("user"), call("f"), say("tool", "1", name="h")], [("h", "1")]),  # its own word counts
        (
            [
                say("user"),
                say("assistant", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
                say("tool", "1"),
            ],
            [("f", "1")],
        ),
        (
            [
                say("user"),
                say("assistant", "let me see"),
                say("tool", '<tool_response>\n{"name": "f", "content": 1}\n</tool_response>'),
            ],
            [("f", '<tool_response>\n{"name": "f", "content": 1}\n</tool_response>')],
        ),
        ([say("user"), say("assistant", "let me see"), say("tool", "1")], [(None, "1")]),
    ],
)
def test_each_result_has_its_tools_name(talk, results):
    assert turns_to_ask(talk)[0].results == results


TOOLS = [{"type": "function", "function": {"name": n, "parameters": {}}} for n in "fg"]
TALK = {
    "tools": TOOLS,
    "messages": [
        say("user", "q1"),
        call("f"),
        say("tool", "r1"),
        call("g"),
        say("tool", "r2"),
        say("assistant"),
        say("user", "q2"),
        call("f"),
        say("tool", "r3"),
        say("assistant"),
    ],
}


def replayed(*answers, row=TALK):
    replay, answers = Replay(row), list(answers)
    while history := replay.pending():
        message = answers.pop(0)
        replay.add_answer([1] * len(history), [2], message, "tool_calls" if message.get("tool_calls") else "stop")
    assert not answers
    return replay


def test_calls_get_their_results_in_order_turn_by_turn():
    replay = replayed(call("f"), call("g"), say("assistant", "a"), call("f"), say("assistant", "b"))
    assert [m["content"] for m in replay.messages if m["role"] != "assistant"] == [
        "q1",
        "r1",
        "r2",
        "q2",
        "r3",
    ] and not replay.about
    assert [m["tool_call_id"] for m in replay.messages if m["role"] == "tool"] == ["f-0", "g-0", "f-0"]
    # the first turn's results are not the second turn's
    skipped = replayed(say("assistant", "a"), call("f"), say("assistant", "b"))
    assert [m["content"] for m in skipped.messages if m["role"] != "assistant"] == ["q1", "q2", "r3"]


@pytest.mark.parametrize(
    "answers, reason",
    [
        ([call("g")], "a tool call other than"),
        ([call("f"), call("f")], "a tool call other than"),
        ([call("f", "g")], "2 tool calls at once"),
        ([call("f"), call("g"), call("f")], "without a result"),
        ([call("f"), call("g"), say("assistant"), call("f"), call("f")], "without a result"),
    ],
)
def test_a_call_without_its_result_ends_the_conversation_and_stays(answers, reason):
    replay = replayed(*answers)
    assert (
        reason in replay.about["truncated"]
        and replay.messages[-1] == answers[-1]
        and len(replay.finish) == len(answers)
    )
    assert sum(sum(mask) for _, mask in replay.rows) >= 1


def test_tools_of_a_row():
    assert Replay(TALK).tools == TOOLS
    assert Replay(TALK | {"tools": json.dumps(TOOLS)}).tools == TOOLS
    assert Replay(TALK | {"tools": [t["function"] for t in TOOLS]}).tools == TOOLS  # as some collections write them
    assert Replay([say("user")]).tools is None
    with pytest.raises(ValueError, match="tools: not JSON"):
        Replay(TALK | {"tools": "f, g"})


def test_an_empty_answer_is_an_error():
    replay = Replay([say("user")])
    with pytest.raises(ValueError, match="answer 0 has no tokens"):
        replay.add_answer([1], [], say("assistant", ""), "stop")


# ------------------------------------------------------------------------------------------------ with which randomness
def test_draws_follow_their_weights_and_nothing_else():
    wish = check_sampling(
        {
            "temperature": [[0, 1], [1, 3]],
            "reasoning_effort": [["low", 1], ["high", 0]],
            "chat_template_kwargs": [[{"a": 1}, 1], [{"a": 2}, 1]],
            "top_k": 7,
        }
    )
    drawn = [draw_sampling({}, str(i), wish, 0) for i in range(3000)]
    assert abs(sum(d["temperature"] for d in drawn) / 3000 - 0.75) < 5 * (0.75 * 0.25 / 3000) ** 0.5
    assert (
        {d["reasoning_effort"] for d in drawn} == {"low"}
        and {d["chat_template_kwargs"]["a"] for d in drawn} == {1, 2}
        and {d["top_k"] for d in drawn} == {7}
    )
    # drawn independently of each other
    both = sum(d["temperature"] == 1 and d["chat_template_kwargs"]["a"] == 1 for d in drawn) / 3000
    assert abs(both - 0.375) < 5 * (0.375 * 0.625 / 3000) ** 0.5
    assert (
        drawn
        == [draw_sampling({}, str(i), wish, 0) for i in range(3000)]
        != [draw_sampling({}, str(i), wish, 1) for i in range(3000)]
    )


def test_a_row_decides_for_itself():
    row = {
        "temperature": 0,
        "chat_template_kwargs": '{"enable_thinking": false}',
        "reasoning_effort": "high",
        "top_p": None,
    }
    assert draw_sampling(row, "k", {"temperature": [[1, 1]], "top_p": 0.9}, 0) == {
        "temperature": 0,
        "top_p": 0.9,
        "reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert Replay({"messages": [say("user")], **row}).template_kwargs == {
        "enable_thinking": False,
        "reasoning_effort": "high",
    }


@pytest.mark.parametrize(
    "wish, words",
    [
        ({"top": 1}, "'top' is not known"),
        ({"temperature": "hot"}, "'hot' is no number"),
        ({"temperature": True}, "True is no number"),
        ({"top_p": 0}, "top_p: 0 is out of range"),
        ({"temperature": [[1, -1], [0, 2]]}, "must not be negative"),
        ({"temperature": [[1, 0]]}, "one must be positive"),
        ({"chat_template_kwargs": 3}, "3 is no object"),
        ({"temperature": [[1, 1], ["x", 1]]}, "'x' is no number"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wish, words):
    with pytest.raises(ValueError, match=words):
        check_sampling(wish)


# ---------------------------------------------------------------------------------------------------- in which language
@pytest.mark.parametrize(
    "text, language",
    [
        ("Can you write a poem about the sea?", "en"),
        ("How do I sort a list in Python?", "en"),
        ("Dobry dzień", "pl"),
        ("Hvad hedder du?", "da"),
        ("Hva heter du?", "nb"),
        ("Question 3, part 0", "und"),
        ("Kannst du mir bitte ein Gedicht über das Meer schreiben?", "de"),
        ("Écris un poème sur la mer, s'il te plaît.", "fr"),
        ("¿Puedes escribir un poema sobre el mar?", "es"),
        ("Puoi scrivere una poesia sul mare per me?", "it"),
        ("Você pode escrever um poema sobre o mar?", "pt"),
        ("Kun je een gedicht over de zee schrijven?", "nl"),
        ("Można prosić o wiersz o morzu? To jest dla mojej żony.", "pl"),
        ("Bana deniz hakkında bir şiir yazar mısın?", "tr"),  # noqa: RUF001
        ("Напиши стихотворение о море, пожалуйста.", "ru"),  # noqa: RUF001
        ("Напиши вірш про море, їй сподобається.", "uk"),
        ("海についての詩を書いてください。", "ja"),
        ("请写一首关于大海的诗。", "zh"),
        ("바다에 대한 시를 써 주세요.", "ko"),
        ("اكتب قصيدة عن البحر", "ar"),
        ("Viết cho tôi một bài thơ về biển được không?", "vi"),
        ("", "und"),
        ("12 * 7 =", "und"),
        ("```python\nfor the in of: and\n```", "und"),
        ("https://example.com/the/of/and", "und"),
        ("请解释 transformer attention 的工作原理，为什么它有效？", "zh"),  # noqa: RUF001
    ],
)
def test_languages(text, language):
    assert language_of(text) == language


def test_a_filter_reads_the_rows_own_word_first_and_the_users_words_else():
    keep = lambda row, names: language_of_row(row, row["messages"], wanted_languages(names))[1]
    talk = {
        "messages": [
            say("user", "What is the name of the river?"),
            say("assistant", "Das ist der Rhein, und er ist lang."),
        ]
    }
    assert (
        keep(talk, "en")
        and not keep(talk, "de")
        and keep(talk, "latin")
        and not keep(talk, "cyrillic")
        and keep(talk, None)
    )
    assert (
        keep(talk | {"language": "German"}, ["DE"])
        and not keep(talk | {"lang": "fr-CA"}, "en")
        and keep(talk | {"language": ""}, "en")
    )
    assert (code_of("Chinese"), code_of("zh-Hant"), code_of("PT_br")) == ("zh", "zh", "pt")
    assert keep(talk | {"language": "no"}, "Norwegian") and keep(talk | {"language": "nb"}, "no")
    with pytest.raises(ValueError, match="elvish, quenya not known"):
        wanted_languages("en,Quenya,Elvish")


# --------------------------------------------------------------------------------------------------------- what is done
def two_rows(key):
    replay = Replay({"id": key, "messages": [say("user", "1"), say("assistant"), say("user", "2")]})
    replay.add_answer([1, 2], [3], say("assistant", "a"), "stop")
    replay.add_answer([9, 9], [3], say("assistant", "b"), "stop")  # the second prompt does not continue the first row
    return replay


def test_a_conversation_of_two_rows_is_kept_or_dropped_as_one(tmp_path):
    path = tmp_path / "x.jsonl"
    with Journal(path, {}) as journal:
        journal.write(two_rows("a")), journal.write(two_rows("b"))
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):  # a kill at every seventh byte
        path.write_bytes(whole[:cut])
        assert {line["primary_id"] for line in read_regenerated(path)} == set("a" * (cut >= len(whole) // 2))
    with Journal(path, {}) as journal:
        assert set(journal.done) == {"a"}
        journal.write(two_rows("b"))
    assert path.read_bytes() == whole
    ids = [(line["id"], line["part"]) for line in read_regenerated(path)]
    assert ids == [("a_gen0", [0, 2]), ("a_gen1", [1, 2]), ("b_gen0", [0, 2]), ("b_gen1", [1, 2])]


def test_identity_is_the_id_and_else_the_content(tmp_path):
    def todo(rows, path="x.jsonl"):
        with Journal(tmp_path / path, {}) as journal:
            for replay in still_to_do(rows, journal, {}, 0):
                replay.add_answer([1], [2], say("assistant"), "stop")
                journal.write(replay)
        return journal.report

    a, b = {"messages": [say("user", "a")]}, {"messages": [say("user", "b")]}
    assert (todo([a, b, a])["written"], todo([b, a, b])["kept"]) == (2, 2)  # without ids: by content, in any order
    report = todo([a | {"id": 1}, a | {"uuid": "u"}, b | {"id": 1}, a | {"id": 1}], "y.jsonl")
    assert (report["written"], report["duplicates"], report["failed"].total()) == (2, 1, 1)
    assert "belongs to another conversation" in (tmp_path / "y.errors.jsonl").read_text()
    again = todo([b | {"id": 1}, a | {"uuid": "u"}], "y.jsonl")  # the input was changed under an id
    assert (again["kept"], again["written"], again["failed"].total()) == (1, 0, 1)


def line(key, k=0, n=1):
    about = dict(finish_reasons=["stop"], usage=dict(answered=3), content=key.upper())
    return dict(id=f"{key}_gen{k}", primary_id=key, part=[k, n], metadata=about)


def test_the_file_is_put_in_the_order_of_the_input(tmp_path):
    path = tmp_path / "a.jsonl"
    torn = line("e", 0, 2)  # a rank was killed while it appended, and others went on
    lines = [line("old"), line("d"), torn, line("b", 0, 2), line("b", 1, 2), line("c"), line("d"), line("f", 0, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert [row["id"] for row in read_regenerated(path)] == [
        "old_gen0",
        "d_gen0",
        "b_gen0",
        "b_gen1",
        "c_gen0",
        "d_gen0",
    ]
    put_in_order(path, list("abcdef"))
    assert [row["id"] for row in read_regenerated(path)] == ["old_gen0", "b_gen0", "b_gen1", "c_gen0", "d_gen0"]
    before = path.stat().st_ino
    put_in_order(path, list("abcdef"))  # it is in order: nothing is written
    assert path.stat().st_ino == before


def test_ranks_append_to_one_file_and_never_mix_settings(tmp_path):
    "Each answers its share; whoever is last puts the file in order. Other settings are refused at the first row."
    rows, path = [{"id": str(i), "messages": [say("user", str(i))]} for i in range(5)], tmp_path / "x.jsonl"

    def answer(journal):
        for replay in still_to_do(rows, journal, {}, 0):
            replay.add_answer([1], [2], say("assistant"), "stop")
            journal.write(replay)

    seeds = [{"seed": 0}, {"seed": 1}]
    with (
        Journal(path, seeds[0], 0, 2) as one,
        Journal(path, seeds[0], 1, 2) as two,
        Journal(path, seeds[1], 0, 3) as other,
    ):
        with pytest.raises(BlockingIOError, match="another process is writing rank 1 of 2"):
            Journal(path, seeds[0], 1, 2).__enter__()
        answer(two)
        with pytest.raises(ValueError, match="made with other settings: seed was 0, is 1"):
            answer(other)
        answer(one)
    assert [one.report["written"], two.report["written"]] == [3, 2]
    assert [row["primary_id"] for row in read_regenerated(path)] == list("01234")
    with Journal(path, {"seed": 0}) as again:
        answer(again)
    assert (again.report["written"], again.report["kept"]) == (0, 5)


def test_what_is_nested_too_deep_to_be_written_is_one_failure(tmp_path):
    arguments: dict = {}
    for _ in range(2000):
        arguments = {"a": arguments}
    with Journal(tmp_path / "x.jsonl", {}) as journal:
        for key, value in (("a", arguments), ("b", {})):
            replay = Replay({"id": key, "messages": [say("user", "1")]})
            calls = [{"type": "function", "function": {"name": "f", "arguments": value}}]
            replay.add_answer([1], [2], say("assistant", tool_calls=calls), "tool_calls")
            journal.write(replay)
    assert dict(journal.report["failed"]) == {"lists or objects are nested too deep": 1}
    assert [row["primary_id"] for row in read_regenerated(tmp_path / "x.jsonl")] == ["b"]


def test_pictures_in_a_column_are_refused_where_messages_alone_are_read():
    row = {"messages": [say("user", "<image>\nWhat is it?")], "image": "a.png"}
    for read in (Replay, prompt_of):
        with pytest.raises(ValueError, match="its pictures are in a column"):
            read(row)


def test_reports_of_shares_are_added():
    report, other = Report(), Report()
    for key in "abc":
        report.count(line(key))
        other.count(line(key))
    other.add("failed", "EndpointError: status 500", "chats.jsonl, line 3")
    report.add_report(other)
    assert (report["written"], report["tokens"], report["finish_reasons"], report.done) == (6, 18, {"stop": 6}, 7)
    assert "chats.jsonl, line 3" in repr(report)
