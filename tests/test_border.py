"""What comes in at the command line and in recipes, and what goes out: no model of others is replaced, a path means one
place, a name is given once, and neither a key nor a control character reaches the terminal."""

import base64
import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from bad.harness import GOOD, typed

from speculators_nb.cli import main as cli
from speculators_nb.cli.command import _next_line
from speculators_nb.cli.inputs import read_experiment_file
from speculators_nb.cli.recipe import read_plain, read_recipe, with_home
from speculators_nb.cli.run import Planned, RunRecord, Stage, arguments_for, plan_of
from speculators_nb.core.concurrency import pause
from speculators_nb.core.options import printable
from speculators_nb.core.provenance import without_secrets
from speculators_nb.train.train_drafter import train_drafter
from speculators_nb.verifier.folders import foreign_model
from speculators_nb.verifier.identity import VerifierInfo, same_weights, trained_for_another

ROOT = Path(__file__).parents[1]
TINY = GOOD["tiny"]


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def foreign(tmp_path):
    "Folders of models that were not trained here; `link` leads to the first."
    shutil.copytree(GOOD["verifier"], tmp_path / "verifier")
    (tmp_path / "link").symlink_to(tmp_path / "verifier")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    unreadable = tmp_path / "unreadable"
    unreadable.mkdir()
    (unreadable / "config.json").write_text("{")
    return tmp_path


# --- a model of others is never replaced -----------------------------------------------------------------------------

WRITERS = [
    "train {features} {out}",
    "train {features} {out} --overwrite",
    "train {features} {out} --resume",
    "train {features} {out} --overwrite --verifier {other}",
    "features {corpus} {out} --verifier {tiny} --max-samples 1",
    "prepare {corpus} {out} --verifier {tiny}",
    "prepare {corpus} {out} --verifier {tiny} --overwrite",
    "evaluate {drafter} {corpus} --verifier {other} --output-dir {out} --overwrite",
    "vocab {features} 8 --output-dir {out} --overwrite",
    "report {features} --output-dir {out}",
    "doctor {drafter} --output-dir {out} --overwrite",
    "convert {drafter} {out} --verifier {other}",
    "export {drafter} {out}",
    "demo --output-dir {out}",
]


@pytest.mark.parametrize("line", WRITERS)
def test_no_command_writes_into_a_model_of_others(foreign, line):
    before = contents(foreign)
    names = GOOD | {"other": GOOD["verifier"]}
    for out in ("verifier", "link", "adapter", "unreadable"):
        code, _, error = typed(line.format(**names, out=foreign / out).split())
        assert code == 2 and error.count("Error: ") == 1 and out in error, (out, error)
    assert contents(foreign) == before


def test_features_are_not_written_into_a_drafter(tmp_path):
    shutil.copytree(GOOD["drafter"], tmp_path / "drafter")
    before = contents(tmp_path)
    line = f"features {GOOD['corpus']} {tmp_path}/drafter --verifier {TINY} --max-samples 1"
    assert typed(line.split())[0] == 2 and contents(tmp_path) == before


def test_no_function_writes_into_a_model_of_others(foreign):
    before = contents(foreign)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="is the folder of a model"):
            train_drafter(GOOD["features"], foreign / "link", GOOD["verifier"], "eagle3", overwrite=overwrite)
    assert contents(foreign) == before


@pytest.mark.parametrize(
    "files, model",
    [
        ({"config.json": '{"speculators_model_type": "eagle3"}', "model.safetensors": ""}, None),
        ({"config.json": "[]"}, "config.json"),
        ({"model-00001-of-00002.safetensors": ""}, "model-00001-of-00002.safetensors"),
        ({"llama.gguf": ""}, "llama.gguf"),
        ({"run.json": "{}", "model.safetensors": ""}, None),  # a run that was killed
        ({"hs_0.safetensors": "", "data_config.json": "{}"}, None),  # features
        ({"summary.csv": ""}, None),
    ],
)
def test_what_is_a_model_of_others(tmp_path, files, model):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert foreign_model(tmp_path) == model


def stage_of(output, **values):
    values = dict(verifier="V", data="chats.jsonl", output_dir=output) | values
    return Stage("features", "features", values, output, cli.app.functions["features"])


@pytest.mark.parametrize("recorded", ["nothing", "outdated", "elsewhere", "begun here"])
def test_a_run_removes_nothing_that_it_did_not_make(tmp_path, recorded):
    out = tmp_path / "photos"
    out.mkdir()
    (out / "cat.jpg").write_text("a cat")
    stage, record = stage_of(out), RunRecord(tmp_path)
    if recorded == "outdated":  # an earlier stage has run again
        record.begin(stage_of(tmp_path / "earlier"), [stage._replace(name="later")])
        stage = stage._replace(name="later")
    if recorded == "elsewhere":  # the recipe named another folder before
        record.begin(stage_of(tmp_path / "before", max_length=64), [])
    if recorded == "begun here":
        record.begin(stage, [])
    assert not record.is_fresh(stage)
    again = Planned(stage, "will run again", "data has changed")
    with pytest.raises(FileExistsError, match="holds what this run did not make"):
        arguments_for(again, "arguments" in record.entry(stage), fresh=record.is_fresh(stage))
    assert (out / "cat.jpg").exists()
    (planned,) = plan_of([stage], record)
    known = {"outdated": "will run again", "begun here": "will continue"}
    assert planned.state == known.get(recorded, "will reuse")


def test_a_run_removes_what_it_made(tmp_path):
    out = tmp_path / "features"
    stage, record = stage_of(out), RunRecord(tmp_path)
    record.begin(stage, [])
    out.mkdir()
    (out / "hs_0.safetensors").write_text("")
    record.begin(stage, [])  # continued
    again = Planned(stage, "will run again", "")
    assert record.is_fresh(stage)
    arguments_for(again, True, fresh=True)
    assert not out.exists()


# --- one rule for ~ ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, wanted",
    [
        ("~/run", "{home}/run"),
        (Path("~/run"), Path("{home}/run")),
        ("~", "{home}"),
        (["a=~/run", "~/b", 3], ["a={home}/run", "{home}/b", 3]),
        ({"extra": {"draft_config": "~/c.json"}}, {"extra": {"draft_config": "{home}/c.json"}}),
        ("./~/run", "./~/run"),
        ("a~/b", "a~/b"),
        ("~nobody-here/x", "~nobody-here/x"),
        ("hf:org/name", "hf:org/name"),
        ("a$b/c", "a$b/c"),
    ],
)
def test_a_home_folder_is_filled_in_once(tmp_path, monkeypatch, given, wanted):
    monkeypatch.setenv("HOME", str(tmp_path))

    def filled(value):
        if isinstance(value, dict):
            return {k: filled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [filled(v) for v in value]
        return type(value)(str(value).replace("{home}", str(tmp_path))) if isinstance(value, (str, Path)) else value

    assert with_home(given) == filled(wanted) == with_home(with_home(given))


@pytest.mark.parametrize("text", ["$HOME/run", "${HOME}/run", "$HOME", "draft_config=$DIR/x"])
def test_a_variable_is_refused(text):
    with pytest.raises(ValueError, match="variables are not filled in"):
        with_home(text)


@pytest.mark.parametrize("how", ["typed", "option", "recipe", "json"])
def test_every_command_means_the_same_folder_by_a_path_with_home(tmp_path, monkeypatch, how):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    )
    values = dict(data="~/chats.jsonl", output_dir="~/prepared", verifier=str(TINY), num_proc=1)
    (tmp_path / "r.json").write_text(json.dumps({"prepare": values}))
    (tmp_path / "r.yaml").write_text("prepare:\n" + "".join(f"  {k}: {v}\n" for k, v in values.items()))
    prepare = {
        "typed": ["prepare", "~/chats.jsonl", "~/prepared", "--verifier", str(TINY), "--num-proc", "1"],
        "option": [
            "prepare",
            "--data=~/chats.jsonl",
            "--output-dir=~/prepared",
            "--verifier",
            str(TINY),
            "--num-proc=1",
        ],
        "recipe": ["prepare", "--recipe", "~/r.yaml"],
        "json": ["prepare", "--recipe", "~/r.json"],
    }
    code, out, error = typed(prepare[how])
    assert code == 0, error
    names = {p.name for p in tmp_path.iterdir()} - {"r.json", "r.yaml", "chats.jsonl"}
    assert names == {"prepared", ".prepared.lock"} and "~" not in out
    code, out, error = typed(["vocab", "~/prepared", "8", "--output-dir", "~/vocabulary"])
    assert code == 0 and (tmp_path / "vocabulary/d2t-8.npy").is_file(), error
    assert not (tmp_path / "~").exists()


# --- a field is given once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text, words",
    [
        (
            "r.yaml",
            "train: {max-steps: 1}\nprepare: {max-length: 8, max_length: 9}",
            "prepare.max_length=9: is given twice",
        ),
        ("r.yaml", "max_length: 8\nmax-length: 9", "max_length=9: is given twice, also as 8"),
        ("r.yaml", "stitch-mtp: {}\nstitch_mtp: {}", "given twice"),
        ("r.json", '{"prepare": {"max-length": 8, "max_length": 9}}', "max_length and max-length are one field"),
        ("r.json", '{"prepare": {"max_length": 8, "max_length": 9}}', "'max_length' is given twice"),
        ("r.json", '{"prepare": {}, "prepare": {"max_length": 9}}', "'prepare' is given twice"),
        ("r.yaml", "train: {extra: {max-steps: 1, max_steps: 2}}", "max_steps is given twice"),
        ("r.yaml", "seed: 010", "010 is 8 in YAML, which reads it in base 8"),
        ("r.yaml", "prepare: {max_length: 2:08}", "2:08 is 128 in YAML, which reads it in base 60"),
        ("r.yaml", "train: {learning_rate: 1:30.5}", "base 60"),
    ],
)
def test_a_field_that_is_given_twice_or_read_otherwise_is_refused(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        read_recipe(tmp_path / name, "prepare", cli.app.functions)


@pytest.mark.parametrize(
    "text",
    [
        "grid: {max_steps: [1]}\nn-prompts: 2\nn_prompts: 3",
        "grid: {max-steps: [1], max_steps: [2]}",
        "settings: {a: {max-steps: 1, max_steps: 2}}",
    ],
)
def test_an_experiment_s_field_that_is_given_twice_is_refused(tmp_path, text):
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ValueError, match="is given twice"):
        read_experiment_file(tmp_path / "e.yaml")


def test_numbers_as_people_write_them_are_numbers(tmp_path):
    (tmp_path / "r.yaml").write_text("prepare: {seed: 0, max_length: 1_024, val_fraction: 2.5e-1}")
    assert read_recipe(tmp_path / "r.yaml", "prepare", cli.app.functions) == dict(
        seed=0, max_length=1024, val_fraction=0.25
    )
    for number in ("2.5e3", "1e-3", "0x10", "-1.e2"):
        (tmp_path / "r.yaml").write_text(f"learning_rate: {number}")
        assert isinstance(read_plain(tmp_path / "r.yaml", "recipe", "")["learning_rate"], (int, float)), number


# --- a server that refuses --------------------------------------------------------------------------------------------


@pytest.fixture
def refusing():
    "A server that answers every request for work with a status and a text; (status, text, headers) may be changed."

    class Handler(BaseHTTPRequestHandler):
        answer = (401, "", {})

        def log_message(self, *args):
            pass

        def reply(self, status, text, headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self):
            self.reply(200, '{"data": [{"id": "m"}]}', {"Content-Type": "application/json"})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(*Handler.answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    server.handler = Handler
    yield server
    server.shutdown()


@pytest.mark.parametrize(
    "status, text",
    [
        (401, "no \x1b[31mkey\x1b[0m \x9b2J"),
        (403, '{"error": {"message": "not \\u001b]0;you\\u0007"}}'),
        (400, "bad \u202erequest\x00"),
    ],
)
def test_a_server_that_refuses_everything_is_an_error_in_one_clean_line(refusing, tmp_path, status, text):
    refusing.handler.answer = (status, text, {})
    out = tmp_path / "answers.jsonl"
    address = f"http://127.0.0.1:{refusing.server_port}"
    code, printed, error = typed(
        ["regenerate", str(GOOD["corpus"]), str(out), "--server", address, "--max-samples", "3"]
    )
    assert code == 2 and error.strip().splitlines()[-1].startswith("Error: none of 3 conversations was answered")
    assert f"status {status}" in error and "Next:" not in printed
    assert all(c.isprintable() or c == "\n" for c in printed + error.replace("\r", "")), repr(error)
    assert not out.exists() or not out.read_text()


@pytest.mark.parametrize("asked", ["1e9", "inf", "nan", "-5", "Fri, 31 Dec 2999 23:59:59 GMT", "", None])
def test_a_server_cannot_make_us_wait_for_long(asked):
    assert all(0 <= pause(failures, asked) <= 60 for failures in (1, 3, 2000))


def test_what_a_terminal_would_obey_is_written_out():
    assert printable("a\x1b[2J\x9b\x07\r\u202eb\tc\nd é 猫") == "a\\x1b[2J\\x9b\\x07\\r\\u202eb\tc\nd é 猫"


@pytest.mark.parametrize("before, after", [("", ""), ("user:", ""), ("Bearer ", "\n"), ("ab", "cd"), ("x", "yy")])
@pytest.mark.parametrize("key", ["s3cret-Key!", "sk/+?>long~key", "pässword"])
def test_a_key_is_starred_in_any_encoding(monkeypatch, key, before, after):
    monkeypatch.setenv("SOME_API_KEY", key)
    content = (before + key + after).encode()
    texts = [
        base64.b64encode(content),
        base64.urlsafe_b64encode(content),
        content.hex().encode(),
        content.hex().upper().encode(),
    ]
    for text in (t.decode() for t in texts):
        shown = without_secrets(f"echo {text} end")
        assert "***" in shown and len(shown.replace("echo ", "").replace(" end", "")) < len(text) - len(key) // 2


# --- the verifier of a drafter ----------------------------------------------------------------------------------------


@pytest.fixture
def moved(tmp_path):
    "A drafter whose record names its verifier, beside a copy of that verifier."
    verifier, drafter = tmp_path / "verifier", tmp_path / "drafter"
    shutil.copytree(GOOD["verifier"], verifier)
    shutil.copytree(GOOD["drafter"], drafter)
    config = json.loads((drafter / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(verifier)
    (drafter / "config.json").write_text(json.dumps(config))
    (drafter / "run.json").write_text(json.dumps({"verifier": VerifierInfo.of(verifier).fingerprint}))
    return drafter, verifier


def edit(verifier):
    from safetensors.torch import load_file, save_file

    file = next(verifier.glob("*.safetensors"))
    tensors = load_file(file)
    save_file({name: t + 1 for name, t in tensors.items()}, file, {"format": "pt"})


def test_a_verifier_that_was_edited_is_named_by_every_command(moved, caplog, tmp_path):
    drafter, verifier = moved
    assert trained_for_another(drafter, verifier) is None
    lines = [["check", str(drafter)], ["serve", str(drafter)], ["serve", str(drafter), "--verifier", str(verifier)]]
    assert not any("other weights" in "".join(typed(line)[1:]) for line in lines)
    edit(verifier)
    for line in lines:
        assert "was trained for a verifier of other weights" in "".join(typed(line)[1:]), line
    for file in (f for f in TINY.iterdir() if "token" in f.name or f.suffix == ".jinja"):
        shutil.copy(file, verifier)
    evaluated = "".join(typed(["evaluate", str(drafter), str(GOOD["corpus"]), "--max-samples", "1"])[1:])
    assert "was trained for a verifier of other weights" in evaluated
    assert same_weights("served as m", verifier) is same_weights(None, verifier) is None


# --- streams and lines ------------------------------------------------------------------------------------------------

PROGRAM = """
import speculators_nb.cli.command as c
from speculators_nb.cli.command import new_app

def work(output_dir: str | None = None):
    open("done", "w").close()
    return "a result"

work.comments = {}
app = new_app("program", "Works.")
for name in ("work", "rest"):
    c.command(work, str, app, name=name)
app(["work"])
"""


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "2>&-", "<&- >&-", ">/dev/full"])
def test_a_closed_stream_is_no_traceback(tmp_path, closed):
    line, here = f'{sys.executable} -c "$CODE" {closed}', os.environ | {"CODE": PROGRAM}
    done = subprocess.run(["bash", "-c", line], env=here, cwd=tmp_path, capture_output=True, text=True)
    assert (tmp_path / "done").read_text() == "" and "Traceback" not in done.stderr
    full = "Error: standard output: no space left on device. Make room and run the same call again\n"
    assert (done.returncode, done.stderr) == ((2, full) if "full" in closed else (0, "")), done.stderr


def test_a_working_folder_that_is_gone_is_named(tmp_path):
    from speculators_nb.cli.command import failure

    gone, here = tmp_path / "gone", os.getcwd()
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        with pytest.raises(FileNotFoundError) as e:
            os.getcwd()
        text, code = failure(e.value)
    finally:
        os.chdir(here)
    assert text == "the working folder has been removed; change into one that is there (cd)" and code == 2


@pytest.mark.parametrize(
    "steps, line",
    [
        ([("features", Path("-x"), "FEATURES", "--verifier", "V")], "features ./-x FEATURES --verifier V"),
        ([("train", Path("--overwrite"), "DRAFTER")], "train ./--overwrite DRAFTER"),
        ([("evaluate", "-d/r", "P.jsonl"), ("serve", "-d/r")], "evaluate ./-d/r P.jsonl; speculators-nb serve ./-d/r"),
    ],
)
def test_the_next_line_can_be_typed(steps, line):
    assert _next_line(steps, None, cli.app, ()) == f"Next: speculators-nb {line}"


def test_a_folder_that_begins_like_an_option_is_prepared_and_continued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = typed(
        ["prepare", str(GOOD["corpus"]), "./-p", "--verifier", str(TINY), "--max-samples", "2", "--num-proc", "1"]
    )
    (line,) = [line for line in out.splitlines() if line.startswith("Next: ")]
    assert code == 0 and line.startswith("Next: speculators-nb features ./-p FEATURES"), error
    words = line.split()[2:]
    assert typed([*words[:2], "./-f", *words[3:], "--max-samples", "1"])[0] == 0 and (tmp_path / "-f/rows").is_dir()
