"""Record what the upstream library `speculators` 0.9.0 computes for DFlash2, case by case; `record.py` says how.
`candidates` are the C tokens of a slot, the target among them, and `candidate_logits` their scores."""

import torch
from make_dflash_cases import ARGS, ROWS, DFlash
from record import VOCAB
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

CASES = {
    "two_layers": dict(
        note="two full layers, defaults of the convolutions, kl_div with plain decay",
        documents=[15, 12, 16],
        layer_types=["full_attention"] * 2,
    ),
    "window_causal": dict(
        note=(
            "two sliding layers, window of 6, causal in the block of 5; five padding rows; three taps in groups of 8; "
            "gamma 2, biases in the attention"
        ),
        **ROWS["causal"],
        args=dict(
            block_size=5,
            max_anchors=9,
            dflash_decay_gamma=2.0,
            sliding_window_non_causal=False,
            conv_kernel_size=3,
            conv_group_size=8,
        ),
    ),
    "window_wide": dict(
        note=(
            "three layers (window of 4, full, window of 4), blocks bidirectional everywhere, 0.1 ce + 0.9 tv, llama "
            "verifier, a selector weight of 0.3"
        ),
        **ROWS["wide"],
        args=dict(block_size=6, max_anchors=7, loss_fn='{"ce": 0.1, "tv": 0.9}', selector_loss_alpha=0.3),
    ),
    "shifted": dict(
        note=(
            "sample_from_anchor; mixed layers, the sliding one causal; more anchors than places, so some are not "
            "valid; padding; targets of the whole row"
        ),
        **ROWS["shift"],
        args=dict(sample_from_anchor=True, sliding_window_non_causal=False, max_anchors=24, selector_top_k=24),
    ),
    "dpace_holes": dict(
        note=(
            "D-PACE (alpha 0.3) on ce, loss mask with holes up to the row's end, documents shorter than a block, two "
            "auxiliary layers, head_dim 16 on hidden 32, eight taps in a block of 8"
        ),
        **ROWS["holes"],
        args=dict(
            target_layer_ids=[0, 3],
            block_size=8,
            max_anchors=12,
            loss_fn="ce",
            per_position_loss_weight="dpace",
            dpace_alpha=0.3,
            conv_kernel_size=8,
        ),
    ),
    "shifted_dpace": dict(
        note="sample_from_anchor with D-PACE on ce, a candidate for every eighth token",
        documents=[20, 9, 19],
        layer_types=["full_attention"],
        args=dict(
            sample_from_anchor=True,
            loss_fn="ce",
            per_position_loss_weight="dpace",
            max_anchors=11,
            selector_top_k=VOCAB // 8,
        ),
    ),
    "document_starts": dict(
        note="blocks at the first and second token of each document, of the row too: no context, or one key",
        **ROWS["starts"],
        args=dict(max_anchors=6),
    ),
    "one_tap": dict(
        note="blocks of two, one tap, one group, two candidates, a selector of rank 1, rkl",
        documents=[14, 13, 13],
        layer_types=["full_attention"],
        args=dict(
            block_size=2, conv_kernel_size=1, conv_group_size=32, selector_rank=1, selector_top_k=2, loss_fn="rkl"
        ),
    ),
    "all_candidates": dict(
        note="every token is a candidate, groups of one channel, lk_hybrid, gamma 7",
        documents=[18, 12, 18],
        layer_types=["full_attention"],
        args=dict(
            conv_group_size=1, selector_top_k=VOCAB, selector_rank=9, loss_fn="lk_hybrid", dflash_decay_gamma=7.0
        ),
    ),
    "empty_mask": dict(
        note="no position carries loss: no anchor is valid, the loss is 0",
        **ROWS["empty"],
    ),
}
CASES = {name: case | dict(vocab=VOCAB) for name, case in CASES.items()}  # another vocabulary is refused
ARGS = ARGS | dict(selector_rank=6, selector_top_k=8, selector_loss_alpha=1.0)


class DFlash2(DFlash):
    name, model, config, cases, args, seed = "dflash2", DFlash2DraftModel, DFlash2SpeculatorConfig, CASES, ARGS, 8765

    def move(self, model, g):
        super().move(model, g)
        # as large as the differences of the unary logits, so that a wrong predecessor shows
        for codebook in (model.candidate_selector.predecessor_codebook, model.candidate_selector.successor_codebook):
            codebook.data += torch.randn(codebook.shape, generator=g)

    def run(self, model, batch, call):
        """With the candidates, their scores and the tokens in front of them."""
        selector, seen = model.candidate_selector, {}
        score = selector.score_candidates

        def recorded(unary_logits, hidden, predecessors, candidates):
            scores = score(unary_logits, hidden, predecessors, candidates)
            seen.update(predecessors=predecessors, candidates=candidates, candidate_logits=scores.detach())
            return scores

        selector.score_candidates = recorded
        try:
            out = super().run(model, batch, call)
        finally:
            del selector.score_candidates
        return out | dict(outputs=out["outputs"] | seen)

    def line(self, numbers, batch):
        m, args = numbers["metrics"], numbers["training_args"]
        recall = f"unary_candidate_recall_at_{args['selector_top_k']}"
        return (
            f"selector {m['selector_loss_sum']:.3f}, recall {m[recall + '_sum']:.0f}/{m[recall + '_total']:.0f}, "
            f"selected {m['teacher_forced_selector_acc_sum']:.0f}, unary {m['full_acc_sum']:.0f}, "
            f"anchors {int(batch['anchor_valid'].sum())}/{len(batch['anchor_valid'])}"
        )


if __name__ == "__main__":
    DFlash2().main()
