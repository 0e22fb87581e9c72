"""Magpie prompts: the verifier writes questions itself, from the user's turn of its template; filtered."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm.auto import tqdm

from ..core.files import disk_errors
from ..core.options import check_options
from ..data.chat_template import ControlTokens
from .in_process import answer, eos_ids_of
from .language import language_of_row, wanted_languages
from .replay import seed_of
from ..verifier.identity import fingerprint
from ..verifier.tapped_model import Verifier


_PROBE = "Is this read?"


def user_turn(tokenizer) -> list[int]:
    """Token ids of what a conversation begins with, up to the first character of the user's message. Errors: ValueError
    where the chat template does not show the message as it is."""
    question = [{"role": "user", "content": _PROBE}]
    text = tokenizer.apply_chat_template(question, tokenize=False)
    before, found, _ = text.rpartition(_PROBE)
    if not found or not before:
        raise ValueError(
            f"self_prompts: the chat template of {tokenizer.name_or_path!r} has nothing before "
            "a user's message, so the verifier cannot continue it; name a file of prompts"
        )
    return tokenizer(before, add_special_tokens=False)["input_ids"]


TEMPERATURE, TOP_P = 1.0, 0.9  # of the questions, whatever the answers have
LONGEST = 64  # tokens; a question that has not ended by then is dropped
SHORTEST = 5  # tokens
OPENING = 8  # words; a question that begins with the same ones as another is a duplicate
MOST_USELESS = 960  # questions in a row of which none is kept
# how an assistant speaks: the model has mistaken whose turn it is
_ASSISTANT = re.compile(
    r"\W*(i'?m sorry|i am sorry|sorry, but|i apologi[sz]e|as an ai|i'?m an ai|i am an ai"
    r"|i (cannot|can'?t|am unable)|i'?m (glad|happy|here) to|sure[,!]|certainly|of course[,!]"
    r"|thank you for)",
    re.IGNORECASE,
)


class QuestionFilter:
    """Which questions are kept, of these languages (`language.wanted_languages`): each is compared with those that were
    kept before it."""

    def __init__(self, control: ControlTokens, languages=None):
        self.control, self.languages = control, wanted_languages(languages)
        self.openings: set[tuple[str, ...]] = set()  # of the questions that are kept

    def keep(self, text: str) -> bool:
        "Note a question that is kept, whatever is in it; whether its first words are new."
        opening = tuple(re.findall(r"\w+", text.casefold())[:OPENING])
        new = opening not in self.openings
        self.openings.add(opening)
        return new

    def reason(self, text: str, tokens: int, ended: bool) -> str | None:
        """The first reason for which a question of so many tokens is dropped (`ended`: with a control token); None: it
        is kept, and noted."""
        row = {"role": "user", "content": text}
        if not ended:
            return f"no end within {LONGEST} tokens"
        if tokens < SHORTEST:
            return f"fewer than {SHORTEST} tokens"
        if self.control.inside(text):
            return "a control token is spelled in it"
        if self.languages and not language_of_row(None, [row], self.languages)[1]:
            return "another language"
        if _ASSISTANT.match(text.replace("\u2019", "'")):
            return "a refusal, or an assistant's words"
        return None if self.keep(text) else "a duplicate"


def _questions_in(path, mark):
    "The complete lines of a file, and where they end in bytes. Errors: ValueError."
    lines, end = [], 0
    for raw in path.read_bytes().splitlines(True) if path.exists() else ():
        if not raw.endswith(b"\n"):
            break  # torn by a kill
        try:
            line = json.loads(raw)
            line["messages"][0]["content"], int(line["self_prompt"]["attempt"])
        except (ValueError, KeyError, TypeError, IndexError):
            raise ValueError(
                f"data={str(path)!r}: line {len(lines) + 1} is no question that --self-prompts wrote; name a new file"
            ) from None
        if changed := [k for k, v in mark.items() if line["self_prompt"].get(k) != v]:
            raise ValueError(f"data={str(path)!r}: was made with another {', '.join(changed)}; name another file")
        lines.append(line)
        end += len(raw)
    return lines, end


def write_self_prompts(
    verifier: Verifier,  # writes the questions
    tokenizer,  # with a chat template
    path: str | Path,  # JSONL of conversations with one message each; continued if it exists
    n: int,  # how many questions the file is to hold
    languages=None,  # only questions in these, as in `language.wanted_languages`
    seed: int = 0,  # of the sampling
    batch_size: int = 96,  # questions written together
) -> Counter:  # reason -> questions that this call dropped
    """Let the verifier write questions (Magpie, arXiv 2406.08464), until the file holds `n`.
    A batch is written when it is complete, and an interrupted call is continued: the file is
    the same. Errors: ValueError: the file was made otherwise, or nothing that is written can be
    used."""
    check_options(dict(self_prompts=n, languages=languages, seed=seed, batch_size=batch_size))
    path, dropped = Path(path).expanduser(), Counter()
    begin, ends = user_turn(tokenizer), eos_ids_of(verifier, tokenizer)
    control = ControlTokens(tokenizer)
    ends |= {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    mark: dict[str, Any] = {"verifier": fingerprint(verifier.model), "seed": seed}
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")), disk_errors(path):
        lines, end = _questions_in(path, mark)
        questions = QuestionFilter(control, languages)
        for line in lines:
            questions.keep(line["messages"][0]["content"])
        first, useless = lines[-1]["self_prompt"]["attempt"] + 1 if lines else 0, 0
        with path.open("ab") as file, tqdm(total=n, initial=len(lines), desc="questions") as bar:
            file.truncate(end)
            while len(lines) < n:
                # one batch more often than needed after a kill: what follows the last line
                start = first - first % batch_size
                seeds = [seed_of("self-prompt", seed, start + i) for i in range(batch_size)]
                written = answer(verifier, [begin] * batch_size, LONGEST, ends, TEMPERATURE, seeds, TOP_P)
                new = []
                for attempt, ids in enumerate(written, start):
                    if attempt < first or len(lines) + len(new) == n:
                        continue
                    text = tokenizer.decode(ids[:-1], skip_special_tokens=False).strip()
                    why = questions.reason(text, len(ids) - 1, ids[-1] in ends)
                    if why:
                        dropped[why] += 1
                        continue
                    new.append(
                        {
                            "id": f"self-{seed}-{attempt}",
                            "messages": [{"role": "user", "content": text}],
                            "self_prompt": mark | {"attempt": attempt},
                        }
                    )
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in new)
                file.write(text.encode("utf-8", "surrogatepass"))
                file.flush()
                first, lines = start + batch_size, lines + new
                bar.update(len(new))
                useless = 0 if new else useless + batch_size
                if useless >= MOST_USELESS:
                    reasons = "; ".join(f"{k} × {why}" for why, k in dropped.most_common(3))
                    fewer = f"ask for the {len(lines)} that are written, or " if lines else ""
                    raise ValueError(
                        f"self_prompts={n}: of the verifier's last {useless} questions none can be used "
                        f"({reasons}); {fewer}name a file of prompts"
                    )
    return dropped
