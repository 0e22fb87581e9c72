"""What the project says to a hosting platform is so: workflows, forms, citation, hooks, commands on its pages."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/release.md", ".github/PULL_REQUEST_TEMPLATE.md"]
WORKFLOWS = {p.stem: yaml.safe_load(p.read_text()) for p in sorted((ROOT / ".github/workflows").glob("*.yml"))}
MAKE = re.compile(r"\bmake((?: +-\w+)*) +([a-z][a-z0-9-]*)((?: +[A-Z_]+=(?:\"[^\"]*\"|\S*))*)")


def script(name):
    "A module of .ci/"
    spec = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- make targets


def targets(makefile=MAKEFILE):
    "Every target that a page or a workflow may name"
    return set(re.findall(r"^([a-z0-9-]+):(?!=)", makefile, flags=re.M))


def unknown(text, makefile=MAKEFILE):
    "Targets and variables of `make` commands in the text that the Makefile has not"
    named = MAKE.findall(text)
    variables = {v for *_, given in named for v in re.findall(r"([A-Z_]+)=", given)}
    return {t for _, t, _ in named} - targets(makefile) | {v for v in variables if f"$({v})" not in makefile}


def code(page):
    "What a page shows as code: blocks, and words between backticks"
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, flags=re.M | re.S)
    return "\n".join([*blocks, *re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S))])


def commands(workflow):
    "The commands of all steps; `${{ matrix.x }}` stands for each value that the matrix has for it"
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            lines = [step.get("run", "")]
            for key, values in matrix.items():
                if key != "include":
                    lines = [line.replace(f"${{{{ matrix.{key} }}}}", str(v)) for line in lines for v in values]
            yield from lines


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_targets_that_exist(page):
    text = code((ROOT / page).read_text())
    assert unknown(text) == set()
    assert MAKE.search(text), "nothing was looked at"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_call_targets_that_exist(name):
    text = "\n".join(commands(WORKFLOWS[name]))
    assert unknown(text) == set()
    assert MAKE.search(text), "nothing was looked at"


def test_a_target_that_does_not_exist_is_seen():
    makefile = "test: lint  ## all\nlint:\n\techo $(BASE)\nX := y\n"
    assert targets(makefile) == {"test", "lint"}
    assert unknown("make -k test && make lint BASE=main", makefile) == set()
    assert unknown("make tests", makefile) == {"tests"}
    assert unknown('make lint PINS="a==1 b==2" BASE=x\nmake lint TAG=v1', makefile) == {"PINS", "TAG"}
    assert code("Say `make a`.\n```bash\nmake b\n```\nmake sure") == "make b\n\nmake a"
    steps = [{"run": "make ${{ matrix.target }}"}, {"uses": "x"}]
    job = {"strategy": {"matrix": {"target": ["a", "b"]}}, "steps": steps}
    assert [*commands({"jobs": {"j": job}})] == ["make a", "make b", "", ""]


def test_the_jobs_are_those_that_contributors_are_told_of():
    ran = {t for c in commands(WORKFLOWS["ci"]) for _, t, _ in MAKE.findall(c)}
    assert {"quick", "test", "browser-test", "vllm-test", "pipeline-test", "pytest"} <= ran
    steps = re.findall(r"^step make (.+?)(?:  #.*)?$", (ROOT / ".ci/run").read_text(), flags=re.M)
    words = {word for step in steps for word in step.split()}
    targets = {word for word in words if re.match("[a-z]", word)} - {"vllm"}  # which is installed, not tested
    assert {"vllm-test", "pipeline-test"} <= targets <= ran, ".ci/run and ci.yml run the same"


def test_the_night_runs_all_of_make_nightly():
    ran = {t for c in commands(WORKFLOWS["nightly"]) for _, t, _ in MAKE.findall(c)}
    parts = set(re.search(r"^nightly:(.*?)##", MAKEFILE, flags=re.M)[1].split()) - {".venv/.dev"}
    assert parts and parts | {"vllm-test", "newest"} <= ran
    assert WORKFLOWS["nightly"]["jobs"]["newest"]["continue-on-error"] is True, "it reports, and fails nothing"


# ---- versions


def bound(name):
    return next(Requirement(r).specifier for r in PROJECT["dependencies"] if Requirement(r).name == name)


def lowest(specifier):
    return next(Version(s.version) for s in specifier if s.operator == ">=")


def same(a, b):
    "2.10 and 2.10.0 are one version"
    return Version(str(a)) == Version(str(b))


def ends(workflow):
    "oldest, newest -> package -> version, as the matrix of ci.yml has them"
    rows = workflow["jobs"]["pytest"]["strategy"]["matrix"]["include"]
    pins = {row["versions"]: dict(pin.split("==") for pin in row["pins"].split()) for row in rows}
    return {row["versions"]: {"torch": row["torch"]} | pins[row["versions"]] for row in rows}


def faults_of_ends(found):
    "Which ends lie outside of pyproject's bounds, or are no ends"
    for end, versions in found.items():
        for name, version in versions.items():
            if version not in bound(name):
                yield f"{end}: {name} {version} is not in {bound(name)}"
    for name in ("torch", "transformers"):
        if not same(found["oldest"][name], lowest(bound(name))):
            yield f"oldest: {name} {found['oldest'][name]} is not the lowest that pyproject.toml lets in"
        if not Version(found["oldest"][name]) < Version(found["newest"][name]):
            yield f"newest: {name} {found['newest'][name]} is not newer"


def test_python_versions_agree():
    classified = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert WORKFLOWS["ci"]["jobs"]["pytest"]["strategy"]["matrix"]["python"] == classified == ["3.11", "3.12", "3.13"]
    assert f">={classified[0]}" == PROJECT["requires-python"]


def test_both_ends_lie_within_the_bounds():
    found = ends(WORKFLOWS["ci"])
    assert set(found) == set(WORKFLOWS["ci"]["jobs"]["pytest"]["strategy"]["matrix"]["versions"])
    assert list(faults_of_ends(found)) == []
    pinned = dict(line.split("==") for line in script("pins").constraints((ROOT / "constraints.txt").read_text()))
    assert Version(found["newest"]["transformers"]) >= Version(pinned["transformers"])
    for versions in found.values():  # what the Makefile would make of it
        script("pins").constraints("", [f"{n}=={v}" for n, v in versions.items() if n != "torch"])


def test_ends_outside_of_the_bounds_are_seen():
    found = ends(WORKFLOWS["ci"])
    assert len(list(faults_of_ends(found | {"newest": found["newest"] | {"transformers": "6.0.0"}}))) == 1
    assert len(list(faults_of_ends(found | {"oldest": found["oldest"] | {"torch": "2.11.0"}}))) == 1
    assert len(list(faults_of_ends(found | {"oldest": found["newest"]}))) == 4


def test_the_upper_bound_is_the_same_in_every_file():
    "pyproject.toml, settings.ini, ci.yml and two pages; `python .ci/pins.py --raise` writes all of them."
    raised, newest = script("pins").raised, ends(WORKFLOWS["ci"])["newest"]["transformers"]
    assert raised(newest) == {file: (ROOT / file).read_text() for file in raised(newest)}
    other = raised("9.8.7")
    assert (
        "transformers>=5.16,<9.9" in other["pyproject.toml"]
        and "transformers 5.16 to 9.8; " in other["docs/installation.md"]
    )
    assert "transformers==9.8.7\n" in other[".github/workflows/ci.yml"]
    with pytest.raises(SystemExit, match="'9' is no release"):
        raised("9")


def test_the_page_names_the_same_oldest_versions():
    oldest = ends(WORKFLOWS["ci"])["oldest"]
    pins = " ".join(f"{n}=={v}" for n, v in oldest.items() if n != "torch")
    assert f'TORCH="torch=={oldest["torch"]}" PINS="{pins}"' in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_use_the_makefiles_torch(name):
    default = re.search(r"torch==[\d.]+", MAKEFILE.split("TORCH ?=")[1])[0]
    assert WORKFLOWS[name]["env"]["TORCH"].split()[0] == default
    assert "3.11" in str(WORKFLOWS[name]["jobs"]), "the pins are tried on Python 3.11"


# ---- pins


def test_pins_replace_lines():
    constraints = script("pins").constraints
    text = "# a comment\nHuggingFace_Hub==2.4.0\nnumpy==2.4.6\n"
    assert constraints(text) == ["HuggingFace_Hub==2.4.0", "numpy==2.4.6"]
    assert constraints(text, ["huggingface-hub==1.33.0"]) == ["numpy==2.4.6", "huggingface-hub==1.33.0"]
    for wrong in ("numpy>=2", "numpy", "torch==2.10.0", "numpy==2.*"):
        with pytest.raises(SystemExit, match="PINS"):
            constraints(text, [wrong])


def test_the_newest_of_every_requirement_is_asked_for():
    names = script("pins").requirements(PROJECT)
    assert {"transformers", "huggingface-hub", "pytest", "sphinx", "pre-commit"} <= set(names)
    assert "torch" not in names and not any(set(n) & set("<>=~!;[") for n in names)


# ---- what a workflow may do


def faults_of(workflow):
    "What a workflow may not do, or leaves open"
    if workflow.get("permissions") != {"contents": "read"}:
        yield "permissions of the workflow: contents: read, and nothing else"
    if not workflow.get("concurrency", {}).get("group"):
        yield "no concurrency group"
    for name, job in workflow["jobs"].items():
        if "timeout-minutes" not in job or job["timeout-minutes"] > 360:
            yield f"{name}: no time limit that a hosted job can have"
        if not re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"]):
            yield f"{name}: runs-on names no version"
        if "permissions" in job and not job.get("if", "").startswith("vars."):
            yield f"{name}: more permissions, and it is not switched off"
        for step in job["steps"]:
            if not re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1")):
                yield f"{name}: {step['uses']} has no major version"
            if "checkout" in step.get("uses", "") and step.get("with", {}).get("persist-credentials") is not False:
                yield f"{name}: the token stays in the clone"
            if re.search(r"\$\{\{ *github\.", step.get("run", "")):
                yield f"{name}: text of an event in a command; pass it by env"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_may_do_little(name):
    assert list(faults_of(WORKFLOWS[name])) == []


def test_a_careless_workflow_is_seen():
    step = {"uses": "actions/checkout@main", "run": "echo ${{ github.head_ref }}"}
    job = {"runs-on": "ubuntu-latest", "permissions": {"id-token": "write"}, "steps": [step]}
    assert len(list(faults_of({"jobs": {"j": job}}))) == 8


def test_publishing_is_off():
    publish = WORKFLOWS["release"]["jobs"]["publish"]
    assert publish["if"] == "vars.PUBLISH == 'yes'" and publish["needs"] == "wheel"
    assert publish["permissions"] == {"id-token": "write"} and not any("run" in step for step in publish["steps"])
    assert "`PUBLISH` to `yes`" in (ROOT / "docs/release.md").read_text()


def test_a_release_is_checked_before_it_is_kept():
    steps = [step.get("run") or step["uses"] for step in WORKFLOWS["release"]["jobs"]["wheel"]["steps"]]
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}, "YAML reads the key `on` as true"
    last = ['make release-check TAG="$TAG"', "make -k test", "actions/upload-artifact"]
    assert [s.split("@")[0] for s in steps[2:]] == last


# ---- forms, updates, citation, hooks


def faults_of_form(form):
    "What the platform would refuse in the form of an issue"
    yield from (f"no {key}" for key in ("name", "description", "body") if not form.get(key))
    ids = [part.get("id") for part in form["body"] if part["type"] != "markdown"]
    if len(set(ids)) != len(ids) or None in ids:
        yield "ids are missing or not unique"
    for part in form["body"]:
        if part["type"] not in ("markdown", "input", "textarea", "dropdown", "checkboxes"):
            yield f"no such type: {part['type']}"
        elif not part.get("attributes", {}).get("value" if part["type"] == "markdown" else "label"):
            yield f"{part.get('id')}: no label"
        elif part["type"] in ("dropdown", "checkboxes"):
            options = part["attributes"].get("options", [])
            words = [o.get("label") if isinstance(o, dict) else o for o in options]
            if not words or not all(isinstance(word, str) for word in words):
                yield f"{part['id']}: options are words; yes and no need quotes"


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_forms(name):
    assert list(faults_of_form(yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text()))) == []


def test_a_bad_form_is_seen():
    choice = {"type": "dropdown", "id": "a", "attributes": {"label": "b", "options": [True]}}
    assert len(list(faults_of_form({"name": "n", "body": [choice, choice, {"type": "text", "id": "c"}]}))) == 5


def test_the_bug_report_asks_for_what_exists():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text())
    text = next(p for p in form["body"] if p.get("id") == "versions")["attributes"]["description"]
    asked = re.search(r'python -c "(.*)"', text, flags=re.S)[1]
    exec(compile(asked, "bug_report.yml", "exec"), {})


def test_updates_are_weekly():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert sorted(u["package-ecosystem"] for u in updates) == ["github-actions", "pip"]
    assert {u["schedule"]["interval"] for u in updates} == {"weekly"}


CITATION_KEYS = {
    *("abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi", "identifiers", "keywords"),
    *("license", "license-url", "message", "preferred-citation", "references", "repository", "repository-artifact"),
    *("repository-code", "title", "type", "url", "version"),
}
ENTITY_KEYS = {
    *("address", "alias", "city", "country", "date-end", "date-start", "email", "fax", "location", "name", "orcid"),
    *("post-code", "region", "tel", "website"),
}


def faults_of_citation(cff):
    "What cff 1.2.0 does not allow"
    yield from (f"no {key}" for key in ("cff-version", "message", "title", "authors") if not cff.get(key))
    yield from (f"no such key: {key}" for key in sorted(set(cff) - CITATION_KEYS))
    for author in cff.get("authors", []):
        yield from (f"no such key of an entity: {key}" for key in sorted(set(author) - ENTITY_KEYS))
        if "name" not in author:
            yield "an entity without a name"
    if cff.get("cff-version") != "1.2.0" or cff.get("type") not in ("software", "dataset"):
        yield "cff-version 1.2.0, type software"
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(cff.get("date-released"))) or not isinstance(cff.get("version"), str):
        yield "date-released is a date, version a text"


def test_citation():
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert list(faults_of_citation(cff)) == []
    assert cff["authors"] == PROJECT["authors"] and cff["license"] == PROJECT["license"]
    assert cff["title"] == PROJECT["name"] and cff["keywords"] == PROJECT["keywords"]
    assert "repository-code" not in cff and "url" not in cff, "the project has no address yet"


def test_a_bad_citation_is_seen():
    cff = {"title": "t", "author": "a", "authors": [{"given-names": "b"}], "version": 0.2}
    assert len(list(faults_of_citation(cff))) == 7


def test_hooks_are_of_this_clone():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    assert [hook["id"] for hook in repos[0]["hooks"]] == ["nbdev-clean", "ruff-check", "ruff-format", "export-in-sync"]
    for hook in repos[0]["hooks"]:
        program, *arguments = hook["entry"].split()
        assert hook["language"] == "system" and program.startswith(".venv/bin/"), hook["id"]
        assert Path(sys.executable).with_name(Path(program).name).exists(), f"{program} is no part of the environment"
        for path in (a.partition("::")[0] for a in arguments if a.endswith(".py") or "::" in a):
            assert (ROOT / path).exists(), path
