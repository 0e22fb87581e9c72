"""Prepared folders across the border: the upstream library's masks equal ours row by row, its folders are read here,
ours by speculators 0.9.0.

    python tests/parity/check_prepared.py                        makes benchmarks/.venv-upstream on the first call (1.7
    GB)
    python tests/parity/check_prepared.py --upstream-python PATH an environment that holds upstream already

Upstream's own functions do upstream's part, in upstream's environment. It renders through a vLLM server; here that one
request is answered by `transformers`, which renders the same template.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERIFIER = ROOT / "data/tiny-verifier"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "plain": CHATML,
    "think opened by the prompt": CHATML[: CHATML.rindex("{% endif")] + "<think>\n{% endif %}",
    "reasoning of the last turn only": CHATML.replace(
        "\n{{ m.content }}",
        "\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
    ),
    "system line and tools": "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML,
}


def upstream(folder):
    """Upstream's side: rows of every conversation under every template; a folder of its own; a look into ours."""
    import numpy as np
    import torch
    from datasets import Dataset
    from speculators.data_generation import preprocessing as theirs
    from speculators.train.cli import _load_mappings
    from speculators.train.data import ArrowDataset
    from speculators.train.vocab_mapping import (
        build_vocab_mappings_from_distribution,
        save_token_frequency_distribution,
    )
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(VERIFIER)

    def render(
        endpoint, messages, add_generation_prompt, tools=None, truncate_prompt_tokens=None, truncation_side=None
    ):
        return tok.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, return_dict=True
        )["input_ids"][:truncate_prompt_tokens]

    theirs.render_conversation = render
    chats, out = json.loads((folder / "chats.json").read_text()), {}
    for name, template in TEMPLATES.items():
        tok.chat_template = template
        rows = [
            row
            for c in chats
            for row in theirs._render_boundary_rows(
                theirs._normalize_conversation(c["messages"]), "", 100_000, tools=c.get("tools")
            )
        ]
        out[name] = [[r["input_ids"], r["loss_mask"]] for r in rows]
    (folder / "rows.json").write_text(json.dumps(out))
    ready = Dataset.from_list([{"input_ids": i, "loss_mask": m} for i, m in out["plain"]])
    made = theirs.build_speculator_training_dataset(ready, tok, max_length=120, num_proc=1)
    made.save_to_disk(folder / "theirs")
    save_token_frequency_distribution(made, folder / "theirs/token_freq.pt")

    data = ArrowDataset(2048, folder / "ours", on_missing="skip")
    record = json.loads((folder / "ours/data_config.json").read_text())
    split = [
        ArrowDataset(
            2048,
            folder / "ours",
            on_missing="skip",
            train_ratio=record["split"]["train"] / record["data"]["num_samples"] + 1e-9,
            split=s,
        )
        for s in ("train", "val")
    ]
    assert [len(s) for s in split] == [record["split"]["train"], record["split"]["val"]]
    assert data.approx_lengths == list(json.loads((folder / "ours/sample_lengths.json").read_text()).values())
    rows = [[data.data[i]["input_ids"], data.data[i]["loss_mask"]] for i in range(len(data))]
    assert all(i.dtype == torch.int64 and len(i) == len(m) for i, m in rows)
    freq = torch.load(folder / "ours/token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(
        token_freq_dict=freq, draft_vocab_size=256, target_vocab_size=2048
    )
    ours = _load_mappings(folder / "ours/d2t-256.npy", folder / "ours/t2d-256.npy", 256)
    assert torch.equal(d2t, ours[0]) and torch.equal(t2d.bool(), ours[1].bool())
    np.savez(
        folder / "seen.npz",
        ids=torch.cat([i for i, _ in rows]).numpy(),
        mask=torch.cat([m.long() for _, m in rows]).numpy(),
    )


def main(python):
    import numpy as np
    from datasets import disable_progress_bars
    from transformers import AutoTokenizer

    from speculators_nb.data.chat_encoding import encode, token_frequencies
    from speculators_nb.data.messages import normalize, tools_of
    from speculators_nb.data.prepare import prepare_data
    from speculators_nb.data.prepared_folder import load_prepared
    from speculators_nb.lab.shipped import read_corpus

    disable_progress_bars()
    with tempfile.TemporaryDirectory() as d:
        folder, chats = Path(d), read_corpus(ROOT / "data/corpus/train.jsonl")[:80]
        for i, c in enumerate(chats):
            if i % 3 == 0:
                c["messages"] = [{"role": "system", "content": "Be brief.\n"}, *c["messages"]]
            if i % 4 == 0:
                c["tools"] = [{"name": "add", "parameters": {"a": 1}}]
            if i % 5 == 0:
                # spaces that merge with the template's
                c["messages"][-1]["content"] = "\n\n  " + c["messages"][-1]["content"] + " "
        (folder / "chats.json").write_text(json.dumps(chats))
        ours = prepare_data(chats, VERIFIER, folder / "ours", max_length=120, val_fraction=0.1, draft_vocab_size=256)
        subprocess.run([python, __file__, "--upstream", folder], check=True)
        tok = AutoTokenizer.from_pretrained(VERIFIER)
        seen = np.load(folder / "seen.npz")
        rows = json.loads((folder / "rows.json").read_text())
        for name, template in TEMPLATES.items():
            tok.chat_template = template
            made = [[ids, mask] for c in chats for ids, mask in encode(normalize(c), tok, tools_of(c), rows="turn")]
            assert made == rows[name], (
                f"{name}: row {next(i for i, (a, b) in enumerate(zip(made, rows[name])) if a != b)} differs"
            )
            print(f"{name}: {len(made)} rows, {sum(sum(m) for _, m in made)} trained tokens, the same as upstream's")
        with_numbers = ours.rows.with_format("numpy")
        assert np.array_equal(np.concatenate(with_numbers["input_ids"][:]), seen["ids"]) and np.array_equal(
            np.concatenate(with_numbers["loss_mask"][:]), seen["mask"]
        )
        print(f"our folder: {len(ours)} rows, lengths, split, counts and vocabulary as upstream reads them")
        theirs = load_prepared(folder / "theirs")
        assert [r["input_ids"].tolist() for r in theirs.rows] == [i[:120] for i, m in rows["plain"] if sum(m[:120])]
        assert theirs.token_freq == token_frequencies(theirs.rows)
        again = prepare_data(
            folder / "theirs", VERIFIER, folder / "again", shuffle=False, dedup=False, val_fraction=0.0
        )
        assert [r["loss_mask"].int().tolist() for r in again.rows] == [
            r["loss_mask"].int().tolist() for r in theirs.rows
        ]
        print(f"upstream's folder: {len(theirs)} rows and their counts as we read them")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python")
    parser.add_argument("--upstream", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.upstream:
        upstream(args.upstream)
    else:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from upstream import upstream_python

        main(args.upstream_python or upstream_python())
