"""What the make_*_cases.py scripts share: a case of an algorithm run by the upstream library `speculators` 0.9.0,
written down, and run again.

    python tests/parity/make_X_cases.py                    # write every case into tests/fixtures/
    python tests/parity/make_X_cases.py NAME ...           # some of them
    python tests/parity/make_X_cases.py --check tests/fixtures/X tests/fixtures/X_*

`--check` rebuilds each model from its folder's config and weights, runs it again and prints the largest difference. The
scripts run only in an environment that holds upstream (see README.md beside the fixtures); our package is not imported.

A case is a dictionary: `note` says what it is for, `documents` are lengths, `padding` are rows behind them, `loss` says
which rows are trained ("random": holes anywhere), `verifier` and `draft` are kinds of model, `vocab` is the draft
vocabulary, `layer_types` are the draft's layers, `decoder` overrides entries of their configuration, `args` training
arguments.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors.torch import load_file, save_file
from speculators.train.data import CollateFn
from transformers import LlamaConfig, Qwen3Config

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
HIDDEN, VOCAB, LAYERS = 32, 256, 4
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=False,
)
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


class Recorder:
    """An algorithm's cases. A subclass says what is its own, and ends with `.main()`."""

    name = model = config = None  # of the algorithm; upstream's two classes
    cases, args = {}, {}  # what differs from case to case; training arguments that do not
    seed, first = 0, 0  # of all random numbers; of the first case, less 100
    logits = "lm_head_out"  # the outputs whose name begins so are logits

    # ------------------------------------------------------------------------------------ what an algorithm may replace
    def write_verifiers(self):
        """Folders in FIXTURES that the cases' configurations name."""

    def batch(self, model, case, args, call, seed):
        """The inputs, random choices among them. The verifier agrees with the draft here and there, so that accuracies
        are neither 0 nor 1."""
        raise NotImplementedError

    def run(self, model, batch, call):
        """Forward: dict(loss, metrics, outputs), the last of them tensors."""
        raise NotImplementedError

    def numbers(self, model, case, args, batch, seed):
        """More for outputs.json."""
        return {}

    def line(self, numbers, batch):
        """What to print of a case beside its loss."""
        return ""

    def plain(self, call):
        """The forward arguments as JSON."""
        rest = {k: v for k, v in call.items() if k != "tv_loss_fn"}
        return rest | dict(loss_config={k: w for k, (_, w) in call["loss_config"].items()})

    def move(self, model, g):
        """Every trainable parameter off its initial ones and zeros."""
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p += 0.05 * torch.randn(p.shape, generator=g)

    def build(self, case, seed):
        """(the draft as upstream's training makes it, moved, its training arguments)."""
        vocab, types = case.get("vocab", VOCAB // 2), case["layer_types"]
        args = (
            self.args
            | case.get("args", {})
            | dict(draft_vocab_size=vocab, verifier_name_or_path=f"eagle3_verifier_{case.get('verifier', 'qwen3')}")
        )
        t2d = d2t = None
        if vocab < VOCAB:
            ids = torch.randperm(VOCAB, generator=self.generator(seed))[:vocab].sort().values
            t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
            d2t = ids - torch.arange(vocab)
        layer = CONFIGS[case.get("draft", "qwen3")](
            **(
                SHAPE
                | dict(
                    num_hidden_layers=len(types),
                    layer_types=types,
                    sliding_window=2048,
                    use_sliding_window="sliding_attention" in types,
                )
                | case.get("decoder", {})
            )
        )
        torch.manual_seed(self.seed + seed + 1)
        model = self.model.from_training_args(layer, t2d=t2d, d2t=d2t, **args)
        self.move(model, self.generator(seed + 2))
        return model, args

    def restore(self, folder, attn):
        """A model with a folder's configuration and weights, and the forward arguments it was recorded with."""
        model = self.model(config=self.saved_config(folder, attn))
        model.load_state_dict(load_file(folder / "state_dict.safetensors"))
        return model, self.model.get_trainer_kwargs(
            **json.loads((folder / "outputs.json").read_text())["training_args"]
        )[0]

    # ------------------------------------------------------------------------------------------ what all have in common
    def generator(self, offset):
        return torch.Generator().manual_seed(self.seed + offset)

    def saved_config(self, folder, attn):
        config = self.config.from_pretrained(folder / "saved_pretrained")
        config.transformer_layer_config._attn_implementation = attn
        return config

    def record(self, model, batch, call):
        """Everything that a fixture holds: (outputs, gradients, numbers)."""
        model.zero_grad(set_to_none=True)
        out = self.run(model, batch, call)
        out["loss"].backward()
        grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
        numbers = dict(
            algorithm=self.name,
            loss=out["loss"].item(),
            metrics={k: float(v) for k, v in out["metrics"].items()},
            grad_norms={n: t.norm().item() for n, t in grads.items()},
            total_grad_norm=torch.cat([t.flatten() for t in grads.values()]).norm().item(),
            trainable_without_grad=[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None],
            frozen=[n for n, p in model.named_parameters() if not p.requires_grad],
        )
        return {"loss": out["loss"].detach().reshape(1)} | out["outputs"], grads, numbers

    def five_steps(self, model, batch, call):
        """[loss before the step, gradient norm before clipping] of five AdamW steps on the same batch."""
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer, curve = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01), []
        for _ in range(5):
            optimizer.zero_grad()
            loss = self.run(model, batch, call)["loss"]
            loss.backward()
            curve.append([loss.item(), torch.nn.utils.clip_grad_norm_(params, 1.0).item()])
            optimizer.step()
        return curve

    def write(self, name):
        case, seed = self.cases[name], self.first + 100 * (1 + list(self.cases).index(name))
        model, args = self.build(case, seed)
        call = self.model.get_trainer_kwargs(**args)[0]
        batch = self.batch(model, case, args, call, seed)
        folder = FIXTURES / f"{self.name}_{name}"
        (folder / "saved_pretrained").mkdir(parents=True, exist_ok=True)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        outputs, grads, numbers = self.record(model, batch, call)
        for file, tensors in dict(state_dict=state, inputs=batch, outputs=outputs, grads=grads).items():
            save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{file}.safetensors")
        with tempfile.TemporaryDirectory() as tmp:
            model.save_pretrained(tmp)
            keys = sorted(load_file(Path(tmp) / "model.safetensors"))
            config = (Path(tmp) / "config.json").read_text()
        (folder / "saved_pretrained" / "config.json").write_text(config.rstrip() + "\n")
        (folder / "saved_pretrained_keys.json").write_text(json.dumps(keys, indent=1) + "\n")
        numbers |= dict(training_args=args, call_kwargs=self.plain(call), case=case) | self.numbers(
            model, case, args, batch, seed
        )
        path = folder / "outputs.json"
        path.write_text(json.dumps(numbers, indent=1) + "\n")  # `restore` reads it
        # the same numbers from the other attention implementation: how far rounding alone takes them
        other, _, eager = self.record(self.restore(folder, "eager")[0], batch, call)
        if eager["loss"] == eager["loss"]:  # upstream's P-EAGLE has NaN there where the row is padded
            apart = max((other[k] - outputs[k]).abs().max().item() for k in outputs if k.startswith(self.logits))
            numbers |= dict(
                loss_eager=eager["loss"],
                grad_norm_rel_diff_eager=abs(eager["total_grad_norm"] / (numbers["total_grad_norm"] or 1) - 1),
                logits_max_abs_diff_eager=apart,
            )
        numbers |= dict(adamw_5_steps_loss_gradnorm=self.five_steps(self.restore(folder, "sdpa")[0], batch, call))
        path.write_text(json.dumps(numbers, indent=1) + "\n")
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1024
        print(
            f"{folder.name}: loss {numbers['loss']:.6f} (eager {eager['loss']:.6f}), {self.line(numbers, batch)}, "
            f"{size:.0f} KiB"
        )

    def check(self, folder):
        """Largest absolute differences between a folder and a fresh run of it."""
        model, call = self.restore(folder, "sdpa")
        batch, stored, kept = (load_file(folder / f"{name}.safetensors") for name in ("inputs", "outputs", "grads"))
        outputs, grads, numbers = self.record(model, batch, call)
        want = json.loads((folder / "outputs.json").read_text())
        both = outputs.keys() & stored.keys()  # the first recordings had others beside them
        assert len(both) > 1 and grads.keys() == kept.keys() and numbers["metrics"].keys() == want["metrics"].keys()
        steps = torch.tensor(self.five_steps(model, batch, call)) - torch.tensor(want["adamw_5_steps_loss_gradnorm"])
        diff = dict(
            loss=abs(numbers["loss"] - want["loss"]),
            outputs=max((outputs[k].double() - stored[k].double()).abs().max().item() for k in both),
            grads=max((grads[k] - kept[k]).abs().max().item() for k in kept),
            metrics=max(abs(numbers["metrics"][k] - v) for k, v in want["metrics"].items()),
            steps=steps.abs().max().item(),
        )
        print(folder.name, {k: float(f"{v:.2g}") for k, v in diff.items()})
        return max(diff.values())

    def main(self):
        parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.split("\n\n")[0])
        parser.add_argument("names", nargs="*", help="cases to write (default: all), or folders with --check")
        parser.add_argument("--check", action="store_true", help="re-run folders instead of writing them")
        opt = parser.parse_args()
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        folders = [Path(f).resolve() for f in opt.names]
        os.chdir(FIXTURES)  # configurations name their verifier by its folder
        if opt.check:
            sys.exit(max(map(self.check, folders)) > 1e-5)
        self.write_verifiers()
        for name in opt.names or self.cases:
            self.write(name)


def heads(model, forward):
    """What `forward()` returns, and what went into and came out of the two heads on the way."""
    seen = dict(head_in=[], head_out=[], target=[])
    hooks = [
        model.lm_head.register_forward_hook(lambda m, i, o: seen["head_in"].append(i[0].detach())),
        model.lm_head.register_forward_hook(lambda m, i, o: seen["head_out"].append(o.detach())),
        model.verifier_lm_head.register_forward_hook(lambda m, i, o: seen["target"].append(o.detach())),
    ]
    try:
        return forward(), seen
    finally:
        for hook in hooks:
            hook.remove()


def documents(lengths, n_aux, g, trained):
    """Random samples; `trained`(n) is the loss mask of one of n rows."""
    return [
        dict(
            loss_mask=trained(n),
            input_ids=torch.randint(VOCAB, (n,), generator=g),
            hidden_states=torch.randn(n, n_aux * HIDDEN, generator=g),
            verifier_last_hidden_states=torch.randn(n, HIDDEN, generator=g),
            lengths=torch.tensor([n]),
            position_ids=torch.arange(n),
        )
        for n in lengths
    ]


def packed(case, samples, n_aux, shift=None):
    """One row of them, built by upstream's collate."""
    batch = CollateFn(sum(case["documents"]) + case.get("padding", 0), HIDDEN, n_aux, torch.float32, shift)(samples)
    batch.pop("error_records")
    return batch
