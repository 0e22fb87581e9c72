"""Record what the upstream library `speculators` 0.9.0 computes for XPress, case by case; `record.py` says how. Among
the outputs are the tokens in front of every slot (`previous.0` of the text, then of each round), and the logits that
those of the text give. `lm_head_out.0` are the base logits."""

import torch
from make_dflash_cases import ARGS, ROWS, DFlash
from record import VOCAB
from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig

CASES = {
    "two_layers": dict(
        note="two full layers, reduced vocabulary; losses, weights and rounds as they are by default",
        documents=[15, 12, 16],
        layer_types=["full_attention"] * 2,
    ),
    "window_causal": dict(
        note=(
            "two sliding layers, window of 6, causal in the block of 5; five padding rows; five rounds, as many as "
            "slots; rank 5, ratio 4, gamma 2, kl_div, biases in the attention"
        ),
        **ROWS["causal"],
        args=dict(
            block_size=5,
            max_anchors=9,
            dflash_decay_gamma=2.0,
            loss_fn="kl_div",
            consistency_passes=5,
            xpress_rank=5,
            xpress_mlp_ratio=4,
        ),
    ),
    "window_wide_full_vocab": dict(
        note=(
            "three layers (window of 4, full, window of 4), blocks bidirectional everywhere, full vocabulary: accuracy "
            "counts data tokens; llama verifier"
        ),
        **ROWS["wide"],
        vocab=VOCAB,
        args=dict(sliding_window_non_causal=True, block_size=6, max_anchors=7),
    ),
    "shifted": dict(
        note=(
            "sample_from_anchor; mixed layers, the sliding one causal; more anchors than places, so some are not "
            "valid; padding; targets of the whole row"
        ),
        **ROWS["shift"],
        args=dict(sample_from_anchor=True, max_anchors=24, consistency_passes=2),
    ),
    "data_tokens": dict(
        note="ce_from_data: full vocabulary, 0.1 ce against the data's tokens, 0.9 tv",
        documents=[20, 9, 19],
        vocab=VOCAB,
        layer_types=["full_attention"],
        args=dict(ce_from_data=True, max_anchors=11),
    ),
    "shifted_data_tokens": dict(
        note="ce_from_data with sample_from_anchor up to the row's end, three losses; base_anchor_full_weight",
        documents=[20, 9, 19],
        vocab=VOCAB,
        layer_types=["full_attention"],
        args=dict(
            sample_from_anchor=True,
            ce_from_data=True,
            base_anchor_full_weight=True,
            max_anchors=40,
            loss_fn='{"ce": 0.5, "tv": 0.3, "kl_div": 0.2}',
        ),
    ),
    "dpace_holes": dict(
        note=(
            "D-PACE (alpha 0.3) on ce against data tokens, the base logits at full weight, loss mask with holes up to "
            "the row's end, documents shorter than a block, two auxiliary layers, head_dim 16 on hidden 32"
        ),
        **ROWS["holes"],
        vocab=VOCAB,
        args=dict(
            target_layer_ids=[0, 3],
            block_size=8,
            max_anchors=12,
            loss_fn="ce",
            per_position_loss_weight="dpace",
            dpace_alpha=0.3,
            ce_from_data=True,
            base_anchor_full_weight=True,
        ),
    ),
    "dpace_reduced": dict(
        note="D-PACE on ce against the verifier's likeliest token, reduced vocabulary, sample_from_anchor, holes",
        documents=[18, 12, 18],
        loss="random",
        layer_types=["full_attention"],
        args=dict(sample_from_anchor=True, loss_fn="ce", per_position_loss_weight="dpace", max_anchors=10),
    ),
    "document_starts": dict(
        note="blocks at the first and second token of each document, the row's first among them",
        **ROWS["starts"],
        args=dict(max_anchors=6, base_anchor_full_weight=True),
    ),
    "text_alone": dict(
        note="no rounds, no loss of the base logits, blocks of two, rank 1, lk_hybrid",
        documents=[14, 13, 13],
        layer_types=["full_attention"],
        args=dict(block_size=2, consistency_weight=0.0, base_anchor_weight=0.0, xpress_rank=1, loss_fn="lk_hybrid"),
    ),
    "empty_mask": dict(
        note="no position carries loss: no anchor is valid, the loss is 0",
        **ROWS["empty"],
    ),
}
ARGS = ARGS | dict(
    loss_fn='{"ce": 0.1, "tv": 0.9}',
    xpress_rank=6,
    xpress_mlp_ratio=2,
    consistency_weight=0.3,
    consistency_passes=3,
    base_anchor_weight=0.6,
)


class XPress(DFlash):
    name, model, config, cases, args, seed = "xpress", XPressDraftModel, XPressSpeculatorConfig, CASES, ARGS, 9876

    def move(self, model, g):
        super().move(model, g)
        # as large as the differences of the base logits, so that a wrong token in front, or a wrong mixture, shows
        for p in (model.refiner_head.token_embed.weight, model.refiner_head.mix_l, model.refiner_head.readout.weight):
            p.data += 0.5 * torch.randn(p.shape, generator=g)

    def run(self, model, batch, call):
        """With the tokens in front of the slots and the logits that they give, call by call."""
        head, previous, biases = model.refiner_head, [], []
        bias_of = head.block_bias

        def recorded(tokens, **kw):
            previous.append(tokens.clone())
            biases.append(bias_of(tokens, **kw))
            return biases[-1]

        head.block_bias = recorded
        try:
            out = super().run(model, batch, call)
        finally:
            del head.block_bias
        base = out["outputs"]["lm_head_out.0"]
        logits = [base + bias.detach().reshape(base.shape) for bias in biases]
        seen = {f"previous.{i}": tokens for i, tokens in enumerate(previous)}
        return out | dict(final=logits[0], outputs=out["outputs"] | {"logits": logits[0]} | seen)

    def numbers(self, model, case, args, batch, seed):
        return {}

    def line(self, numbers, batch):
        m = numbers["metrics"]
        return (
            f"right {m['accuracy_sum']:.0f}/{m['accuracy_total']:.0f}, accept rate "
            f"{m['accept_rate_sum'] / m['accept_rate_total']:.3f}, "
            f"anchors {int(batch['anchor_valid'].sum())}/{len(batch['anchor_valid'])}"
        )


if __name__ == "__main__":
    XPress().main()
