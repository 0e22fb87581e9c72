"""Record what the upstream library `speculators` 0.9.0 computes for EAGLE-3, case by case; `record.py` says how."""

import json

import torch
from record import CONFIGS, FIXTURES, HIDDEN, LAYERS, SHAPE, VOCAB, Recorder, documents, heads, packed
from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch

CASES = {
    "qwen3_full": dict(
        note=(
            "qwen3 layer, full vocabulary (no t2d, d2t), no norm before fc, raw output fed back, head_dim 16 on "
            "hidden 32"
        ),
        verifier="qwen3",
        draft="qwen3",
        documents=[11, 8, 21],
        vocab=VOCAB,
        layer_types=["full_attention"],
        decoder=dict(head_dim=16),
        args=dict(norm_before_residual=True, norm_before_fc=False, fc_norm=False, norm_output=False),
    ),
    "llama_2layers_padding": dict(
        note="two llama layers, the first with a sliding window of 6, five padding rows, rope_theta 5e5",
        verifier="qwen3",
        draft="llama",
        documents=[9, 12, 14],
        padding=5,
        layer_types=["sliding_attention", "full_attention"],
        decoder=dict(sliding_window=6, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    ),
    "llama_fc_norm": dict(
        note="norm_before_residual, norm_before_fc and norm_output off; fc_norm on",
        verifier="llama",
        draft="llama",
        documents=[13, 10, 17],
        layer_types=["full_attention"],
        args=dict(norm_before_residual=False, norm_before_fc=False, fc_norm=True, norm_output=False),
    ),
    "qwen3_mixed_ttt4": dict(
        note="two qwen3 layers (full, then a window of 5), 4 TTT steps, decay 0.8, 0.3 ce + 0.7 tv",
        verifier="qwen3",
        draft="qwen3",
        documents=[9, 12, 15],
        vocab=96,
        layer_types=["full_attention", "sliding_attention"],
        decoder=dict(sliding_window=5),
        args=dict(ttt_steps=4, ttt_step_loss_decay=0.8, loss_fn='{"ce": 0.3, "tv": 0.7}'),
    ),
    "llama_2aux_lk": dict(
        note="two auxiliary layers, llama verifier with llama3 rope scaling, lk_hybrid, 2 TTT steps with decay 0.5",
        verifier="llama",
        draft="llama",
        documents=[16, 10, 14],
        layer_types=["full_attention"],
        decoder=dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=1e4,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            )
        ),
        args=dict(target_layer_ids=[0, 3], ttt_steps=2, ttt_step_loss_decay=0.5, loss_fn="lk_hybrid"),
    ),
    "qwen3_mask_holes": dict(
        note=(
            "random loss mask with holes that reaches the last rows of documents and of the row; documents of 1, 2 "
            "and 3 rows"
        ),
        verifier="qwen3",
        draft="qwen3",
        documents=[1, 14, 2, 9, 3, 11],
        loss="random",
        layer_types=["sliding_attention"],
        decoder=dict(sliding_window=2048),
    ),
}
ARGS = dict(
    target_layer_ids=[1, 2, 3],
    norm_before_residual=True,
    norm_before_fc=True,
    fc_norm=False,
    norm_output=True,
    embed_requires_grad=False,
    ttt_steps=3,
    ttt_step_loss_decay=1.0,
    loss_fn="kl_div",
    loss_implementation="eager",
    draft_attn_impl="sdpa",
)


class Eagle3(Recorder):
    name, model, config, cases, args, seed = "eagle3", Eagle3DraftModel, Eagle3SpeculatorConfig, CASES, ARGS, 4321

    def write_verifiers(self):
        """With the three tensors that a draft reads from one."""
        for i, (arch, kind) in enumerate(CONFIGS.items()):
            folder = FIXTURES / f"eagle3_verifier_{arch}"
            folder.mkdir(parents=True, exist_ok=True)
            config = kind(num_hidden_layers=LAYERS, **SHAPE)
            config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]]
            (folder / "config.json").write_text(json.dumps(config.to_diff_dict(), indent=1, sort_keys=True) + "\n")
            g = torch.Generator().manual_seed(Eagle3.seed + i)
            save_file(
                {
                    "model.embed_tokens.weight": 0.3 * torch.randn(VOCAB, HIDDEN, generator=g),
                    "model.norm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=g),
                    "lm_head.weight": 0.5 * torch.randn(VOCAB, HIDDEN, generator=g),
                },
                folder / "model.safetensors",
            )

    def batch(self, model, case, args, call, seed):
        """The verifier agrees with the draft on runs of tokens."""
        batch = self.rows(case, len(args["target_layer_ids"]), seed)
        said = heads(model, lambda: model(**batch, **call))[1]["head_in"]
        y, g = batch["verifier_last_hidden_states"], self.generator(seed + 4)
        for start in range(0, y.shape[1] - len(said), len(said)):
            for k, h in enumerate(said):
                noise = 0.35 * torch.rand((), generator=g)
                y[0, start + k] = (
                    h[0, start] + noise * torch.randn(HIDDEN, generator=g)
                ) / model.verifier_norm.weight.detach()
        return batch

    def rows(self, case, n_aux, seed):
        """A shifted batch; the shift drops one row of each document."""
        g, holes = self.generator(seed + 3), case.get("loss") == "random"
        samples = documents(
            [n + 1 for n in case["documents"]],
            n_aux,
            g,
            lambda n: (torch.rand(n, generator=g) < 0.6) if holes else torch.arange(n) > n // 4,
        )
        for sample in samples[1::2] if holes else ():
            sample["loss_mask"][-1] = True  # some documents are trained up to their last row
        return packed(case, samples, n_aux, shift_batch)

    def run(self, model, batch, call):
        (tokens, loss, metrics), seen = heads(model, lambda: model(**batch, **call))
        outputs = {"verifier_lm_head_out.0": seen["target"][0]} | {
            f"lm_head_out.{k}": t for k, t in enumerate(seen["head_out"])
        }
        return dict(loss=loss, metrics=metrics, outputs=outputs | {f"returned.{k}": t for k, t in enumerate(tokens)})

    def numbers(self, model, case, args, batch, seed):
        """How many loss rows of each TTT step have their target in another document: only `loss_mask` keeps upstream
        from counting them."""
        doc, mask = batch["document_ids"][0], batch["loss_mask"][0]
        return dict(
            cross_document_rows=[
                int((mask[k:] & (doc[k:] != doc[: len(doc) - k])).sum()) for k in range(args["ttt_steps"])
            ]
        )

    def line(self, numbers, batch):
        m, steps = numbers["metrics"], numbers["training_args"]["ttt_steps"]
        acc = [f"{m[f'cond_acc_{k}_sum']:.0f}/{m[f'cond_acc_{k}_total']:.0f}" for k in range(steps)]
        return f"right given right so far {acc}"


if __name__ == "__main__":
    Eagle3().main()
