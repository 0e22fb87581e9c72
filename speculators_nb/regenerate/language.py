"""Language identification and a language filter for conversations: py3langid over 37 languages, and Unicode scripts."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

from py3langid.langid import MODEL_FILE, LanguageIdentifier
from transformers.models.whisper.tokenization_whisper import LANGUAGES as NAME_OF

NOT_PROSE = re.compile(r"```.*?(```|$)|https?://\S+|\d+", re.S)


@cache
def script_of(letter: str) -> str | None:
    'A character\'s script by its Unicode name, e.g. "latin", "cyrillic", "cjk"; None: no letter.'
    if not letter.isalpha():
        return None
    first_word = unicodedata.name(letter, "").partition(" ")[0]
    return first_word.partition("-")[0].lower()


def scripts(text: str) -> Counter[str]:
    "How many letters of each script prose has, perhaps with code in it."
    found = map(script_of, NOT_PROSE.sub(" ", text))
    return Counter(script for script in found if script)


def main_script(found: Counter[str]) -> str:
    """The script of most of a text, by `scripts`; kana is "cjk". A Chinese character, kana or Hangul syllable counts as
    three letters."""
    cjk = found["cjk"] + found["hiragana"] + found["katakana"]
    weight = found | Counter(cjk=3 * cjk, hangul=3 * found["hangul"])
    return max(weight, key=weight.__getitem__)


_CODES = (
    "en de fr es it pt nl sv da no fi pl cs ro hu tr id vi ru uk be sr el ar fa ur he hi bn ta te th ja zh ko ka hy"
)
NAMES = {NAME_OF[code]: code for code in _CODES.split()} | {"norwegian": "nb", "no": "nb"}
LANGUAGES = frozenset([*NAMES.values(), "und"])

SURE = 0.58  # probability below which a text is "und"


@cache
def _identifier():
    "The classifier over the languages of `NAMES`. It calls Bokmål Norwegian."
    classifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=SURE)
    classifier.set_languages(LANGUAGES - {"nb", "und"} | {"no"})
    return classifier


def language_of(text: str) -> str:
    'The language that most of a text is in: a code of ISO 639-1, or "und".'
    prose = NOT_PROSE.sub(" ", text)
    if not any(map(str.isalpha, prose)):
        return "und"
    label, _ = _identifier().classify(prose)
    return code_of(label)


# Greek, Georgian and Armenian are languages above
SCRIPTS = frozenset(
    ("latin", "cyrillic", "arabic", "cjk", "hebrew", "thai", "devanagari", "hangul", "bengali", "tamil", "telugu")
)


def code_of(name: str) -> str:
    'One spelling for a language: "en" for "English", "EN", "en-US"; unknown names come back in lower case.'
    name = re.split("[-_]", name.strip().lower())[0]
    return NAMES.get(name, name)


def wanted_languages(names: str | Iterable[str] | None) -> frozenset[str] | None:
    """Codes and scripts of a list of codes, names or scripts, "en,German,cjk"; None: all. ValueError names what is not
    known."""
    if not names:
        return None
    listed = names.split(",") if isinstance(names, str) else names
    wanted = frozenset(map(code_of, listed))
    if unknown := sorted(wanted - LANGUAGES - SCRIPTS):
        raise ValueError(
            f"languages: {', '.join(unknown)} not known; known are "
            f"{', '.join(sorted(LANGUAGES))}, and the scripts {', '.join(sorted(SCRIPTS))}"
        )
    return wanted


def language_of_row(row, messages: list[dict], wanted: frozenset[str] | None) -> tuple[str | None, bool]:
    """The language that a conversation states in "language" or "lang", or else that its users wrote in, by its messages
    of `normalize`; and whether `wanted_languages` has it."""
    fields = row if isinstance(row, dict) else {}
    contents = (m["content"] for m in messages if m["role"] == "user")
    questions = "\n".join(c for c in contents if isinstance(c, str))
    stated = [fields.get(k) for k in ("language", "lang")]
    stated = [name for name in stated if name and isinstance(name, str)]
    language = code_of(stated[0]) if stated else language_of(questions)
    if wanted is None or language in wanted:
        return language, True
    found = scripts(questions)
    return language, bool(found) and main_script(found) in wanted
