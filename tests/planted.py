#!/usr/bin/env python
"""Faults that a person could make, planted one at a time: does a test notice? By hand, or at night.

    python tests/planted.py                     plant what tests/planted.md does not record yet
    python tests/planted.py --of test_masks.py  plant again what a test of this file caught
    python tests/planted.py --all               plant all again
    python tests/planted.py --look              only see that every text is where a fault changes it

A fault changes the exported module, not its notebook, in a copy of the tree; tests that compare the two are not run."""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests/planted.md"
SECONDS = 400  # that the tests of a fault may take


class Fault(NamedTuple):
    "What is changed in a file, and the tests that should notice."

    about: str  # unique
    file: str  # below the package
    old: str  # is there once
    new: str
    tests: str  # names of test files or of tests in them, without `test_`, in this order
    more: tuple[tuple[str, str], ...] = ()  # other changes in the same file


FAULTS = [
    # masks
    Fault(
        "a causal mask hides the query's own position",
        "nn/attention.py",
        "lambda b, h, q, kv: kv <= q,",
        "lambda b, h, q, kv: kv < q,",
        "masks flex",
    ),
    Fault(
        "padding attends to padding",
        "nn/attention.py",
        "(ids[q] == ids[kv % L]) & (ids[q] >= 0),",
        "(ids[q] == ids[kv % L]),",
        "masks flex",
    ),
    Fault(
        "a block attends to the features at its anchor",
        "nn/attention.py",
        "kv < anchors[q // block], None",
        "kv <= anchors[q // block], None",
        "masks dflash",
        (
            (
                "return [KeyRange(first, anchor), KeyRange(own_first",
                "return [KeyRange(first, anchor + 1), KeyRange(own_first",
            ),
        ),
    ),
    Fault(
        "a rollout attends to the one of another anchor",
        "nn/attention.py",
        "lambda b, h, q, kv: anchor_pos[kv] == anchor_pos[q], None",
        "lambda b, h, q, kv: anchor_pos[kv] <= anchor_pos[q], None",
        "masks peagle",
    ),
    Fault(
        "a tree's node attends to its siblings",
        "decode/verification.py",
        "attn_mask[m:, m:] = self.tree.ancestors",
        "attn_mask[m:, m:] = self.tree.ancestors | (self.tree.parents[:, None] == self.tree.parents)",
        "tree generate",
    ),
    # targets and what is read
    Fault(
        "features are not shifted against the tokens",
        "nn/supervision.py",
        'sample["hidden_states"][:-1]',
        'sample["hidden_states"][1:]',
        "packing eagle3",
    ),
    Fault(
        "the target of step t is that of step 0",
        "nn/supervision.py",
        "return Supervised(step, position + step, len(carries_loss))",
        "return Supervised(step, position, len(carries_loss))",
        "eagle3 peagle",
    ),
    Fault(
        "a target may be in the next document",
        "nn/supervision.py",
        "& (cross_document | same_document)",
        "& (cross_document | same_document | True)",
        "eagle3 isolation",
    ),
    Fault(
        "slots of a block are scored one position late",
        "nn/anchors.py",
        "return (position - 1).clamp_min(0), supervised & (slot > 0)",
        "return position, supervised & (slot > 0)",
        "anchors dflash",
    ),
    Fault(
        "an MTP head learns the token that it reads",
        "models/mtp.py",
        "ttt_supervision(loss_mask, document_ids, steps + 2, cross_document)[2:]",
        "ttt_supervision(loss_mask, document_ids, steps + 1, cross_document)[1:]",
        "recorded isolation",
    ),
    Fault(
        "later steps of training keep the positions of step 0",
        "models/eagle3.py",
        "positions = self.position_ids[rows] + t if t else self.position_ids",
        "positions = self.position_ids[rows] if t else self.position_ids",
        "eagle3 rope",
        (("rope = model.rotary(hidden, position_ids + t)", "rope = model.rotary(hidden, position_ids)"),),
    ),
    Fault(
        "all slots of a block have the anchor's position",
        "models/dflash.py",
        "self.rotary(context, starts[:, None] + slot, length)",
        "self.rotary(context, starts[:, None] + 0 * slot, length)",
        "dflash",
    ),
    # weights, divisors, numbers
    Fault(
        "the first step of training is decayed too",
        "models/eagle3.py",
        "decay = ttt_step_loss_decay ** torch.arange(ttt_steps).float()",
        "decay = ttt_step_loss_decay ** torch.arange(1, ttt_steps + 1).float()",
        "eagle3 recorded",
    ),
    Fault(
        "the first predicted slot is decayed too",
        "nn/supervision.py",
        "return torch.exp(-(k - 1) / _positive",
        "return torch.exp(-k / _positive",
        "step_weights dflash",
    ),
    Fault(
        "the loss of a step is a mean over all positions",
        "models/eagle3.py",
        "counts = to_device(carries_loss.sum(-1).float() + 1e-5, device)",
        "counts = torch.full((ttt_steps,), float(len(ids)), device=device)",
        "eagle3 recorded",
    ),
    Fault(
        "the loss of blocks is divided by all slots",
        "models/dflash.py",
        "count = blocks.supervised.sum() + 1e-5",
        "count = blocks.supervised.numel() + 1e-5",
        "dflash differences",
    ),
    Fault(
        "rows of a step count alike, whatever their loss tokens",
        "train/trainer.py",
        'loss = loss * inputs["loss_mask"].sum() / num_items_in_batch.clamp_min(1e-6)',
        "loss = loss / self.args.gradient_accumulation_steps",
        "trainer",
    ),
    Fault(
        "logits are scored in their own dtype",
        "nn/losses.py",
        "self.logits = logits if logits.dtype == torch.float64 else logits.float()",
        "self.logits = logits",
        "losses",
    ),
    Fault(
        "norms are computed in the dtype of their input",
        "nn/layers.py",
        "wide = torch.promote_types(x.dtype, torch.float32)\n        weight",
        "wide = x.dtype\n        weight",
        "precision layer_fields models_base",
    ),
    # decoding
    Fault(
        "the acceptance ratio is q / p",
        "decode/acceptance_rules.py",
        "ratio = left.gather(1, x) / (lenience * of_x)",
        "ratio = (lenience * of_x) / left.gather(1, x)",
        "acceptance_rules generate",
    ),
    Fault(
        "the residual is not normalised between siblings",
        "decode/acceptance_rules.py",
        "return torch.where(mass > 0, rest / mass, p)",
        "return torch.where(mass > 0, rest, p)",
        "acceptance_rules tree",
    ),
    Fault(
        "the bonus token is that of the row before",
        "decode/acceptance_rules.py",
        "rows = torch.arange(1, len(path) + 1, device=path.device)",
        "rows = torch.arange(len(path), device=path.device)",
        "acceptance_rules generate",
    ),
    Fault(
        "traversal forgets how much of a visit its children have used",
        "decode/acceptance_rules.py",
        "alpha[row] = torch.where(other == 0, 1, mass / other)",
        "alpha[row] = alpha[row]",
        "acceptance_rules",
    ),
    Fault(
        "the cache keeps the first nodes of a tree, not the accepted ones",
        "decode/verification.py",
        "*(new + node for node in path),",
        "*(new + i for i in range(len(path))),",
        "generate tree_growth",
    ),
    # vocabulary, chats, packing
    Fault(
        "draft ids are read as positions in d2t",
        "nn/draft_vocabulary.py",
        "return ids if d2t is None else ids + d2t[ids]",
        "return ids if d2t is None else d2t[ids]",
        "draft_vocabulary eagle3",
    ),
    Fault(
        "a draft vocabulary counts the words of questions",
        "nn/draft_vocabulary.py",
        "kept = ids[mask.bool()].long()",
        "kept = ids.long()",
        "draft_vocabulary prepare",
    ),
    Fault(
        "the token after an answer is trained",
        "data/chat_encoding.py",
        "mask |= (end > first) & (start < last)",
        "mask |= (end > first) & (start <= last)",
        "chat_encoding templates",
    ),
    Fault(
        "turns with weight 0 are trained",
        "data/chat_template.py",
        'if turn.get("weight") == 0 or not spans:',
        "if not spans:",
        "chat_encoding.py::test_a_turn_of_weight_0_is_read_and_not_trained",
    ),
    Fault(
        "positions do not restart with a document",
        "data/packing.py",
        '"position_ids": torch.arange(n),',
        '"position_ids": torch.arange(start, start + n),',
        "packing isolation",
    ),
    Fault(
        "a row is one document",
        "data/packing.py",
        'row["document_ids"][0, start:end] = doc',
        'row["document_ids"][0, start:end] = 0',
        "packing isolation",
    ),
    # ranks, resume, files
    Fault(
        "every rank evaluates the same rows",
        "train/packed_loaders.py",
        "taken = range(self.args.data_rank, turns * ranks, ranks)",
        "taken = range(0, turns * ranks, ranks)",
        "plumbing run_record ranks.py::test_ranks_equal_one_process",
    ),
    Fault(
        "ranks draw the same random numbers",
        "train/trainer.py",
        "row = first + turn * self.args.data_ranks + self.args.data_rank",
        "row = first + turn",
        "trainer.py::test_loss_scaling_is_the_token_weighted_mean run_record ranks.py::test_ranks_equal_one_process",
    ),
    Fault(
        "a conversation is answered by two ranks",
        "regenerate/journal.py",
        "mine = i % journal.world_size == journal.rank",
        "mine = i % journal.world_size <= journal.rank",
        "regenerate_in_process shared_jobs",
    ),
    Fault(
        "a resume begins with a fresh optimizer",
        "train/checkpoint.py",
        "                super()._load_optimizer_and_scheduler(checkpoint)\n",
        "                pass\n",
        "trainer",
    ),
    Fault(
        "every epoch has the same order",
        "data/packing.py",
        "        self.epoch = epoch\n",
        "        self.epoch = 0\n",
        "packing trainer",
    ),
    Fault(
        "the rows of an epoch have the same random draws",
        "train/packed_loaders.py",
        "return epoch, step * in_step",
        "return epoch, 0",
        "trainer.py::test_every_row_of_every_epoch_has_its_own_random_numbers",
    ),
    Fault(
        "a config of a foreign format is written in place",
        "models/formats.py",
        '    write_object(folder / "config.json", config | {"dtype": dtype}, indent=2)\n',
        '    __import__("json").dump(config | {"dtype": dtype}, (folder / "config.json").open("w"))\n',
        "files",
    ),
    Fault(
        "a folder that cannot be replaced is lost",
        "core/files.py",
        "                    os.rename(aside, path)\n                raise",
        "                    pass\n                raise",
        "files",
    ),
    Fault(
        "an error of a read has no file",
        "core/files.py",
        "            e.filename = os.fspath(path)\n",
        "            pass\n",
        "files",
    ),
    Fault(
        "features of other layers are taken for the folder's",
        "features/feature_folder.py",
        '    ("hidden_states", "layer_ids"),\n',
        "",
        "features feature_shards",
    ),
    # formats
    Fault(
        "a tensor of a checkpoint has another name",
        "models/eagle3.py",
        "self.fc = nn.Linear(A * feature, H, bias=False)",
        "self.fusion = nn.Linear(A * feature, H, bias=False)",
        "eagle3 convert compat",
        (
            ("self.fc.weight.dtype", "self.fusion.weight.dtype"),
            ("return self.fc(hidden_states)", "return self.fusion(hidden_states)"),
            ("return self.fc(torch.cat", "return self.fusion(torch.cat"),
            ("F.linear(unit, self.fc.weight", "F.linear(unit, self.fusion.weight"),
        ),
    ),
    Fault(
        "the layers of z-lab's checkpoints are taken for inputs",
        "models/formats_dflash.py",
        "check_aux_layer_ids([i + 1 for i in ids], num_layers)",
        "check_aux_layer_ids([i for i in ids], num_layers)",
        "convert dflash",
    ),
    Fault(
        "an exported config forgets the base of RoPE",
        "models/formats.py",
        'fields["rope_theta"] = rope.pop("rope_theta", config.default_theta)',
        'fields["rope_theta"] = config.default_theta',
        "convert coming_from_specforge",
    ),
    # options and engine
    Fault(
        "the seed of train does not reach the trainer",
        "train/train_drafter.py",
        '"seed": seed, "measure": measure}',
        '"measure": measure}',
        "warm_start",
    ),
    Fault(
        "regenerate answers greedily at any temperature",
        "cli/data_commands.py",
        "        temperature=temperature,\n        seed=seed,\n        max_length",
        "        temperature=0.0,\n        seed=seed,\n        max_length",
        "cli.py::test_the_temperature_reaches_the_answers",
    ),
    Fault(
        "a field of SpeculativeConfig has another name",
        "serve/speculative_config.py",
        "    prompt_lookup_max: int | None",
        "    ngram_prompt_lookup_max: int | None",
        "speculative_config documented_vllm",
    ),
    Fault(
        "DFlash needs no place for its last decided token",
        "serve/vllm_methods.py",
        '"dflash": Method(weights=True, aux=True, parallel=True, slots=1),',
        '"dflash": Method(weights=True, aux=True, parallel=True),',
        "speculative_config documented_vllm",
    ),
    # numbers that are reported
    Fault(
        "an interval of 95 % is one of 90 %",
        "evaluate/acceptance.py",
        "[0.025, 0.975], axis=0)",
        "[0.05, 0.95], axis=0)",
        "acceptance",
    ),
    Fault(
        "an interval is taken over ratios, not over requests",
        "evaluate/acceptance.py",
        "samples = ratios(times_drawn @ counts)",
        "samples = ratios(times_drawn @ np.broadcast_to(counts.mean(0), counts.shape))",
        "acceptance",
    ),
    Fault(
        "a KV cache has keys alone",
        "plan/sizes.py",
        "return 2 * sum(min(tokens, kept) * numbers",
        "return sum(min(tokens, kept) * numbers",
        "plan",
    ),
]


class Result(NamedTuple):
    "What became of a fault."

    caught_by: str  # the test that failed; empty: none did
    seconds: int


def planted(fault: Fault, text: str) -> str:
    "The text of its file with the fault in it."
    for old, new in ((fault.old, fault.new), *fault.more):
        if text.count(old) != 1:
            raise SystemExit(f"{fault.about}: {old!r} is {text.count(old)} times in {fault.file}, and must be once")
        text = text.replace(old, new)
    return text


def pytest(tree: Path, tests: list[str]) -> tuple[str, float]:  # the first failure; "": none
    "Run the tests of a day in a copy of the tree until one fails."
    line = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    line += ["-o", "addopts=", "-m", "not nightly"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    began = time.monotonic()
    process = subprocess.Popen(
        [*line, *tests], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        return "", SECONDS
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?([^\s[]+)", output, re.MULTILINE)
    if not failed and process.returncode:
        raise SystemExit(f"pytest ended with {process.returncode}:\n{output[-3000:]}")
    return failed[1] if failed else "", time.monotonic() - began


def files_of(fault: Fault) -> list[str]:
    "What pytest is given."
    names = (name if ".py" in name else f"{name}.py" for name in fault.tests.split())
    return [f"tests/test_{name}" for name in names]


def recorded() -> dict[str, Result]:
    "What the table says."
    rows = (line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines()) if TABLE.exists() else ()
    known = {fault.about for fault in FAULTS}
    return {row[0]: Result(row[2].strip("`").replace("none", ""), int(row[3])) for row in rows if row[0] in known}


def write(results: dict[str, Result]):
    "The table of all results, in the order of `FAULTS`."
    done = [(fault, results[fault.about]) for fault in FAULTS if fault.about in results]
    caught = sum(bool(result.caught_by) for _, result in done)
    lines = [HEAD, "", f"Caught: {caught} of {len(done)}.", ""]
    lines += ["| fault | file | caught by | seconds |", "| --- | --- | --- | --- |"]
    for fault, (test, seconds) in done:
        lines.append(f"| {fault.about} | {fault.file} | {f'`{test}`' if test else 'none'} | {seconds} |")
    TABLE.write_text("\n".join(lines) + "\n")


HEAD = """# Planted faults

Each fault is put into the package alone, and the test files that `tests/planted.py` names for it are run until a test
fails. The script runs what is not in this table.

Before a test was added for any, 43 of 50 were caught, two of them once the recorded numbers of upstream were named.
Four were not, and the tests of three had not ended after 400 seconds on a busy machine: seven got a test."""


def plant(todo: list[Fault], results: dict[str, Result], tree: Path):
    "Plant faults in a copy of the tree, one at a time; then the same tests must pass without any."
    for fault in todo:
        file = tree / "speculators_nb" / fault.file
        whole = file.read_text()
        file.write_text(planted(fault, whole))
        test, seconds = pytest(tree, files_of(fault))
        file.write_text(whole)
        results[fault.about] = Result(test, round(seconds))
        write(results)
        print(f"{fault.about}: {test or 'NOT CAUGHT'} ({seconds:.0f} s)", flush=True)
    tests = sorted({f"tests/{results[fault.about].caught_by}" for fault in todo if results[fault.about].caught_by})
    if tests and (test := pytest(tree, tests)[0]):
        raise SystemExit(f"{test} fails without a fault too")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--of", nargs="+", default=[], help="test files whose faults are planted again")
    parser.add_argument("--all", action="store_true", help="plant all of them again")
    parser.add_argument("--look", action="store_true", help="run nothing")
    given = parser.parse_args()
    for fault in FAULTS:
        planted(fault, (ROOT / "speculators_nb" / fault.file).read_text())
    if given.look:
        return
    results = {} if given.all else recorded()
    again = {name for name, result in results.items() if result.caught_by.split("::")[0] in given.of}
    todo = [fault for fault in FAULTS if fault.about in again or (not given.of and fault.about not in results)]
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.check_output([*git, "stash", "create"], text=True).strip()  # what is not committed
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", tree, changed or "HEAD"], check=True)
        try:
            plant(todo, results, tree)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)
    missed = [fault.about for fault in FAULTS if fault.about in results and not results[fault.about].caught_by]
    if missed:
        raise SystemExit(f"not caught: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
