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


def _size_problems(recorded, config):
    "Sizes in the record that are not the verifier's."
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        ours = getattr(config, name)
        if recorded.get(name) not in (None, ours):
            yield f"{name} is recorded as {recorded[name]!r}, the verifier has {ours}"


def _layer_problems(layers, n):
    "Layer ids that the verifier with n layers does not have, or a last one that is not n."
    if beyond := [i for i in layers if i > n]:
        yield f"layer_ids has {beyond}, the verifier has layers 0 to {n}"
    elif layers and layers[-1] != n:
        yield f"layer_ids is {layers}, its last must be {n}, the stream before the final norm"


def _same_weights(recorded, ours):
    """Whether the features are of these weights; None: not known. A server records the
    checkpoint's fingerprint as its only one."""
    if recorded.get("fingerprint") and recorded["fingerprint"] == ours.get("checkpoint"):
        return True
    same = [ours[k] == recorded[k] for k in ours if ours[k] and recorded.get(k)]
    return any(same) if same else None


def record_problems(data: FeatureRows, verifier: str | os.PathLike) -> list[str]:
    "What is recorded of the features and does not fit a verifier (folder or hub id); empty: all of it fits."
    info = VerifierInfo.of(verifier)
    recorded = data.made_by
    layers = list(data.layer_ids or ())
    found = [*_size_problems(recorded, info.text), *_layer_problems(layers, info.text.num_hidden_layers)]
    ours = {"fingerprint": info.fingerprint}
    if (Path(info) / "config.json").is_file():
        ours["checkpoint"] = checkpoint_fingerprint(info)
    same = _same_weights(recorded, ours)
    if same is False:
        found.append(
            f"the fingerprint of its weights is recorded as {recorded['fingerprint']}, the "
            f"verifier's is {ours['fingerprint'] or ours['checkpoint']}"
        )
    elif same is None:
        log.warning("%s: whether these features are of %s is not recorded, and was not checked", data.where, verifier)
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
