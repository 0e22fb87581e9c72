"""Why is my acceptance 1.9 and the paper's 6? Diagnosis of a drafter from data to engine.
The doctor names the first stage that loses, with a number, a remedy, and the page that explains it."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from ..core.config import SpeculatorModelConfig
from ..core.files import write_text
from ..core.options import check_options
from ..core.provenance import provenance_path, read_provenance, write_provenance
from ..data.chat_template import open_tokenizer
from ..decode.generate import Generation
from ..evaluate.prompts import Prompt, encode_prompts, read_prompts
from ..features.feature_folder import FeatureDataset
from ..features.in_process import LiveFeatures
from ..models.base import SpeculatorModel, stored_state
from ..regenerate.in_process import eos_ids_of
from ..report.page import Section, page_html, write_page
from ..train.run_record import read_record
from ..train.train_drafter import training_split
from ..verifier.folders import DIAGNOSIS, named_by, refuse_overwriting
from ..verifier.identity import VerifierInfo
from ..verifier.tapped_model import Verifier
from .data_checks import STAGES, Finding, Rows, answers_check, features_check, judged, mask_check, rows_of
from .data_checks import shift_check, template_check, unchecked, verifier_check, vocabulary_check
from .drafter_checks import Batch, Decoded, Measurement, acceptance_check, data_check, decode, domains_check
from .drafter_checks import engine_check, forward_options, heldout_batches, history_check, last_evaluation
from .drafter_checks import learned_check, length_check, mapping_check, measure, pair_accuracy, plot_history
from .drafter_checks import predicted_length, repair_checks, seen_by_domain, trained_length, tree_note, weights_check


class Sources(NamedTuple):
    "Where everything about a drafter is."

    drafter: str  # folder or hub id
    verifier: str  # folder or hub id
    features: Path | None  # None: not found
    record: Mapping[str, Any]  # run.json; empty: there is none
    history: pd.DataFrame  # training_log.csv; empty: there is none
    split: Mapping[str, Any]  # eval_share and seed of the run, where they are known


def find_sources(
    drafter: str | os.PathLike, verifier: str | os.PathLike | None = None, features: str | os.PathLike | None = None
) -> Sources:
    """Read what a drafter's folder says about itself, unless verifier (by its config) or features (by its provenance,
    if they are here) are given. Errors: FileNotFoundError; ValueError for a folder that holds no drafter, or features
    that are none."""
    folder, log = Path(drafter), Path(drafter) / "training_log.csv"
    made = read_provenance(folder) if provenance_path(folder).is_file() else {}
    given, inputs = (made.get(part, {}) for part in ("arguments", "inputs"))
    of = SpeculatorModelConfig.from_pretrained(drafter).speculators_config
    named = of.verifier.name_or_path if of else None
    verifier = verifier or named or inputs.get("verifier", {}).get("path")
    if not verifier:
        raise ValueError(f"verifier=None: {folder} names none; give its folder or hub id")
    if features is None and (found := inputs.get("features", {}).get("path")) and Path(found).is_dir():
        features = found
    record = read_record(folder)
    seed = given.get("seed", record.get("settings", {}).get("seed", 0))
    history = pd.read_csv(log) if log.is_file() and log.stat().st_size > 1 else pd.DataFrame()
    place = Path(features) if features is not None else None
    split = dict(eval_share=given.get("eval_share"), seed=seed)
    return Sources(str(drafter), str(verifier), place, record, history, split)


LOOKED_AT = 32  # rows and prompts that are run through the verifier at most
DECODED = 8  # prompts that are decoded, of each domain


def answered_rows(answers: list[Generation]) -> Dataset:
    "Prompts and the answer to each, as rows (input_ids, loss_mask, seq_len) whose answers are trained."
    rows = [(g.prompt + g.tokens, [0] * len(g.prompt) + [1] * len(g.tokens)) for g in answers]
    return Dataset.from_list([dict(input_ids=ids, loss_mask=mask, seq_len=len(ids)) for ids, mask in rows])


@dataclass
class Examination:
    "What is measured once, and read by several checks."

    sources: Sources
    data: Any = None  # of `read_prompts`; None: held-out rows, without them the shipped set

    @cached_property
    def model(self) -> SpeculatorModel:
        s = self.sources
        return SpeculatorModel.from_pretrained(s.drafter, verifier=s.verifier).float()

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        "The stored tensors."
        return stored_state(self.sources.drafter, quiet=True)

    @cached_property
    def drafter(self) -> Any:
        return self.model.drafter()

    @cached_property
    def verifier(self) -> Verifier:
        n = VerifierInfo.of(self.sources.verifier).text.num_hidden_layers
        read = [i for i in self.drafter.aux_layer_ids if i <= n] or None
        return Verifier.from_pretrained(self.sources.verifier, read)

    @cached_property
    def tokenizer(self) -> Any:
        return open_tokenizer(self.sources.verifier)

    @cached_property
    def features(self) -> FeatureDataset | None:
        found = self.sources.features
        return None if found is None else FeatureDataset(found)

    @property
    def chats(self) -> bool:
        "Whether the verifier's tokenizer has a chat template."
        try:
            return getattr(self.tokenizer, "chat_template", None) is not None
        except (FileNotFoundError, ValueError):  # there is no tokenizer
            return False

    @cached_property
    def questions(self) -> list[Prompt]:
        "Prompts that are chats, a few of each domain; empty: held-out rows are decoded."
        data = self.data
        if data is None and self.features is None and self.chats:
            data = "shipped"
        return [] if data is None else read_prompts(data, DECODED)[: 4 * DECODED]

    @property
    def domains(self) -> list[str] | None:  # None: not known
        found = [prompt.domain for prompt in self.questions]
        return found if len(set(found)) > 1 else None

    @cached_property
    def split(self) -> tuple[Sequence[int], Sequence[int]]:  # trained rows, held-out rows
        assert self.features is not None  # who reads the split has looked
        return training_split(self.features, **self.sources.split)

    @property
    def stored(self) -> bool:
        "Whether there are features, of the layers that the drafter reads."
        read = set(self.drafter.aux_layer_ids)
        return self.features is not None and read <= set(self.features.layer_ids or ())

    @cached_property
    def rows(self) -> Rows:
        "All rows without their states; empty: there are no features."
        if self.features is None or self.features.rows is None:
            return []
        return rows_of(self.features.rows.with_format(None))

    @cached_property
    def some(self) -> Rows:
        "A few rows, evenly spread."
        step = max(1, len(self.rows) // LOOKED_AT)
        return self.rows[::step][:LOOKED_AT]

    @cached_property
    def batches(self) -> list[Batch]:  # empty: there are no prompts either
        "Held-out rows; where the stored features do not serve, what the verifier wrote while it was decoded."
        if self.stored:
            assert self.features is not None
            trained, heldout = self.split
            rows = [*heldout, *trained]  # the trained ones fill up where few are held out
            return heldout_batches(self.model, self.features, rows)
        if self.decoded is None:
            return []
        written = answered_rows(self.decoded.answers)
        return heldout_batches(self.model, LiveFeatures(self.verifier, written, torch.float32), [*range(len(written))])

    @cached_property
    def recorded(self) -> Mapping[str, Any]:
        "Arguments of the model in training, by run.json; empty: not known."
        return self.sources.record.get("model", {})

    @cached_property
    def options(self) -> dict[str, Any]:
        return forward_options(self.model, self.recorded)

    @cached_property
    def trained_length(self) -> int | None:
        "Tokens that it was trained to draft; None: not known."
        return trained_length(self.model, self.recorded)

    @cached_property
    def stop(self) -> Any:
        "Token ids that end an answer."
        return eos_ids_of(self.verifier, self.tokenizer)

    @cached_property
    def measured(self) -> Measurement:
        return measure(self.model, self.batches, self.options)

    @cached_property
    def to_decode(self) -> list[list[int]]:
        "Prompts that are decoded."
        if self.questions:
            return encode_prompts(self.questions, self.tokenizer)
        chosen = list(self.split[1])[:DECODED] if self.rows else []
        heldout = [self.rows[i] for i in chosen]
        begins = [(row, row.loss_mask.argmax()) for row in heldout if row.loss_mask.any()]
        return [row.input_ids[:i].tolist() for row, i in begins if i > 0]

    @cached_property
    def decoded(self) -> Decoded | None:  # None: there are no prompts
        if not self.to_decode:
            return None
        name, k = self.model.config.speculators_model_type, self.model.config.speculators_config.speculative_tokens
        k = min(k, self.trained_length or k)
        return decode(self.verifier, self.drafter, name, self.to_decode, k, self.stop, self.domains)


RECOMPUTED = 4  # rows whose states are computed again
NO_FEATURES = "no features were found; give --features"


def all_unchecked(missing: str, *stages: str) -> list[Finding]:
    "Stages that could not be looked at for the same reason."
    return [unchecked(stage, missing) for stage in stages]


def look_at_data(e: Examination) -> Iterator[Finding]:
    "Verifier, template, loss mask, answers."
    yield verifier_check(e.sources.record.get("verifier"), e.sources.verifier)
    if not e.rows:
        yield from all_unchecked(NO_FEATURES, "template", "loss mask", "answers")
        return
    if getattr(e.tokenizer, "chat_template", None) is None:
        yield from all_unchecked("the verifier has no chat template", "template", "loss mask")
    else:
        yield template_check(e.some, e.tokenizer)
        yield mask_check(e.some, e.tokenizer)
    yield answers_check(e.verifier, e.some)


def look_at_features(e: Examination) -> Iterator[Finding]:
    "Shift, states, layers."
    if e.features is None:
        yield from all_unchecked(NO_FEATURES, "shift", "features")
        return
    n = len(e.features)
    chosen = sorted({i * (n - 1) // max(1, RECOMPUTED - 1) for i in range(RECOMPUTED)})
    more = sorted({i * (n - 1) // (LOOKED_AT - 1) for i in range(LOOKED_AT)})
    yield shift_check(e.verifier, e.features, more)
    yield features_check(e.verifier, e.features, chosen, e.drafter.aux_layer_ids)


def look_at_drafter(e: Examination) -> Iterator[Finding]:
    "Vocabulary, weights, head, convention, draft length."
    mapping = mapping_check(e.model, e.sources.verifier)
    if mapping.state == "finding":
        yield mapping
    else:
        written = [g.tokens for g in e.decoded.answers] if e.decoded else []
        yield vocabulary_check(e.model.t2d, e.some, written)
    yield weights_check(e.model, e.state)
    yield length_check(e.model, e.recorded)
    if not e.batches:
        missing = "no features of the layers that it reads, and no prompts: give --data"
        yield from all_unchecked(missing, "head", "convention")
        return
    repaired = repair_checks(e.model, e.state, e.sources.verifier, e.batches, e.options)
    yield from repaired
    if len(e.sources.history) and all(f.state == "ok" for f in repaired):
        yield history_check(e.measured, e.sources.history)


def look_at_training(e: Examination) -> Iterator[Finding]:
    "Learning, data size."
    table, tokens = float("nan"), None
    if e.rows:
        trained, heldout = e.split
        table = pair_accuracy([e.rows[i] for i in trained], [e.rows[i] for i in heldout])
        tokens = sum(int(e.rows[i].loss_mask.sum()) for i in trained)
    yield learned_check(e.sources.history, table, e.sources.record.get("settings"))
    conversations = e.sources.record.get("data", {}).get("rows")
    yield data_check(e.sources.history, conversations, tokens)


def look_at_decoding(e: Examination) -> Iterator[Finding]:
    "Domains, acceptance, tree."
    if e.decoded is None:
        yield from all_unchecked("no prompts: give --data, or --features", "domains", "acceptance", "tree")
        return
    if e.domains is None or not e.rows:
        yield unchecked("domains", "needs --data with domains, and features")
    else:
        yield domains_check(seen_by_domain(e.decoded, e.rows))
    predicted = predicted_length(last_evaluation(e.sources.history), "eval_", e.decoded.k)
    yield acceptance_check(e.decoded, predicted, e.trained_length)
    yield tree_note(e.verifier, e.drafter, e.decoded, e.to_decode, e.stop)


WALK: dict[str, tuple[Callable[[Examination], Iterator[Finding]], str]] = {
    "data": (look_at_data, "answers"),
    "features": (look_at_features, "features"),
    "drafter": (look_at_drafter, "weights"),
    "training": (look_at_training, "training"),
    "decoding": (look_at_decoding, "acceptance"),
}  # part -> its checks, the stage that a failure of them is reported as


@dataclass
class Diagnosis:
    "What the doctor found."

    findings: list[Finding]  # put in the order of the chain; those of a stage in the order of the checks
    figures: dict[str, Figure] = field(default_factory=dict)  # what it shows -> the picture
    facts: dict[str, str] = field(default_factory=dict)  # what was examined

    def __post_init__(self):
        self.findings = sorted(self.findings, key=lambda f: list(STAGES).index(f.stage))

    @property
    def first(self) -> Finding | None:
        "The stage to mend first; None: nothing was found."
        return next((f for f in self.findings if f.state == "finding"), None)

    @property
    def verdict(self) -> str:
        "One sentence."
        if first := self.first:
            return f"First loss: {first.stage}. {first.evidence}. Remedy: {first.remedy}."
        unseen = sum(f.state == "not checked" for f in self.findings)
        return "No stage loses" + (f"; {unseen} stages were not checked" if unseen else "") + "."

    def table(self) -> pd.DataFrame:
        "Every finding: stage, state, number, remedy, and the page where something was found."
        rows = [(*f, f.page if f.state == "finding" else "") for f in self.findings]
        return pd.DataFrame(rows, columns=["stage", "state", "number", "remedy", "page"])

    def save(self, folder: str | os.PathLike) -> Path:
        "Write the table (findings.csv) and the page: index.html, which needs no other file."
        folder = Path(folder)
        write_text(folder / "findings.csv", self.table().to_csv(index=False))
        parts = [Section("Stages", tables={"From data to engine": self.table()})]
        parts += [Section("Pictures", figures=self.figures)] if self.figures else []
        warned = [self.verdict] if self.first else []
        page = page_html("What the doctor found", parts, self.facts, warned)
        return write_page(folder / "index.html", page)

    def _repr_html_(self):
        return f"<p>{escape(self.verdict, quote=False)}</p>" + self.table().to_html(index=False)


def _failed(stage, error):
    "What could not be examined, as a finding of its stage."
    return judged(stage, True, " ".join(str(error).split()), "mend what the message names, and run the doctor again")


def _foreign_features(e):
    "Features that cannot be this verifier's are found here, and not looked at further."
    text = VerifierInfo.of(e.sources.verifier).text
    if e.features is None:
        return
    size, largest = e.features.hidden_size, max((int(row.input_ids.max()) for row in e.rows), default=0)
    if size != text.hidden_size or largest >= text.vocab_size:
        evidence = (
            f"states of size {size} and token ids up to {largest}; the verifier has hidden_size {text.hidden_size}"
        )
        remedy = "name the features that this drafter was trained on"
        yield judged("features", True, f"{evidence} and {text.vocab_size} tokens", remedy)
        e.features, e.rows = None, []


def _walked(e, progress):
    "Every finding; a part that cannot be examined is a finding of its stage."
    try:
        e.model  # noqa: B018 (loads it)
    except ValueError as error:  # it does not load beside its verifier
        failed = _failed("verifier" if str(error).lstrip().startswith("verifier") else "weights", error)
        yield failed
        yield from all_unchecked("the drafter does not load", *(STAGES.keys() - {failed.stage, "engine"}))
        return
    yield from _foreign_features(e)
    for part, (look, stage) in WALK.items():
        progress.set_description(part)
        try:
            yield from look(e)
        except ValueError as error:
            yield _failed(stage, error)
        progress.update()


def examine(
    drafter: str,  # folder or hub id of a trained drafter
    verifier: str | None = None,  # folder or hub id; default: what the drafter was trained for
    features: Path | None = None,  # it was trained on; default: what its provenance names
    data: str | None = None,  # prompts like those served; default: held-out rows, or shipped
    evaluation: list[str] | None = None,  # folders of engine evaluations (repeatable)
    output_dir: Path | None = None,  # for a page and a table; default: they are only printed
    overwrite: bool = False,  # replace the diagnosis in output_dir
) -> Diagnosis:  # findings, `first`, `table()`, `save(folder)`
    """Find the first stage, from data to engine, at which a drafter loses. What cannot be
    looked at is reported as not checked."""
    check_options(locals(), "doctor")
    refuse_overwriting(output_dir, overwrite, DIAGNOSIS)
    sources = find_sources(drafter, verifier, features)
    for folder in evaluation or ():
        engine_check(folder, None)  # refused before work
    with contextlib.nullcontext() if verifier else named_by(drafter):
        VerifierInfo.of(sources.verifier)
    e = Examination(sources, data)
    e.features, e.questions  # noqa: B018 (their own errors for what the caller named)
    with tqdm(total=len(WALK), unit="part", delay=1) as progress:
        findings = list(_walked(e, progress))
    decoded = vars(e).get("decoded")
    findings += [engine_check(folder, decoded) for folder in evaluation or ()]
    if not evaluation:
        findings.append(unchecked("engine", "give --evaluation, a folder of an engine's run"))
    figures = {"loss over steps": plot_history(sources.history)} if len(sources.history) else {}
    if decoded is not None:
        figures["acceptance by position"] = decoded.evaluation.plot()
    facts = dict(drafter=str(drafter), verifier=sources.verifier, features=str(sources.features or "none"))
    diagnosis = Diagnosis(findings, figures, facts)
    if output_dir is not None:
        diagnosis.save(output_dir)
        inputs = dict(drafter=drafter, verifier=sources.verifier, features=sources.features)
        write_provenance(output_dir, "doctor", dict(evaluation=evaluation), inputs | dict(data=data))
    return diagnosis
