"""Checks of stored hidden states against the verifier (target model) before training.
Sizes, layers, fingerprint, final norm: a drafter that is trained against the head of another model is useless,
though its loss decreases."""

import logging
import os
from pathlib import Path

from ..verifier.identity import VerifierInfo, check_final_norm, checkpoint_fingerprint
from ..verifier.row_limits import RowLimits
from .feature_rows import FeatureRows

log = logging.getLogger(__name__)


def record_problems(data: FeatureRows, verifier: str | os.PathLike) -> list[str]:
    "What is recorded of the features and does not fit a verifier (folder or hub id); empty: all of it fits."
    info, recorded, found = VerifierInfo.of(verifier), data.made_by, []
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        ours = getattr(info.text, name)
        if recorded.get(name) not in (None, ours):
            found.append(f"{name} is recorded as {recorded[name]!r}, the verifier has {ours}")
    layers, n = list(data.layer_ids or ()), info.text.num_hidden_layers
    if beyond := [i for i in layers if i > n]:
        found.append(f"layer_ids has {beyond}, the verifier has layers 0 to {n}")
    elif layers and layers[-1] != n:
        found.append(f"layer_ids is {layers}, its last must be {n}, the stream before the final norm")
    ours = {"fingerprint": info.fingerprint}
    if (Path(info) / "config.json").is_file():
        ours["checkpoint"] = checkpoint_fingerprint(info)
    same = [ours[k] == recorded[k] for k in ours if ours[k] and recorded.get(k)]
    if recorded.get("fingerprint"):  # a server records the checkpoint's fingerprint as its only one
        same += [True] if recorded["fingerprint"] == ours.get("checkpoint") else []
    if not same:
        log.warning("%s: whether these features are of %s is not recorded, and was not checked", data.where, verifier)
    elif not any(same):
        found.append(
            f"the fingerprint of its weights is recorded as {recorded['fingerprint']}, the "
            f"verifier's is {ours['fingerprint'] or ours['checkpoint']}"
        )
    return found


def check_features(
    data: FeatureRows,  # where the features come from
    verifier: str | os.PathLike,  # folder or hub id; head and embeddings are trained against
    trust_features: bool = False,  # take the features although their record does not fit
) -> None:
    """Check features against a verifier before the first step; afterwards each row's token ids are compared with its
    vocabulary. Errors: ValueError for another hidden size, a final norm that is read wrongly, and, unless trusted, for
    a record that does not fit. Rows beyond its context are counted in a warning."""
    info = VerifierInfo.of(verifier)
    text = info.text
    if data.shape is not None and data.shape[1] != text.hidden_size:
        raise ValueError(
            f"{data.where} holds states of size {data.shape[1]}, the verifier {str(verifier)!r} has hidden_size "
            f"{text.hidden_size}: they are of another model; extract the features again"
        )
    check_final_norm(info.config)
    if found := record_problems(data, info):
        misfit = f"{data.where} does not fit the verifier {str(verifier)!r}: {'; '.join(found)}"
        if not trust_features:
            raise ValueError(
                f"{misfit}. Name the verifier that made the features, or extract them again; "
                "trust_features (--trust-features) takes them as they are"
            )
        log.warning("%s; taken all the same", misfit)
    RowLimits.of(info.config).warn(log, str(data.where), data.lengths)
    data.vocab_size = text.vocab_size
