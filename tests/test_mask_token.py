'The token that means "not known yet": which one of a tokenizer that drafters of blocks and P-EAGLE take.'

import warnings

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from speculators_nb.verifier.mask_token import resolve_mask_token

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
# as of SmolLM2: all rows of the table are taken, and the end of an answer serves as pad, too
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header|>", "<repo_name>", "<empty_output>"]
ROLES = dict(bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>", pad_token="<|im_end|>")


@pytest.fixture
def resolve(tmp_path):
    def resolved(special, template=TEMPLATE, free=0, **roles):
        words = WordLevel({word: i for i, word in enumerate([*special, "a", "b"])}, unk_token=special[0])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), chat_template=template, **roles)
        tokenizer.add_special_tokens(dict(extra_special_tokens=[s for s in special if s not in roles.values()]))
        tokenizer.save_pretrained(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            token = resolve_mask_token(tmp_path, len(tokenizer) + free)
        return [*special, "a", "b", "a free row"][token]

    return resolved


def test_no_token_that_conversations_hold(resolve):
    assert resolve(SPECIAL, **ROLES) == "<empty_output>"
    written = TEMPLATE + "<empty_output>"
    assert resolve(SPECIAL, written, **ROLES) == "<repo_name>"


def test_what_comes_before(resolve):
    "The tokenizer's own mask token, a free row, a pad token that is nothing else."
    assert resolve([*SPECIAL, "<mask>", "<last>"], mask_token="<mask>", **ROLES) == "<mask>"
    assert resolve(SPECIAL, free=1, **ROLES) == "a free row"
    assert resolve(["<pad>", *SPECIAL], **ROLES | dict(pad_token="<pad>")) == "<pad>"


def test_the_end_of_an_answer_is_named(resolve):
    "Where nothing else is left; what no token can be is an error."
    with pytest.raises(UserWarning, match="no unused special token: eos_token '<.im_end.>' .2. serves as mask"):
        resolve(SPECIAL[:3], **ROLES)
    with pytest.raises(ValueError, match="no unused special token and no free row; give mask_token_id"):
        resolve(["a"], None)
