"""Record what the upstream library `speculators` 0.9.0 computes for DSpark, case by case; `record.py` says how.
`head_alpha` is the weight of the confidence loss."""

import torch
from make_dflash_cases import ARGS, DFlash
from record import VOCAB
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

CASES = {
    "gated_window_padding": dict(
        note=(
            "gated head; two layers, a window of 6 (causal in the block), then full; five padding rows; 0.1 ce + 0.9 "
            "tv, confidence weight 0.5; 13 anchors wanted, all valid"
        ),
        documents=[15, 12, 16],
        padding=5,
        layer_types=["sliding_attention", "full_attention"],
        decoder=dict(sliding_window=6),
        args=dict(
            markov_head_type="gated", loss_fn='{"ce": 0.1, "tv": 0.9}', max_anchors=13, confidence_head_alpha=0.5
        ),
    ),
    "rnn_full_dpace": dict(
        note=(
            "rnn head, full vocabulary (no t2d, d2t), block of 5, D-PACE weights on ce, llama verifier, more anchors "
            "than there are places"
        ),
        verifier="llama",
        documents=[20, 9, 19],
        vocab=VOCAB,
        layer_types=["full_attention"],
        args=dict(
            markov_head_type="rnn",
            block_size=5,
            loss_fn="ce",
            per_position_loss_weight="dpace",
            dpace_alpha=0.3,
            max_anchors=40,
        ),
    ),
    "shifted_plain_confidence": dict(
        note=(
            "sample_from_anchor False; confidence head without the Markov embedding; vanilla head; two auxiliary "
            "layers; gamma 2"
        ),
        documents=[14, 13, 13],
        layer_types=["full_attention", "full_attention"],
        args=dict(
            sample_from_anchor=False, confidence_head_with_markov=False, target_layer_ids=[0, 3], dflash_decay_gamma=2.0
        ),
    ),
    "shifted_rnn_holes": dict(
        note=(
            "sample_from_anchor False, rnn head, loss mask with holes up to the row's end, documents shorter than a "
            "block, window of 4 that sees the whole block"
        ),
        documents=[2, 15, 3, 12, 1, 15],
        loss="random",
        layer_types=["sliding_attention"],
        decoder=dict(sliding_window=4),
        args=dict(
            sample_from_anchor=False,
            markov_head_type="rnn",
            sliding_window_non_causal=True,
            block_size=6,
            max_anchors=14,
            loss_fn="rkl",
        ),
    ),
    "gated_no_confidence": dict(
        note="no confidence head; gated head; lk_hybrid",
        documents=[18, 12, 18],
        layer_types=["full_attention"],
        args=dict(
            markov_head_type="gated",
            enable_confidence_head=False,
            confidence_head_with_markov=False,
            loss_fn="lk_hybrid",
        ),
    ),
    "no_markov": dict(
        note="markov_rank 0: a DFlash block with a confidence head alone; 24 padding rows, most anchors not valid",
        documents=[12, 12],
        padding=24,
        layer_types=["full_attention"],
        args=dict(markov_rank=0, confidence_head_with_markov=False, max_anchors=20),
    ),
}
ARGS = ARGS | dict(markov_rank=6)


class DSpark(DFlash):
    name, model, config, cases, args, seed = "dspark", DSparkDraftModel, DSparkSpeculatorConfig, CASES, ARGS, 7654

    def move(self, model, g):
        super().move(model, g)
        if (
            model.markov_head is not None
        ):  # as large as the base logits' differences, so that a bias at the wrong slot shows
            weight = model.markov_head.markov_w1.weight
            weight.data += torch.randn(weight.shape, generator=g)

    def run(self, model, batch, call):
        """With the Markov head's bias."""
        head, biases = model.markov_head, []
        if head is not None:
            bias = head.block_bias
            head.block_bias = lambda **kw: biases.append(bias(**kw)) or biases[-1]
        try:
            out = super().run(model, batch, call)
        finally:
            if head is not None:
                del head.block_bias
        final = out["final"] + (biases[0].detach().reshape(out["final"].shape) if biases else 0)
        return out | dict(final=final, outputs=out["outputs"] | {"logits": final})

    def numbers(self, model, case, args, batch, seed):
        return {}

    def line(self, numbers, batch):
        m = numbers["metrics"]
        return (
            f"right {m['full_acc_sum']:.0f}/{m['full_acc_total']:.0f}, accept rate "
            f"{m['accept_rate_sum'] / m['accept_rate_total']:.3f}, "
            f"anchors {int(batch['anchor_valid'].sum())}/{len(batch['anchor_valid'])}"
        )


if __name__ == "__main__":
    DSpark().main()
