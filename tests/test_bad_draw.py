"A small fixed sample of bad input drawn by lot (bad/draw.py); `make nightly` draws 300."

import functools
import os

import pytest
from bad.draw import Drawn, draw, good, judge, play
from bad.harness import Outcome

import speculators_nb.cli.data_commands
import speculators_nb.cli.demo
import speculators_nb.cli.drafter_commands  # noqa: F401  imported before the first fork, so that a case does not pay for it

os.environ["TOKENIZERS_PARALLELISM"] = "false"


drawn_today = functools.cache(functools.partial(draw, 11, 10))  # makes files, so not while tests are collected


@pytest.mark.parametrize("n", range(10))
def test_drawn(n):
    drawn = drawn_today()[n]
    kind, why = judge(drawn, *play(drawn))
    assert kind != "DISAGREES", f"{drawn.scene}:{drawn.story} {' '.join(drawn.words)}\n{why}"


def test_a_draw_is_repeated():
    assert [(d.scene, d.words, d.story) for d in draw(5, 30)] == [(d.scene, d.words, d.story) for d in draw(5, 30)]


def test_the_oracle_sees_what_is_wrong():
    """A test of the test: another result without a word, a traceback, a line that names nothing, an exit code of its
    own and a changed input each disagree."""
    drawn = Drawn("x", "check", ["check", "drf"], names=("model.safetensors",))
    fine = dict(code=0, printed="", wrong="", changed=[], owned=False, there=False, result=good("check")["result"])
    done = Outcome("done", "", 10, 0.1)
    assert judge(drawn, done, fine)[0] == "harmless"
    assert judge(drawn, done, fine | dict(code=2, wrong="Error: drf/model.safetensors: cut off\n"))[0] == "refused"
    assert judge(drawn, done, fine | dict(result="other", printed="3 rows dropped: cut off\n"))[0] == "counted"
    for told in (
        dict(result="other"),
        dict(result="other", printed="dropped: nothing\n"),
        dict(code=2, wrong="Error: something is wrong\n"),
        dict(code=1),
        dict(changed=["a"]),
        dict(owned=True),
        dict(code=2, wrong="Error: model.safetensors\nError: twice\n"),
        dict(code=2, wrong="Error: not enough memory for model.safetensors\n"),
        dict(wrong="Traceback (most recent call last)\n"),
    ):
        assert judge(drawn, done, fine | told)[0] == "DISAGREES", told
    for outcome in (
        Outcome("killed", "SIGALRM", 10, 60.0),
        Outcome("traceback", "", 10, 0.1),
        Outcome("done", "", 4000, 0.1),
    ):
        assert judge(drawn, outcome, fine)[0] == "DISAGREES", outcome
