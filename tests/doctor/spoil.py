"""Drafters spoilt on purpose, one fault each, and the sound ones that they are made of. `make(name, folder)` makes one,
or finds it made, and returns what `speculators-nb doctor` is given. The shipped verifier, the lab's settings; what
changes the data is trained as Medusa, the fastest to train."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from speculators_nb.core.checkpoints import read_state, resolve_checkpoint, save_tensors
from speculators_nb.core.provenance import write_provenance
from speculators_nb.data.chat_encoding import save_prepared
from speculators_nb.data.prepare import prepare
from speculators_nb.features.feature_folder import table_of
from speculators_nb.features.feature_rows import feature_path, read_features, write_features
from speculators_nb.features.in_process import extract_features
from speculators_nb.lab.experiment import shipped_features, train_on_shipped
from speculators_nb.lab.shipped import read_corpus, shipped_data
from speculators_nb.models.base import SpeculatorModel
from speculators_nb.regenerate.in_process import answer, eos_ids_of
from speculators_nb.train.train_drafter import new_drafter
from speculators_nb.verifier.tapped_model import Verifier

SOUND = {"eagle3": 4, "dflash": 3, "medusa": 3}  # drafter -> tokens that it drafts


def trained(folder, algorithm, features=None, seed=0, **args):
    "A drafter as `speculators-nb train` leaves it."
    features, verifier = features or shipped_features(), shipped_data() / "tiny-verifier"
    if not (folder / "provenance.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(seed)
        train_on_shipped(algorithm, folder, SOUND[algorithm], features, seed=seed, **args)
        origin = dict(features=Path(features).resolve(), verifier=verifier.resolve())
        write_provenance(folder, "train", dict(algorithm=algorithm, seed=seed), origin)
    return folder


def sound(folder, algorithm, seed=0):
    return trained(folder / f"sound-{algorithm}-{seed}", algorithm, seed=seed)


def copied(folder, name, of):
    "A copy of a drafter, to be spoilt."
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(of, target)
    return target


def change_config(drafter, change):
    file = drafter / "config.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw, indent=2))
    return drafter


def change_weights(drafter, change):
    state = dict(read_state(resolve_checkpoint(drafter)))
    change(state)
    save_tensors(
        {n: w.contiguous() for n, w in state.items()}, drafter / "model.safetensors", metadata={"format": "pt"}
    )
    return drafter


def with_rows(folder, name, change):
    "The shipped features with other loss masks or states: `change(ids, mask, states)` gives both."
    target = folder / f"features-{name}"
    if (target / "done").is_file():
        return target
    base = shipped_features()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    rows = table_of(base).with_format(None)
    masks = []
    for i, row in enumerate(rows):
        ids, mask = row["input_ids"], np.array(row["loss_mask"])
        states = read_features(feature_path(base, i), ids)
        new_mask, new_states = change(np.array(ids), mask, states)
        masks.append(new_mask.tolist())
        if new_states is states:
            feature_path(target, i).symlink_to(feature_path(base, i).resolve())
        else:
            write_features(feature_path(target, i), new_states, ids, states.dtype)
    kept = rows.remove_columns("loss_mask").add_column("loss_mask", masks)
    save_prepared(kept.with_format("torch"), target / "rows")
    shutil.copy(base / "data_config.json", target)
    (target / "done").touch()
    return target


def extracted(folder, name, lines, verifier=None):
    "Features of other rows, or of another verifier."
    target = folder / f"features-{name}"
    if not (target / "done").is_file():
        tiny = shipped_data() / "tiny-verifier"
        tapped = Verifier.from_pretrained(verifier or tiny)
        rows = prepare(lines, AutoTokenizer.from_pretrained(tiny), 2048)
        extract_features(tapped, rows, target)
        (target / "done").touch()
    return target


def answers():
    lines = (shipped_data() / "answers/train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def perturbed(folder, sigma, seed=0):
    "The verifier after more training, as it were: noise on its matrices."
    target = folder / f"verifier-{sigma}"
    if not (target / "model.safetensors").is_file():
        shutil.copytree(shipped_data() / "tiny-verifier", target, dirs_exist_ok=True)
        generator = torch.Generator().manual_seed(seed)

        def noise(state):
            for name, w in state.items():
                if w.ndim == 2:
                    w = w.float()
                    w = w + sigma * w.std() * torch.randn(w.shape, generator=generator)
                    state[name] = w.to(state[name].dtype)

        change_weights(target, noise)
    return target


# ---- faults made after training


def norm_flag(folder):
    "config.json says the other convention of the first residual."
    drafter = copied(folder, "norm_flag", sound(folder, "eagle3"))
    return dict(drafter=change_config(drafter, lambda c: c.update(norm_before_residual=False)))


def draft_length(folder):
    "The config asks the engine for more tokens than were trained."

    def longer(c):
        c["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 9

    return dict(drafter=change_config(copied(folder, "draft_length", sound(folder, "eagle3")), longer))


def other_verifier(folder):
    "Served beside a verifier that was trained further."
    return dict(drafter=copied(folder, "other_verifier", sound(folder, "dflash")), verifier=perturbed(folder, 0.1))


def other_template(folder):
    "The verifier's chat template was replaced after the data were prepared."
    target = folder / "verifier-template"
    shutil.copytree(shipped_data() / "tiny-verifier", target, dirs_exist_ok=True)
    file = target / "chat_template.jinja"
    text = (shipped_data() / "tiny-verifier/chat_template.jinja").read_text()
    file.write_text(text.replace("<|im_start|>assistant\n", "ASSISTANT: ").replace("<|im_start|>", "\n### "))
    return dict(drafter=copied(folder, "other_template", sound(folder, "medusa")), verifier=target)


def other_layers(folder):
    "The config names other verifier layers than were trained on."
    drafter = copied(folder, "other_layers", sound(folder, "dflash"))
    return dict(drafter=change_config(drafter, lambda c: c.update(aux_hidden_state_layer_ids=[1, 3, 5])))


def wrong_head(folder):
    "The head's rows are in another order than the verifier's vocabulary."

    def shuffle(state):
        order = torch.randperm(len(state["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
        state["lm_head.weight"] = state["lm_head.weight"][order]

    return dict(drafter=change_weights(copied(folder, "wrong_head", sound(folder, "eagle3")), shuffle))


def reduced(folder, name, size, mapped=lambda ids: ids):
    "A sound drafter cut to its most frequent tokens; `mapped` gives the ids that the mapping says."
    drafter = copied(folder, name, sound(folder, "eagle3"))
    counts = json.loads((shipped_features() / "rows/token_freq.json").read_text())
    top = sorted(sorted(map(int, counts), key=lambda t: -counts[str(t)])[:size])
    ids = torch.tensor(top)

    def cut(state):
        state["lm_head.weight"] = state["lm_head.weight"][ids]
        named = mapped(ids)
        state["t2d"] = torch.zeros(2048, dtype=torch.bool).index_fill_(0, named, True)
        state["d2t"] = named - torch.arange(size)

    change_weights(drafter, cut)
    return change_config(drafter, lambda c: c.update(draft_vocab_size=size))


def narrow_vocabulary(folder):
    "The draft vocabulary lacks a tenth of what the verifier writes."
    return dict(drafter=reduced(folder, "narrow_vocabulary", 128))


def shifted_mapping(folder):
    "d2t is of another vocabulary: each token is written as the next id."
    return dict(drafter=reduced(folder, "shifted_mapping", 512, lambda ids: (ids + 1).clamp(max=2047)))


def low_precision(folder):
    "The weights went through two bits of mantissa."

    def round_off(state):
        for name, w in state.items():
            if w.ndim == 2 and name.startswith(("fc", "layers")):
                state[name] = w.to(torch.float8_e5m2).to(w.dtype)

    return dict(drafter=change_weights(copied(folder, "low_precision", sound(folder, "dflash")), round_off))


def untrained_layer(folder):
    "The decoder layer has its first values: its keys did not load when the checkpoint was merged."
    drafter = copied(folder, "untrained_layer", sound(folder, "eagle3"))
    config = SpeculatorModel.from_pretrained(drafter).config
    extra = dict(norm_before_fc=config.norm_before_fc, norm_output=config.norm_output)
    fresh = new_drafter(
        "eagle3", shipped_data() / "tiny-verifier", seed=7, ttt_steps=SOUND["eagle3"], **extra
    ).state_dict()

    def reset(state):
        state.update({n: fresh[n] for n in state if n.startswith("layers.")})

    return dict(drafter=change_weights(drafter, reset))


# ---- faults that are trained


def medusa_on(folder, name, features, **args):
    return dict(drafter=trained(folder / name, "medusa", features, **args))


def off_policy(folder):
    "The answers are another model's."
    lines, tiny = answers(), shipped_data() / "tiny-verifier"
    cache = folder / "off-policy.jsonl"
    if not cache.is_file():
        other = Verifier.from_pretrained(perturbed(folder, 0.5))
        tokenizer = AutoTokenizer.from_pretrained(tiny)
        prompts = [row["input_ids"][: row["loss_mask"].index(1)] for row in lines]
        stop = eos_ids_of(other, tokenizer)
        made = []
        for start in range(0, len(prompts), 100):
            part = prompts[start : start + 100]
            seeds = list(range(start, start + len(part)))
            made += answer(other, part, 60, stop, 0.8, seeds)
        texts = [
            json.dumps(dict(input_ids=p + a, loss_mask=[0] * len(p) + [1] * len(a))) for p, a in zip(prompts, made) if a
        ]
        cache.write_text("\n".join(texts))
    rows = list(map(json.loads, cache.read_text().splitlines()))
    return medusa_on(folder, "off_policy", extracted(folder, "off-policy", rows))


def prompts_trained(folder):
    "The loss mask is True everywhere."
    features = with_rows(folder, "prompts", lambda ids, mask, states: (np.ones_like(mask), states))
    return medusa_on(folder, "prompts_trained", features)


def first_token(folder):
    "The mask of each answer begins one token late."

    def late(ids, mask, states):
        return mask & np.concatenate([[False], mask[:-1]]), states

    return medusa_on(folder, "first_token", with_rows(folder, "late", late))


def shifted_features(folder):
    "The states of each token are stored beside the next one."
    features = with_rows(folder, "shifted", lambda ids, mask, states: (mask, states.roll(1, 0)))
    return medusa_on(folder, "shifted_features", features)


def stale_features(folder):
    "The features are of an earlier checkpoint of the verifier, and the record does not say so."
    features = extracted(folder, "stale", answers(), perturbed(folder, 0.1))
    file = features / "data_config.json"
    raw = json.loads(file.read_text())
    for name in ("fingerprint", "checkpoint"):
        raw["model"].pop(name, None)
    file.write_text(json.dumps(raw, indent=1))
    return medusa_on(folder, "stale_features", features)


def little_data(folder):
    "Thirty conversations, thirty times."
    features = extracted(folder, "few", answers()[:40])
    return medusa_on(folder, "little_data", features, num_train_epochs=30)


def low_rate(folder):
    "A learning rate a hundred times too low."
    return medusa_on(folder, "low_rate", None, learning_rate=3e-5)


def absent_domain(folder):
    "The users ask for code, and no training conversation has any."
    rows = [row for row in answers() if row["domain"] != "code"]
    made = medusa_on(folder, "absent_domain", extracted(folder, "no-code", rows))
    asked = [
        c for c in read_corpus(shipped_data() / "corpus/heldout.jsonl") if c["domain"] in ("code", "free", "table")
    ]
    prompts = folder / "users.jsonl"
    prompts.write_text("\n".join(json.dumps(c) for c in asked[:24]))
    return made | dict(data=prompts)


SPOILT = {  # case -> (what makes it, stage that the doctor must name first)
    "other_template": (other_template, "template"),
    "prompts_trained": (prompts_trained, "loss mask"),
    "first_token": (first_token, "loss mask"),
    "off_policy": (off_policy, "answers"),
    "shifted_features": (shifted_features, "shift"),
    "stale_features": (stale_features, "features"),
    "other_layers": (other_layers, "features"),
    "other_verifier": (other_verifier, "verifier"),
    "narrow_vocabulary": (narrow_vocabulary, "vocabulary"),
    "shifted_mapping": (shifted_mapping, "vocabulary"),
    "low_precision": (low_precision, "weights"),
    "untrained_layer": (untrained_layer, "weights"),
    "wrong_head": (wrong_head, "head"),
    "norm_flag": (norm_flag, "convention"),
    "draft_length": (draft_length, "draft length"),
    "low_rate": (low_rate, "training"),
    "little_data": (little_data, "data size"),
    "absent_domain": (absent_domain, "domains"),
}


def make(name, folder):
    "What the doctor is given for a case of `SPOILT`, or for a sound drafter, `sound-ALGORITHM-SEED`."
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if name in SPOILT:
        return SPOILT[name][0](folder)
    _, algorithm, seed = name.split("-")
    return dict(drafter=sound(folder, algorithm, int(seed)))


if __name__ == "__main__":
    import sys

    for case in sys.argv[2:]:
        print(case, make(case, sys.argv[1]), flush=True)
