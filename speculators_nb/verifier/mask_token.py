"""Choice of the mask token id for parallel drafters (P-EAGLE, DFlash).
They need a token for "not known yet"; most verifiers were never given one."""

import operator
import os
import warnings
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..core.checkpoints import current_hub_access

MASK_TOKEN = "<|MASK|>"


def resolve_mask_token(
    verifier_name_or_path: str | os.PathLike,  # folder or hub id; tokenizer read if no id given
    vocab_size: int,  # V, rows of the verifier's embedding table
    mask_token_id: int | None = None,  # None: mask token, free row, unused token, eos or unk, in order
) -> int:  # in [0, V)
    """The id of the token that means "not known yet". Errors: ValueError for an id outside the
    vocabulary, or where nothing can serve as a mask."""
    if mask_token_id is not None:
        return _row_of_table(mask_token_id, vocab_size, "mask_token_id")
    name, access = str(verifier_name_or_path), {}
    if not Path(name).is_dir():
        access = current_hub_access().arguments(name, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=current_hub_access().remote_code, **access)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"mask_token_id is not given, and verifier {str(verifier_name_or_path)!r} has no "
            "tokenizer to ask; give mask_token_id"
        ) from e
    if tokenizer.mask_token_id is None and len(tokenizer) < vocab_size:
        # of the object in memory, to learn its id; the verifier's files stay
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    if tokenizer.mask_token_id is not None:
        return _row_of_table(
            tokenizer.mask_token_id, vocab_size, f"mask token {tokenizer.mask_token!r} of the verifier's tokenizer, id"
        )
    unused = unused_token(tokenizer)
    if unused is not None:
        return _row_of_table(unused, vocab_size, "a special token of the verifier's tokenizer, id")
    for name in ("eos_token", "unk_token"):
        found = getattr(tokenizer, f"{name}_id")
        if found is not None:
            found = _row_of_table(found, vocab_size, f"{name} of the verifier's tokenizer, id")
            warnings.warn(
                (
                    "The tokenizer has no mask token, no free row in the embedding table and no unused special token: "
                    f"{name} {getattr(tokenizer, name)!r} ({found}) serves as mask"
                ),
                stacklevel=2,
            )
            return found
    raise ValueError(
        f"mask_token_id is not given, and the tokenizer of {str(verifier_name_or_path)!r} has "
        "no mask, pad, eos or unk token, no unused special token and no free row; give mask_token_id"
    )


def unused_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """A special token that conversations do not hold: neither the template nor another role has it. The pad token if it
    is one, else the last of them: names that a tokenizer keeps in reserve come after those that it gives a meaning."""
    template = str(tokenizer.chat_template or "")
    roles = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = [i for i, text in special.items() if i not in roles and text not in template]
    if tokenizer.pad_token_id in unused:
        return tokenizer.pad_token_id
    return max(unused, default=None)


def _row_of_table(token_id, vocab_size, what):
    token_id = operator.index(token_id)
    if not 0 <= token_id < vocab_size:
        raise ValueError(
            f"{what}={token_id} lies outside the verifier's vocabulary of {vocab_size}; choose "
            f"an id from 0 to {vocab_size - 1}"
        )
    return token_id
