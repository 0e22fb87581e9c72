"""Record what the upstream library `speculators` 0.9.0 computes for P-EAGLE, case by case; `record.py` says how."""

import torch
from make_eagle3_cases import Eagle3
from record import HIDDEN, VOCAB, heads
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core

CASES = {
    "llama_2layers_padding": dict(
        note=(
            "two llama layers, the first with a sliding window of 4 that is shorter than the rollouts, five padding "
            "rows, six depths, rope_theta 5e5"
        ),
        verifier="qwen3",
        draft="llama",
        documents=[9, 12, 14],
        padding=5,
        layer_types=["sliding_attention", "full_attention"],
        decoder=dict(sliding_window=4, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
        args=dict(num_depths=6, down_sample_ratio=0.9, down_sample_ratio_min=0.5),
    ),
    "qwen3_full": dict(
        note=(
            "full vocabulary (no t2d, d2t), head_dim 16 on hidden 32, 12 anchors, 0.3 ce + 0.7 tv, "
            "norm_before_residual off"
        ),
        verifier="qwen3",
        draft="qwen3",
        documents=[11, 8, 21],
        vocab=VOCAB,
        layer_types=["full_attention"],
        decoder=dict(head_dim=16),
        args=dict(max_anchors=12, num_depths=5, norm_before_residual=False, loss_fn='{"ce": 0.3, "tv": 0.7}'),
    ),
    "llama_2aux_norm_before_fc": dict(
        note=(
            "norm_before_fc over two auxiliary layers, llama verifier with llama3 rope scaling, lk_hybrid, eight depths"
        ),
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
        args=dict(target_layer_ids=[0, 3], norm_before_fc=True, num_depths=8, loss_fn="lk_hybrid"),
    ),
    "qwen3_mask_holes": dict(
        note="fc_norm and norm_output; random loss mask with holes that reaches the last rows of documents and of the "
        "row; documents of 1, 2 and 3 rows: "
        "rollouts run into the next document, and one begins before the row",
        verifier="qwen3",
        draft="qwen3",
        documents=[1, 14, 2, 9, 3, 11],
        loss="random",
        layer_types=["sliding_attention"] * 2,
        decoder=dict(sliding_window=5),
        args=dict(fc_norm=True, norm_output=True, num_depths=4, down_sample_ratio=1.0),
    ),
}
ARGS = dict(
    target_layer_ids=[1, 2, 3],
    norm_before_residual=True,
    norm_before_fc=False,
    fc_norm=False,
    norm_output=False,
    mask_token_id=255,
    num_depths=4,
    down_sample_ratio=0.7,
    down_sample_ratio_min=0.2,
    max_anchors=None,
    loss_fn="kl_div",
    loss_implementation="eager",
    draft_attn_impl="sdpa",
)


class PEagle(Eagle3):
    name, model, config, cases, args, first = "peagle", PEagleDraftModel, PEagleSpeculatorConfig, CASES, ARGS, 50000

    def batch(self, model, case, args, call, seed):
        """With the rollouts that upstream draws. The verifier agrees, more or less, with one of the rows that predict a
        position."""
        batch = self.rows(case, len(args["target_layer_ids"]), seed)
        torch.manual_seed(self.seed + seed + 5)
        anchor, depth = core.generate_cod_sample_indices(
            seq_length=batch["input_ids"].shape[1],
            loss_mask=batch["loss_mask"],
            **{k: call[k] for k in ("num_depths", "down_sample_ratio", "down_sample_ratio_min", "max_anchors")},
        )
        batch |= dict(cod_anchor_pos=anchor, cod_depth=depth)
        said, at, g = self.forward(model, batch, call)[1]["head_in"][0][0], anchor + depth, self.generator(seed + 4)
        for n in torch.randperm(len(at), generator=g).tolist():
            noise = 0.5 * torch.rand((), generator=g)
            batch["verifier_last_hidden_states"][0, at[n]] = (
                said[n] + noise * torch.randn(HIDDEN, generator=g)
            ) / model.verifier_norm.weight.detach()
        return batch

    def forward(self, model, batch, call):
        """On the batch's rollouts."""
        given = (batch["cod_anchor_pos"], batch["cod_depth"])
        rest = {k: v for k, v in batch.items() if not k.startswith("cod_")}
        sampler, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **_: given
        try:
            return heads(model, lambda: model(**rest, **call))
        finally:
            core.generate_cod_sample_indices = sampler

    def run(self, model, batch, call):
        (_, loss, metrics), seen = self.forward(model, batch, call)
        return dict(
            loss=loss,
            metrics=metrics,
            outputs={"verifier_lm_head_out.0": seen["target"][0], "lm_head_out.0": seen["head_out"][0]},
        )

    def numbers(self, model, case, args, batch, seed):
        """How many trained rows of each depth predict a position in another document than their anchor's: what
        `cross_document_targets` adds."""
        doc, anchor, depth = batch["document_ids"][0], batch["cod_anchor_pos"], batch["cod_depth"]
        other = batch["loss_mask"][0][anchor + depth].bool() & ((doc[anchor] != doc[anchor + depth]) | (anchor < 0))
        return dict(
            sample_seed=self.seed + seed + 5,
            cross_document_rows=torch.bincount(depth[other], minlength=int(depth.max()) + 1).tolist(),
        )

    def line(self, numbers, batch):
        m, depths = numbers["metrics"], numbers["training_args"]["num_depths"]
        acc = [f"{m[f'position_{k}_acc_sum']:.0f}/{m[f'position_{k}_acc_total']:.0f}" for k in range(depths)]
        return f"right by depth {acc}, across documents {numbers['cross_document_rows']}"


if __name__ == "__main__":
    PEagle().main()
