"""Limits of a row: the verifier's (target model's) context, and the positions of a packed row.
One rule says which of them a row exceeds, where rows are made, read, trained and decoded."""

# A config names how many positions are read under the name of its family. vLLM takes the smallest of these fields,
# times the factor of a RoPE that stretches positions; for types that are trained to their length (YaRN, Llama 3) the
# field has the length already. A row is first cut to a packed row, if it is packed; what is left of it must fit the
# context.

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LENGTH_FIELDS = (  # vLLM 0.32, transformers_utils/model_arch_config_convertor.py
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# RoPE types whose factor is in the length already
LENGTH_IS_FINAL = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def rope_of(text: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The RoPE parameters of a text model's config, one or one for each type of layers, in any of the forms that
    configs have had."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return []
    parts = [part for part in rope.values() if isinstance(part, dict)]
    return parts or [rope]


def context_length(text: Mapping[str, Any]) -> int | None:
    "Tokens of the longest text of a model, by its text model's config; None: it has no such field."
    limits = [text[name] for name in LENGTH_FIELDS if text.get(name)]
    limit = text.get("model_max_length") or min(limits, default=None)
    if limit is None:
        return None
    kinds = [(rope.get("rope_type") or rope.get("type"), rope) for rope in rope_of(text)]
    factors = [rope.get("factor") for kind, rope in kinds if kind not in LENGTH_IS_FINAL]
    if "gemma3" in str(text.get("model_type")):
        factors = []
    return int(limit * next((f for f in reversed(factors) if f), 1.0))


def rope_by_length(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """The RoPE parameters of a text model's config by which the length of a text decides how all its positions are
    rotated (types dynamic and longrope); None: no length does."""
    kinds = ((rope.get("rope_type") or rope.get("type"), rope) for rope in rope_of(text))
    return next((rope for kind, rope in kinds if kind in ("dynamic", "longrope")), None)


def same_angles_until(text: Mapping[str, Any]) -> int | None:
    """Tokens of the longest text of a model, by its text model's config, whose length does not decide how all its
    positions are rotated; None: no length does."""
    rope, name = rope_by_length(text), "original_max_position_embeddings"
    if rope is None:
        return None
    borders = rope.get(name), text.get(name), text.get("max_position_embeddings")
    return min(filter(None, borders), default=None)


class Excess(NamedTuple):
    "Rows that are longer than a limit."

    limit: str  # "context" or "total_seq_len"
    tokens: int  # that a row may have
    rows: int  # that have more
    of: int  # rows that were looked at
    first: int  # the first of them, by its place
    longest: int  # tokens of the longest

    @property
    def words(self) -> str:
        "The limit."
        if self.limit == "total_seq_len":
            return f"a packed row (total_seq_len={self.tokens})"
        return f"the verifier's context of {self.tokens} tokens"

    @property
    def remedy(self) -> str:
        "What becomes of them, and what to do."
        if self.limit == "total_seq_len":
            return (
                "What is beyond is cut off and not trained: pass total_seq_len="
                f"{self.longest} (--total-seq-len), or prepare with max_length={self.tokens}"
            )
        return f"Serving never reads so far: prepare with max_length={self.tokens} (--max-length)"

    def text(self, rows: str = "rows", first: str = "") -> str:
        'A sentence that counts the rows, called so, and names where the first is; "": by its number.'
        verb = "is" if self.rows == 1 else "are"
        where = first or f"number {self.first}"
        return (
            f"{self.rows} of {self.of} {rows} {verb} longer than {self.words}: the first is "
            f"{where}, the longest has {self.longest} tokens"
        )


class RowLimits(NamedTuple):
    "The most tokens that a row may have."

    context: int | None = None  # of the verifier; None: it has no limit
    total_seq_len: int | None = None  # positions of a packed row; None: nothing is packed

    @classmethod
    def of(cls, config: Any, total_seq_len: int | None = None) -> "RowLimits":
        """The limits of a verifier's rows, by its config, multimodal or not, and the positions of a packed row; None:
        nothing is packed."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return cls(context_length(vars(text)), total_seq_len)

    def exceeded(self, n: int) -> list[str]:
        "Names of the limits that a row of n tokens exceeds."
        packed = min(n, self.total_seq_len or n)
        lost = ["total_seq_len"] if packed < n else []
        return [*lost, "context"] if self.context and packed > self.context else lost

    def warn(self, log: logging.Logger, where: str, lengths: Iterable[int]) -> list[Excess]:
        "Log what `count` finds in the rows of `where`, a line a limit."
        found = self.count(lengths)
        for excess in found:
            log.warning("%s: %s. %s", where, excess.text(), excess.remedy)
        return found

    def count(self, lengths: Iterable[int]) -> list[Excess]:
        "Count the rows, by their tokens, that exceed a limit: of each such limit."
        found: dict[str, Excess] = {}
        total = 0
        for i, n in enumerate(map(int, lengths)):
            total += 1
            for name in self.exceeded(n):
                old = found.get(name) or Excess(name, getattr(self, name), 0, 0, i, n)
                found[name] = old._replace(rows=old.rows + 1, longest=max(old.longest, n))
        return [excess._replace(of=total) for excess in found.values()]
