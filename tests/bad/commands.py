"Options of all commands: a value that makes no sense, a word that is not known."
from .harness import Case

CASES = [
    Case("features are missing", "train {here}/none {here}/d", "none: no such folder.*features"),
    Case("unknown engine", "evaluate {drafter} {corpus} --engine sglang", "engine='sglang'.*reference or vllm"),
]
