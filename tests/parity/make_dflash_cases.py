"""Record what the upstream library `speculators` 0.9.0 computes for DFlash, case by case; `record.py` says how."""

import speculators.models.dflash.core as dflash
import torch
from record import HIDDEN, VOCAB, Recorder, documents, heads, packed
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

ROWS = {  # documents and layers of cases that several algorithms have
    "causal": dict(
        documents=[15, 12, 16],
        padding=5,
        layer_types=["sliding_attention"] * 2,
        decoder=dict(sliding_window=6, attention_bias=True),
    ),
    "wide": dict(
        verifier="llama",
        documents=[18, 9, 21],
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        decoder=dict(sliding_window=4),
    ),
    "shift": dict(
        documents=[12, 12],
        padding=12,
        layer_types=["full_attention", "sliding_attention"],
        decoder=dict(sliding_window=7, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    ),
    "holes": dict(
        documents=[2, 17, 3, 14, 1, 19],
        loss="random",
        layer_types=["full_attention"],
        decoder=dict(head_dim=16),
    ),
    "starts": dict(
        documents=[9, 12, 14],
        loss="all",
        layer_types=["sliding_attention"],
        decoder=dict(sliding_window=3),
        anchors=[0, 1, 9, 10, 21, 22],
    ),
    "empty": dict(
        documents=[12, 12],
        padding=4,
        loss="none",
        layer_types=["full_attention"],
    ),
}
CASES = {
    "window_causal": dict(
        note=(
            "two sliding layers, window of 6, causal in the block of 5; five padding rows; kl_div with plain decay, "
            "gamma 2; biases in the attention"
        ),
        **ROWS["causal"],
        args=dict(block_size=5, max_anchors=9, dflash_decay_gamma=2.0),
    ),
    "window_wide_full_vocab": dict(
        note=(
            "three layers (window of 4, full, window of 4), blocks bidirectional everywhere, full vocabulary (no t2d, "
            "d2t, lm_head), 0.1 ce + 0.9 tv, llama verifier"
        ),
        **ROWS["wide"],
        vocab=VOCAB,
        args=dict(sliding_window_non_causal=True, block_size=6, max_anchors=7, loss_fn='{"ce": 0.1, "tv": 0.9}'),
    ),
    "shifted_full": dict(
        note=(
            "sample_from_anchor; mixed layers, the sliding one causal; more anchors than places, so some are not "
            "valid; padding; targets of the whole row"
        ),
        **ROWS["shift"],
        args=dict(sample_from_anchor=True, block_size=4, max_anchors=24),
    ),
    "dpace_holes": dict(
        note=(
            "D-PACE (alpha 0.3) on ce, loss mask with holes up to the row's end, documents shorter than a block, two "
            "auxiliary layers, head_dim 16 on hidden 32"
        ),
        **ROWS["holes"],
        args=dict(
            target_layer_ids=[0, 3],
            block_size=8,
            max_anchors=12,
            loss_fn="ce",
            per_position_loss_weight="dpace",
            dpace_alpha=0.3,
        ),
    ),
}
ARGS = dict(
    target_layer_ids=[1, 2, 3],
    mask_token_id=VOCAB - 1,
    block_size=4,
    max_anchors=8,
    dflash_decay_gamma=4.0,
    dpace_alpha=0.5,
    per_position_loss_weight="fixed-exp-decay",
    loss_fn="kl_div",
    loss_implementation="eager",
    draft_attn_impl="sdpa",
)


class DFlash(Recorder):
    name, model, config, cases, args, seed = "dflash", DFlashDraftModel, DFlashSpeculatorConfig, CASES, ARGS, 5432

    def batch(self, model, case, args, call, seed):
        """With the anchors that upstream draws. The verifier agrees with the draft in some blocks from their start
        on."""
        g, n_aux = self.generator(seed + 3), len(args["target_layer_ids"])
        trained = {
            "random": lambda n: torch.rand(n, generator=g) < 0.7,
            "all": lambda n: torch.ones(n, dtype=torch.bool),
            "none": lambda n: torch.zeros(n, dtype=torch.bool),
            "answers": lambda n: torch.arange(n) >= n // 4,
        }
        samples = documents(case["documents"], n_aux, g, trained[case.get("loss", "answers")])
        batch = packed(case, samples, n_aux)
        batch.pop("lengths", None)
        torch.manual_seed(self.seed + seed + 5)
        positions, valid = dflash.select_anchors(batch["loss_mask"], args["max_anchors"], args["block_size"])
        if "anchors" in case:
            positions, valid = torch.tensor(case["anchors"]), torch.ones(len(case["anchors"]), dtype=torch.bool)
        batch |= dict(anchor_positions=positions, anchor_valid=valid)
        size, first, g = model.block_size, 0 if model.config.sample_from_anchor else 1, self.generator(seed + 4)
        logits, y = self.run(model, batch, call)["final"], batch["verifier_last_hidden_states"]
        rows, scale = model.lm_head.weight.detach(), model.verifier_norm.weight.detach()
        for anchor, block in zip(positions.tolist(), logits.view(-1, size, logits.shape[-1])):
            for k in range(first, int(torch.randint(size + 1, (), generator=g))):
                noise = 0.3 * torch.rand((), generator=g) * torch.randn(HIDDEN, generator=g)
                y[0, anchor + k - first] = (rows[block[k].argmax()] + noise) / scale
        return batch

    def forward(self, model, batch, call):
        """With the batch's anchors."""
        anchors = (batch["anchor_positions"], batch["anchor_valid"])
        rest = {k: v for k, v in batch.items() if not k.startswith("anchor_")}
        draw, dflash.select_anchors = dflash.select_anchors, lambda *_: anchors
        try:
            return heads(model, lambda: model(**rest, **call))
        finally:
            dflash.select_anchors = draw

    def run(self, model, batch, call):
        (_, loss, metrics), seen = self.forward(model, batch, call)
        logits = seen["head_out"][0]
        return dict(
            loss=loss,
            metrics=metrics,
            final=logits,
            outputs={"verifier_lm_head_out.0": seen["target"][0], "lm_head_out.0": logits},
        )

    def numbers(self, model, case, args, batch, seed):
        """How many loss rows are scored on another document than their anchor's: only `loss_mask` keeps upstream from
        counting them."""
        doc, mask, first = batch["document_ids"][0], batch["loss_mask"][0], 0 if model.config.sample_from_anchor else 1
        rows = [
            (a, a + k)
            for a in batch["anchor_positions"][batch["anchor_valid"]].tolist()
            for k in range(first, model.block_size)
        ]
        return dict(cross_document_slots=sum(bool(mask[p] and doc[p] != doc[a]) for a, p in rows))

    def line(self, numbers, batch):
        m = numbers["metrics"]
        return (
            f"right {m['full_acc_sum']:.0f}/{m['full_acc_total']:.0f}, eal {m['eal_sum'] / m['eal_total']:.2f}, "
            f"anchors {int(batch['anchor_valid'].sum())}/{len(batch['anchor_valid'])}, "
            f"{numbers['cross_document_slots']} slots in the next document"
        )


if __name__ == "__main__":
    DFlash().main()
