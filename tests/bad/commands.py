"""Options of all commands: what makes no sense, what is no number, what is no word. The first part is made of the
rules: what one refuses is typed for every option that has it; `tests/test_options.py` sees that every option of every
command is tried. Every such case is answered before a model is loaded. The rest is about what options say
together, recipes, and arguments that name the wrong thing."""

import inspect
import re
from collections import defaultdict

from speculators_nb.cli import main as cli
from speculators_nb.core.options import RULES, range_of, rule_of

from .harness import ROOT, Case

LINES = {  # command -> a line that would run, with names of harness.GOOD
    "regenerate": "regenerate {corpus} {here}/answers.jsonl --verifier {tiny}",
    "prepare": "prepare {corpus} {here}/prepared --verifier {tiny}",
    "features": "features {corpus} {here}/features --verifier {tiny}",
    "report": "report {here}/prepared",
    "vocab": "vocab {features} 40",
    "train": "train {features} {here}/new --verifier {verifier}",
    "evaluate": "evaluate {drafter} {corpus}",
    "calibrate": "calibrate {drafter} {corpus} {here}/new --verifier {tiny}",
    "compare": "compare {here}/a {here}/b",
    "check": "check {drafter}",
    "serve": "serve {drafter}",
    "doctor": "doctor {drafter} --verifier {verifier}",
    "convert": "convert {drafter} {here}/new --verifier {verifier}",
    "export": "export {drafter} {here}/new",
    "stitch-mtp": "stitch-mtp {drafter} {here}/new --verifier {verifier}",
    "from-gguf": "from-gguf {here}/model.gguf {here}/new",
    "demo": "demo",
    "real": "real --data {corpus}",
    "experiment": "experiment {here}/e.yaml {here}/out",
    "plan": "plan {here}/recipe.yaml --verifier {tiny}",
    "run": "run {here}/recipe.yaml",
}
LONG = "x" * 300
PATH = [("''", "{}='': is empty; write something like"), (LONG, "{}='xxx.*: is too long for a path")]
SERVER = [
    ("localhost:8000", "{}='localhost:8000': is no address of a server; write something like http"),
    ("http://", "{}='http://': is no address of a server"),
    ("http://me:password@host:80", "{}='http://\\*\\*\\*@host:80': holds a (password|\\*+) or a query"),
    ("http://host:99999", "{}='http://host:99999': is no address"),
    ("ftp://host", "{}='ftp://host': is no address of a server"),
]
OBJECT = [
    ("[1,2]", "{}=\\[1, 2\\]: must be a mapping of names and values"),
    ("text", "{}='text': must be a mapping"),
    ("{'a':1}", "{}='.a:1.': must be a mapping"),
    ("[" * 5000, "{}='\\[+\\.\\.\\.: must be a mapping"),
]
LAYERS = [
    ("-1", "{}=\\[-1\\]: must be at least 0"),
    ("two", "{}='two': is text"),
    ("3 {option} 2", "{}=\\[3, 2\\]: must ascend, each id once, e.g. \\[2, 3\\]"),
]
DEVICE = [
    ("foo", "{}='foo': is no device; choose cpu, cuda, mps"),
    ("cpu:x", "{}='cpu:x': is no device"),
    ("meta", "{}='meta': is no device"),
]
MOONCAKE = [
    ("mooncake://host", "{}='mooncake://host': is no address of a Mooncake master; write something like"),
    ("mooncake:/host:1", "{}='mooncake:/host:1': is no address of a Mooncake master"),
    ("mooncake://host:99999", "{}='mooncake://host:99999': is no address of a Mooncake master"),
    ("mooncake://h:1?segment_gb=0", "{}='mooncake://h:1.segment_gb=0': is no address of a Mooncake master"),
]


def refused(rule):
    "(what is typed, what must be answered) of values that a rule refuses by its kind, whatever the option."
    rule = rule.of or rule
    match rule.kind:
        case "path":
            yield from PATH
        case "text":
            yield from (("''", "{}=\\[?''.*: is empty"), ("' '", "{}=\\[?' '.*: is empty"))
        case "mapping":
            yield from OBJECT
        case "word":
            known = rule.words if isinstance(rule.words, tuple) else rule.words()
            said = "is not known; choose .*" + re.escape(known[-1])
            yield f"{known[0]}x", f"{{}}='{known[0]}x': {said}.* Did you mean {known[0]}"
            for value in ("xyzzy", known[-1].upper()):  # also of the wrong case
                if value not in known:
                    yield value, f"{{}}='{value}': {said}"
        case "whole" | "number":
            whole = rule.kind == "whole"
            step = 1 if whole else 0.125
            for end, further in {rule.above: 0, rule.below: 0, rule.low: -step, rule.high: step}.items():
                if end is not None:
                    value = str((int if whole else float)(end + further))
                    yield value, f"{{}}=\\[?{re.escape(value)}\\]?: must be {range_of(rule)}"
            for value in () if whole else ("nan", "inf"):
                yield value, f"{{}}=\\[?{value}\\]?: must be finite"
            for value in ("many", "1.5") if whole else ("many",):
                yield value, f"{{}}='{value}': is text, and must be a {'whole ' * whole}number"


BAD = {  # option, or command.option -> (what is typed, what must be answered), where its rule's kind says too little
    "import_": [(None, None)],  # see OWN
    **dict.fromkeys(("storage", "hidden_states"), PATH + MOONCAKE),
    "rank": [
        ("-1", "{}=-1: must be at least 0"),
        ("1", "{}=1: must be less than world_size=1; lower it"),
        ("first", "{}='first': is text"),
    ],
    "evaluate.temperature": [
        ("-1", "{}=\\[?-1.0\\]?: must be at least 0"),
        ("nan", "{}=\\[?nan\\]?: must be finite"),
        ("0 {option} -inf", "{}=\\[0.0, -inf\\]: must be finite"),
    ],
    "server": SERVER,
    "host": [
        ("'a b'", "{}='a b': is no address to listen on; write something like 127.0.0.1"),
        ("http://127.0.0.1", "{}='http://127.0.0.1': is no address to listen on"),
    ],
    "device": DEVICE,
    "aux_layer_ids": LAYERS,
    "languages": [
        ("''", "{}=\\[?''\\]?: is empty"),
        ("en {option} ''", "{}=\\['en', ''\\]: is empty; write something like en"),
    ],
    "train.extra": [
        ("warmup_steps", "extra='warmup_steps': write name=value"),
        ("seed=1", "extra='seed=1': has an option of its own; use --seed"),
        ("=3", "extra='=3': write name=value"),
        ("warmup_steps=1 --extra warmup-steps=2", "warmup_steps is given twice; leave one out"),
    ],
    "evaluate.extra": [
        ("--port=9 --engine vllm", "extra='--port=9': has an option of its own; use port"),
        ("''", "{}=\\[''\\]: is empty"),
    ],
    "serve.extra": [
        ("--port=9", "extra='--port=9': has an option of its own; use port"),
        ("--dtype=half", "extra='--dtype=half': has an option of its own; use dtype"),
        ("--speculative-config={}", "extra=.*use k and method"),
    ],
}
# numbers that `train` takes and has no option for
NUMBERS = """max_steps weight_decay adam_beta1 adam_beta2 max_grad_norm logging_steps save_steps eval_steps
regenerate_temperature save_total_limit muon_learning_rate data_seed dataloader_num_workers ttt_steps
ttt_step_loss_decay block_size max_anchors num_heads markov_rank dpace_alpha noise_std down_sample_ratio
mask_token_id"""
FURTHER = [  # --extra of train: (name=value, what must be answered)
    *(
        (f"{name}={value}", expect.replace("{}", name))
        for name in NUMBERS.split()
        for value, expect in [*refused(RULES[name])][:1]
    ),
    ("max_steps=0", "max_steps=0: trains nothing; give a number of steps"),
    (f"warmup_steps=1{'0' * 400}", "warmup_steps=1000.*: must be finite"),
    ("logging_steps=2.5", "logging_steps=2.5: must be a whole number, or a share below 1"),
    ("regenerate_temperature=0.7", "regenerate_temperature=0.7: has no effect without regenerate_every"),
    ("lr_scheduler_type=cosin", "lr_scheduler_type='cosin': is not known; choose .*Did you mean cosine"),
    ("lr_scheduler_kwargs=3", "lr_scheduler_kwargs=3: must be a mapping"),
    ('lr_scheduler_kwargs={"a": 1}', "lr_scheduler_kwargs={'a': 1}: get_cosine_schedule_with_warmup takes no 'a'"),
    ('accelerator_config={"even_batch": 1}', "accelerator_config=.*takes no 'even_batch'; did you mean even_batches"),
    ("eval_strategy=sometimes", "eval_strategy='sometimes': is not known; choose no, steps or epoch"),
    ("save_strategy=true", "save_strategy=True: is no word"),
    ("bf16_full_eval=True", "bf16_full_eval='True' has no effect here: bf16 decides"),
    ("use_cpu=null", "use_cpu=None: is missing"),
    ('loss_fn={"ce":-1}', "loss_fn={'ce': -1}: the weight of ce must be at least 0"),
    ('loss_fn={"ce":0}', "loss_fn={'ce': 0}: all weights are 0"),
    ("loss_fn=3", "loss_fn=3: must name a loss"),
    ("loss_fn=kl", "loss_fn='kl': 'kl' is no loss; choose from kl_div"),
    ('loss_fn={"ce": 1', "loss_fn=.*: is not JSON; write something like"),
    ("loss_fn={}", "loss_fn={}: names no loss"),
    ("norm_before_fc=yes", "norm_before_fc='yes': must be true or false"),
    ("attn_impl=auto", "attn_impl='auto': is not known; choose blocked, sdpa"),
    ("gemm_dtype=int8", "gemm_dtype='int8': is not known"),
    ("target_layer_ids=[1,3]", "extra='target_layer_ids=.*: has an option of its own; use --aux-layer-ids"),
    ("url=http://host:8000", "extra='url=http://host:8000': has an option of its own; use --server"),
    ("step_weights=[0.5,-1]", "step_weights=\\[0.5, -1\\]: must be at least 0"),
]
TOGETHER = [  # (name, line after the command's own, what must be answered)
    (
        "train",
        "decoding without evaluations",
        "--decode-prompts shipped --eval-share 0",
        "decode_prompts='shipped': is decoded at each evaluation.*raise eval_share",
    ),
    (
        "train",
        "fresh answers of a server",
        "--server http://127.0.0.1:1 --storage {here} --regenerate-every 1",
        "regenerate_every=1: the verifier must run in this process; leave it or server out",
    ),
    (
        "train",
        "a server without its folder",
        "--server http://127.0.0.1:1",
        "storage=None: is missing; name the folder",
    ),
    (
        "train",
        "an adapter on nothing",
        "--lora-rank 4",
        "lora_rank=4: an adapter is for a drafter that is there; give from_pretrained",
    ),
    (
        "train",
        "an adapter in shards",
        "--lora-rank 4 --from-pretrained {here} --fsdp",
        "fsdp=True: lora_rank=4 trains few weights, on every rank; leave one of them out",
    ),
    ("train", "a scale of nothing", "--lora-alpha 4", "lora_alpha=4.0: has no effect without lora_rank; leave it out"),
    (
        "train",
        "ratios that cross",
        "--extra down_sample_ratio=0.2 --extra down_sample_ratio_min=0.5",
        "down_sample_ratio_min=0.5: must be at most down_sample_ratio=0.2",
    ),
    (
        "features",
        "a folder for nothing",
        "--storage {here}",
        "storage=.*: has no effect with source=hf; leave it out, or set source=vllm",
    ),
    (
        "evaluate",
        "load without an engine",
        "--concurrency 4",
        "concurrency=\\[4\\]: has no effect with engine=reference; leave it out, or set engine=vllm",
    ),
    (
        "evaluate",
        "our rule in the engine",
        "--engine vllm --rule block",
        "rule='block': has no effect with engine=vllm",
    ),
    (
        "evaluate",
        "a window of nothing",
        "--rule fly --k 1",
        "rule='fly': looks at the tokens after a doubtful one, and k=1 drafts none; draft at least 2",
    ),
    (
        "evaluate",
        "a filter of greedy decoding",
        "--top-p 0.9",
        "top_p=0.9: has no effect with temperature=None, which is greedy; leave it out, or set temperature=1",
    ),
    (
        "evaluate",
        "a filter that vLLM does not take",
        "--engine vllm --temperature 1 --min-p 0.1",
        "min_p=0.1: vLLM 0.32 does not take it with speculative decoding; leave it out, or set engine=reference",
    ),
    (
        "evaluate",
        "a length for a server that runs",
        "--engine vllm --server http://127.0.0.1:1 --k 2",
        "k=\\[2\\]: is decided when a server starts",
    ),
    *(
        ("evaluate", f"{line} for a server that runs", f"--engine vllm --server http://127.0.0.1:1 {line}", answer)
        for line, answer in {
            "--method eagle3": "method='eagle3': is decided when a server starts",
            "--dtype half": "dtype='half': is decided when a server starts",
            "--max-model-len 64": "max_model_len=64: is decided when a server starts",
            "--extra=--max-num-seqs=8": "extra=.*: is decided when a server starts",
            "--vllm vllm": "vllm='vllm': is decided when a server starts",
        }.items()
    ),
    (
        "evaluate",
        "a drafter for a method without one",
        "--method ngram --verifier {verifier}",
        "drafter=.*eagle3': method=ngram drafts without one; leave it out, and name the model as verifier",
    ),
    (
        "evaluate",
        "a drafter of another method",
        "--method dflash --verifier {verifier}",
        "method='dflash': .* is a drafter of type eagle3, which vLLM serves as method=eagle3; leave method out",
    ),
    (
        "export",
        "code of no verifier",
        "--to fp8 --trust-remote-code",
        "trust_remote_code=True: has no effect with to=fp8",
    ),
    (
        "export",
        "code of a GGUF",
        "--to llama.cpp --verifier {here}/v.gguf --trust-remote-code",
        "trust_remote_code=True: has no effect with to=llama.cpp, which reads GGUF; leave one of them out",
    ),
    ("serve", "layers for nothing", "--aux-layer-ids 1", "aux_layer_ids=\\[1\\]: has no effect without hidden_states"),
    (
        "serve",
        "a method while states are written",
        "--hidden-states {here}/h --method ngram",
        "method='ngram': hidden_states serves the verifier alone",
    ),
]
PLACES = [  # what is made may not take the place of what it is made from
    ("regenerate {corpus} {corpus} --verifier {tiny}", "output=.*: is data itself; name another place"),
    ("prepare {corpus} {tiny} --verifier {tiny}", "output_dir=.*: is verifier itself"),
    ("prepare {here} {here} --verifier {tiny}", "output_dir=.*: is data itself"),
    ("features {features} {features} --verifier {tiny}", "output_dir=.*: is data itself"),
    ("features {corpus} {tiny}/ --verifier {tiny}", "output_dir=.*: is verifier itself"),
    ("train {features} {features} --verifier {verifier}", "output_dir=.*: is data_dir itself"),
    ("train {features} {verifier} --verifier {verifier}", "output_dir=.*: is verifier itself"),
]
SPELLING = [  # lines that cannot be read
    ("xyzzy", "'xyzzy': there is no such command. Known: calibrate, check"),
    ("train {features} {here}/d --ttt-steps 0", "ttt_steps=0: must be at least 1"),
    (f"train {{features}} {{here}}/d --seed 1{'0' * 400}", "seed=1000.*: must be at least 0 and at most 4294967295"),
    ("train {features} {here}/d --warmup-steps=-4", "warmup_steps=-4: must be at least 0"),
    (
        "evaluate {drafter} {corpus} --temperatures 1",
        "--temperatures: evaluate has no such option; Did you mean --temperature",
    ),
    ("train {features} {here}/d {here}", "unexpected extra argument.*train takes DATA_DIR, OUTPUT_DIR"),
    ("train {features} {here}/d --seed", "'--seed' requires an argument; write --seed 0"),
    ("serve {drafter} --max-num-seqs 4", "--max-num-seqs: serve has no such option; .* --extra=--max-num-seqs=8"),
    ("check {drafter} --xyzzy", "--xyzzy: check has no such option; `check --help` lists the options"),
    ("check a --folder b", "folder='a': given as an argument and as an option; leave one out"),
    ("--tracebak check a", "--tracebak: "),
    ("train", "data_dir is missing: give it on the command line"),
    ("prepare {corpus} --verifier {tiny}", "output_dir is missing"),
    ("check", "folder is missing"),
]
RECIPES = [  # (name, file, content, what must be answered)
    ("a folder", "x/none.yaml", "", "recipe.yaml: no such recipe"),
    ("empty", "recipe.yaml", "", "recipe.yaml: is empty, expected a mapping"),
    ("JSON that is cut off", "recipe.json", "{", "recipe.json: not JSON"),
    ("a key twice", "recipe.yaml", "seed: 1\nseed: 2", "recipe.yaml, line 2: not YAML"),
    (
        "a function of Python",
        "recipe.yaml",
        "seed: !!python/object/apply:os.getcwd []",
        "recipe.yaml, line 1: not YAML",
    ),
    ("a word", "recipe.yaml", "train", "recipe.yaml: holds a str, expected a mapping"),
    ("a tab", "recipe.yaml", "train:\n\tseed: 1", "recipe.yaml, line 2: not YAML"),
    ("not text", "recipe.yaml", b"\xff\xfe\x00seed", "recipe.yaml: not text in UTF-8 \\(byte 0\\)"),
    ("nested without end", "recipe.yaml", "[" * 3000, "recipe.yaml: not YAML .*more than 1,000 brackets"),
    ("JSON nested without end", "recipe.json", '{"a":' * 5000, "recipe.json: more than 8 levels deep"),
    (
        "a part that repeats itself",
        "recipe.yaml",
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c "
            "[*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d]"
        ),
        "recipe.yaml: .*more than 10,000 values",
    ),
    ("a part that holds itself", "recipe.yaml", "a: &a [*a]", "recipe.yaml: .*more than 8 levels deep"),
    ("two megabytes", "recipe.yaml", "# x\n" * 600_000, "recipe.yaml: has 2,400,000 bytes, a recipe at most"),
    (
        "a number of 5000 digits",
        "recipe.yaml",
        "seed: " + "9" * 5000,
        "recipe.yaml: not YAML of a recipe|recipe.yaml: seed=",
    ),
    ("a number of 400 digits", "recipe.yaml", f"learning_rate: 1{'0' * 400}", "learning_rate=1000.*: must be finite"),
    ("a number for a switch", "recipe.yaml", "train: {bf16: 1}", "recipe.yaml: train.bf16=1: must be true or false"),
    ("a switch for a number", "recipe.yaml", "seed: true", "recipe.yaml: seed=True: must be a whole number"),
    (
        "a list for a path",
        "recipe.yaml",
        "train: {output_dir: [a]}",
        "train.output_dir=\\['a'\\]: must name a file or a folder",
    ),
    (
        "nothing for a number",
        "recipe.yaml",
        "train: {seed: null}",
        "train.seed=None: is missing; write something like 0",
    ),
    (
        "another command's mistake",
        "recipe.yaml",
        "serve: {port: 0}",
        "recipe.yaml: serve.port=0: must be at least 1 and at most 65535",
    ),
    ("NaN", "recipe.yaml", "train: {learning_rate: .nan}", "recipe.yaml: train.learning_rate=nan: must be finite"),
    ("infinity", "recipe.json", '{"train": {"learning_rate": Infinity}}', "train.learning_rate=inf: must be finite"),
    ("a shared value that is wrong", "recipe.yaml", "seed: -1", "recipe.yaml: seed=-1: must be at least 0"),
    ("a shared value of nobody", "recipe.yaml", "top-q: 1", "top_q=1: no command has such a field. Did you mean top_p"),
    (
        "a further argument",
        "recipe.yaml",
        "train: {extra: {ttt_steps: 0}}",
        "recipe.yaml: train.ttt_steps=0: must be at least 1",
    ),
    (
        "a truth value for a word",
        "recipe.yaml",
        "train: {extra: {eval_strategy: no}}",
        "eval_strategy=False: is no word.*in quotes in a recipe",
    ),
]
WRONG = [  # arguments that name something else than is wanted
    ("plan without its recipe", "plan {here}/none.yaml", "none.yaml: no such recipe"),
    (
        "neither drafter nor method",
        "evaluate {corpus}",
        "drafter is missing: write evaluate DRAFTER DATA, or give method ngram, suffix or mtp .*, and verifier",
    ),
    (
        "a method without a verifier",
        "evaluate {corpus} --method suffix",
        "verifier=None: method=suffix needs the model that is to write; give it",
    ),
    (
        "a draft model that is not named",
        "evaluate {corpus} --method draft_model --verifier {tiny}",
        "drafter is missing: method=draft_model needs one; give its folder or hub id",
    ),
    (
        "suffixes at two temperatures",
        "evaluate {corpus} --method suffix --verifier {tiny} --temperature 0 --temperature 1",
        "temperature=\\[0.0, 1.0\\]: method=suffix remembers the answers at the first; measure one at a time",
    ),
    (
        "a verifier without heads",
        "evaluate {corpus} --method mtp --verifier {tiny}",
        "method='mtp' needs a head that predicts further tokens; .*tiny-verifier has model_type='qwen3'",
    ),
    (
        "a method that drafts nothing",
        "evaluate {corpus} --method extract_hidden_states --verifier {tiny}",
        "method='extract_hidden_states': is not known; choose ngram, ",
    ),
    (
        "a set that is misspelt",
        "evaluate mtbench --method ngram --verifier {tiny}",
        "mtbench: no such file, folder or set of prompts. Did you mean mt-bench",
    ),
    ("features are missing", "train {here}/none {here}/d", "none: no such folder.*features"),
    (
        "conversations for features",
        "train {corpus} {here}/d",
        (
            "data_dir=.*heldout.jsonl': is a file, and a drafter is trained on features. Make them: speculators-nb "
            "features .*heldout.jsonl FEATURES --verifier VERIFIER"
        ),
    ),
    (
        "a verifier for features",
        "train {verifier} {here}/d",
        "data_dir=.*verifier': is a model, and features are wanted. Make them",
    ),
    (
        "a drafter for features",
        "train {drafter} {here}/d --verifier {verifier}",
        "data_dir=.*eagle3': is a drafter, and features are wanted. Make them: .* features DATA FEATURES --verifier",
    ),
    (
        "an empty folder for features",
        "train {here} {here}/d --verifier {verifier}",
        "no folder 'rows' with the prepared dataset, no Arrow table|no features",
    ),
    (
        "a verifier for a drafter",
        "evaluate {tiny} {corpus}",
        "tiny-verifier: is no drafter of this library: .*A verifier goes into --verifier",
    ),
    (
        "features for a drafter",
        "evaluate {features} {corpus}",
        "features: has no config.json, so it is no drafter, but features; train a drafter on them first",
    ),
    (
        "a file for a drafter",
        "evaluate {drafter}/model.safetensors {corpus}",
        "model.safetensors: is a file, and a drafter is a folder",
    ),
    (
        "a drafter without confidences",
        "calibrate {drafter} {corpus} {here}/new --verifier {tiny}",
        "drafter='.*': a drafter of type eagle3 without a confidence head has nothing to calibrate; give one trained",
    ),
    (
        "nothing for a drafter",
        "evaluate {here} {corpus}",
        "has no config.json, so it is no drafter; name the output of speculators-nb train",
    ),
    (
        "a drafter for a verifier",
        "features {corpus} {here}/f --verifier {drafter}",
        "eagle3: has no tokenizer|eagle3: is a drafter \\(speculators_model_type='eagle3'\\); name the verifier",
    ),
    (
        "an empty folder for a verifier",
        "features {corpus} {here}/f --verifier {here}",
        "has no tokenizer|has no config.json",
    ),
    (
        "a verifier without a tokenizer",
        "features {corpus} {here}/f --verifier {verifier}",
        "verifier: has no tokenizer .*save the verifier's there",
    ),
    (
        "a device that is not here",
        "features {corpus} {here}/f --verifier {tiny} --device cuda:7",
        "device='cuda:7': torch finds no such device.* on this machine; leave it out for",
    ),
    (
        "no such verifier",
        "features {corpus} {here}/f --verifier {here}/none",
        "none: neither a local folder nor a model",
    ),
    (
        "features for conversations",
        f"evaluate {ROOT}/data/tiny-drafter {{features}} --verifier {{tiny}}",
        "features: .*jsonl",
    ),
    ("an evaluation that is not there", "compare {here}/none", "none: no such folder; name the output of evaluate"),
    ("a drafter for an evaluation", "compare {drafter}", "eagle3: no settings.json"),
    (
        "two runs of one name",
        "compare {drafter} {here}/eagle3",
        "runs=.*: another run is called 'eagle3', too; write name=folder",
    ),
    ("an empty folder for an evaluation's drafter", "evaluate {here} {corpus} --verifier {tiny}", "has no config.json"),
    (
        "a drafter whose verifier is not here",
        f"evaluate {ROOT}/data/tiny-drafter {{corpus}}",
        "tiny-verifier: neither .*; .*tiny-drafter names it as its verifier: give verifier= \\(--verifier\\)",
    ),
    ("an evaluation without a tokenizer", "evaluate {drafter} {corpus} --verifier {verifier}", "has no tokenizer"),
    ("no such data", "prepare {here}/none {here}/p --verifier {tiny}", "none: no such file or folder. .* sharegpt"),
    ("an empty folder of data", "regenerate {here} {here}/a.jsonl --verifier {tiny}", "holds no file that ends in"),
    (
        "another kind of data",
        "features {drafter}/model.safetensors {here}/f --verifier {tiny}",
        "cannot read this kind of file",
    ),
    ("no such vocabulary", "vocab {here}/none 16", "none: no state.json"),
    ("a vocabulary of nothing", "vocab {here} 16", "no state.json, so this is no table"),
    ("a report on nothing", "report {here}", "no state.json, so this is no table"),
    (
        "a run over another",
        "train {features} {drafter} --verifier {verifier}",
        "give overwrite .--overwrite. to replace",
    ),
    (
        "a start from nothing",
        "train {features} {here}/d --from-pretrained {here}",
        "so it is no drafter; name the output",
    ),
    ("no verifier to train for", "train {features} {here}/d --verifier {here}", "is it a verifier's folder"),
    ("check of nothing", "check {here}/none", "none: neither a local folder nor a model"),
    ("check of an empty folder", "check {here}", "has no config.json, so it is no drafter; name the output"),
    ("check of a verifier", "check {tiny}", "is no drafter of this library.* goes into --verifier"),
    ("serve of an empty folder", "serve {here}", "has no config.json; is it a model's folder"),
    (
        "serve for an empty verifier",
        "serve {drafter} --verifier {here}",
        "has no config.json; is it a verifier's folder",
    ),
    (
        "a GGUF file for a verifier",
        "prepare {corpus} {here}/p --verifier {here}/x.gguf",
        "x.gguf'?: is GGUF, .*from-gguf .*x.gguf FOLDER",
    ),
    ("a GGUF file over something", "from-gguf {here}/x.gguf {tiny}", "exists already; choose another output folder"),
    ("convert an empty folder", "convert {here} {here}/new --verifier {tiny}", "is an empty folder; name one"),
    (
        "stitch an empty folder",
        "stitch-mtp {here} {here}/new --verifier {tiny}",
        "so it is no drafter; name the output",
    ),
    ("stitch over something", "stitch-mtp {drafter} {tiny} --verifier {tiny}", "exists already; choose another output"),
    (
        "a demo without its verifier",
        "demo --verifier {here}/none --prompts {corpus} --heldout {corpus} --output-dir {here}/o",
        "none: neither a local folder nor a model",
    ),
    ("serve of nothing", "serve {here}/none", "none: neither a local folder nor a model"),
    ("serve of a name", "serve nope", "nope: neither a local folder nor a model.*check the spelling"),
    ("export of nothing", "export {here}/none {here}/new", "none: neither a local folder nor a model"),
    ("evaluate of nothing", "evaluate {here}/none {corpus}", "none: neither a local folder nor a model"),
    ("prompts that are not there", "evaluate {here} {here}/none.jsonl", "none.jsonl: no such file"),
    ("conversations that are not there", "regenerate {here}/none.jsonl {here}/a --verifier {tiny}", "no such file"),
    ("a file for a verifier", "features {corpus} {here}/f --verifier {corpus}", "is a file, and a model's folder is"),
    (
        "data and verifier exchanged",
        "prepare {tiny} {here}/p --verifier {corpus}",
        "is a model, and conversations are needed; `prepare --help`",
    ),
    ("export of a verifier", "export {tiny} {here}/new", "tiny-verifier: is no drafter of this library"),
    ("export over something", "export {drafter} {verifier}", "exists already; choose another output folder"),
    (
        "convert a verifier",
        "convert {tiny} {here}/new --verifier {tiny}",
        "is a drafter of no known format. Looked for",
    ),
    (
        "convert what is ours",
        "convert {drafter} {here}/new --verifier {verifier}",
        "is a checkpoint of this library already",
    ),
    ("stitch what is no MTP head", "stitch-mtp {drafter} {here}/new --verifier {verifier}", "only an MTP head"),
    ("doctor of a verifier", "doctor {tiny}", "tiny-verifier: is no drafter of this library.* goes into --verifier"),
    ("doctor of nothing", "doctor {here}/none", "none: neither a local folder nor a model"),
    ("doctor of features", "doctor {features}", "features: has no config.json, so it is no drafter, but features"),
    (
        "doctor with no features",
        "doctor {drafter} --verifier {verifier} --features {here}/none",
        "none: no folder 'rows' with the prepared dataset",
    ),
    (
        "doctor with a drafter for features",
        "doctor {drafter} --verifier {verifier} --features {drafter}",
        "eagle3: no folder 'rows' with the prepared dataset",
    ),
    (
        "doctor with an empty evaluation",
        "doctor {drafter} --verifier {verifier} --evaluation {here}",
        "no settings.json and no summary.csv; name the output of evaluate",
    ),
    ("prepare into a drafter", "prepare {corpus} {drafter} --verifier {tiny}", "exists and is not a prepared folder"),
    (
        "doctor with no prompts",
        "doctor {drafter} --verifier {verifier} --data {here}/none.jsonl",
        "none.jsonl: no such file",
    ),
    (
        "doctor without its verifier",
        "doctor {drafter} --verifier {here}/none",
        "none: neither a local folder nor a model|none",
    ),
    ("a demo without its corpus", "demo {here}/none", "unexpected extra argument.*demo takes options alone"),
    ("no such experiment", "experiment {here}/none.yaml", "none.yaml: no such experiment; it is a YAML"),
    ("a demo elsewhere", "demo --prompts {here}/none.jsonl", "none.jsonl: no such file"),
]


def _typed(command, p, value):
    "The line for one option; an argument is given as an option of its name, in place of the one in the line."
    option, line = f"--{p.name.replace('_', '-')}", LINES[command].split()
    if p.default is p.empty and p.name != "verifier":  # which is an option everywhere
        parameters = inspect.signature(cli.app.functions[command]).parameters.values()
        places = [q.name for q in parameters if q.default is q.empty and q.name != "verifier"]
        place = places.index(p.name) + 1
        line[place] = value
        return (
            " ".join(line)
            if not value.startswith("-")
            else " ".join([*line[:place], *line[place + 1 :], f"{option}={value}"])
        )
    line = " ".join(line).replace(f" {option} {{tiny}}", "").replace(f" {option} {{verifier}}", "")
    return f"{line} {option}={value.replace('{option} ', f'{option}=')}"


def _values(command, p):
    return BAD.get(f"{command}.{p.name}") or BAD.get(p.name) or [*refused(rule_of(p.name, command))]


def _wrong(command, p):
    "Every wrong value of an option of a command."
    if p.annotation in (bool, bool | None):
        line = f"{LINES[command]} --{p.name.replace('_', '-')}=maybe"
        expect = f"--{p.name.replace('_', '-')}.*does not take a value|{p.name}='maybe'"
        yield Case(f"{command}: {p.name} with a value", line, expect)
        line, expect = f"{LINES[command]} --recipe {{here}}/recipe.yaml", "must be true or false"
        if command == "run":  # takes one recipe, and no options from it
            line, expect = LINES["run"], "the command run has no such field"
        recipe = {"recipe.yaml": f"{command}: {{{p.name}: 3}}"}
        yield Case(f"{command}: {p.name} as a number", line, f"{command}.{p.name}=3: {expect}", recipe)
        return
    for value, expect in _values(command, p) or ():
        if expect is not None:
            name = f"{command}: {p.name} {value[:30]}"
            yield Case(name, _typed(command, p, value), expect.replace("{}", p.name, 1))


def _of_options():
    """Options of a name and a rule share their wrong values: each value with one command, and at least one value with
    each command."""
    alike = defaultdict(list)
    for command, function in cli.app.functions.items():
        for p in inspect.signature(function).parameters.values():
            alike[p.name, id(rule_of(p.name, command)), str(_values(command, p))].append([*_wrong(command, p)])
    for group in alike.values():
        for i, cases in enumerate(group):
            yield from cases[i :: len(group)] or cases[i % max(1, len(cases)) :][:1]


_PREPARE = "prepare: {data: {corpus}, verifier: {tiny}, output_dir: {here}/prepared}\n"
RUNS = [  # what is wrong, the recipe, what must be answered, more files
    ("no section", "seed: 0", "recipe.yaml: has no section to run; write one of regenerate", {}),
    ("an unknown section", "trian: {data_dir: f}", "section 'trian': there is no such command. Did you mean train", {}),
    (
        "an unknown section with a word",
        "trian.small: {data_dir: f}",
        "section 'trian.small': there is no such command",
        {},
    ),
    ("a section with a dot and no word", "train.: {data_dir: f}", "section 'train.': there is no such command", {}),
    ("an unknown key", "train: {data_dri: f}", "train.data_dri='f': the .* no such field. Did you mean data_dir", {}),
    ("a missing key", "train: {data_dir: f}", "section train: output_dir is missing; write output_dir: ", {}),
    ("an experiment as a stage", "experiment: {file: e.yaml, output_dir: o}", "section experiment: is no stage", {}),
    ("a demo as a stage", "demo: {seed: 1}", "section demo: is no stage of a run; leave it out", {}),
    (
        "another output than the next input",
        "check: {folder: ./nowhere/drafter}",
        "check.folder='./nowhere/drafter': there is no such",
        {},
    ),
    ("a value that makes no sense", "train: {data_dir: f, output_dir: o, learning_rate: -1}", "learning_rate=-1", {}),
    (
        "no record of a run",
        "check: {folder: {drafter}}",
        "run.json: is no record of a run",
        {"out/run.json": {"stages": [1]}},
    ),
    ("a record that is cut off", "check: {folder: {drafter}}", "run.json", {"out/run.json": '{"stages": {'}),
    (
        "two sections, one folder",
        _PREPARE + _PREPARE.replace("prepare:", "prepare.b:"),
        "prepare.b and prepare both write to",
        {},
    ),
    (
        "a folder inside another stage's",
        _PREPARE + _PREPARE.replace("prepare:", "prepare.b:").replace("prepared}", "prepared/inner}"),
        "are one inside the other; name a folder apart",
        {},
    ),
    ("the working folder", _PREPARE.replace("{here}/prepared", "."), "which holds the working folder", {}),
    ("a list", "- train", "recipe.yaml: holds a list, expected a mapping", {}),
]

# files of an experiment: what is wrong, the file, what is answered
EXPERIMENTS = [
    ("empty", "", "e.yaml: is empty, expected a mapping with settings, or a grid"),
    ("a list", "- eagle3", "e.yaml: holds a list, expected a mapping with settings"),
    ("cut off", "grid: {max_steps: [1", "e.yaml, line 1: not YAML"),
    (
        "a field that there is not",
        "sedes: 3\ngrid: {max_steps: [1]}",
        "e.yaml: sedes=3: .* no such field. Did you mean seeds",
    ),
    ("nothing to compare", "seeds: 3", "e.yaml: settings, grid: one of them is missing; write settings: "),
    ("settings and a grid", "settings: {a: {}}\ngrid: {max_steps: [1]}", "e.yaml: settings, grid: both are given"),
    ("no settings", "settings: {}", "e.yaml: settings={}: is empty"),
    ("settings as a list", "settings: [a]", "e.yaml: settings=\\['a'\\]: must be a mapping"),
    ("a setting as a number", "settings: {a: 3}", "e.yaml: settings.a=3: must be a mapping, e.g. a: {max_steps: 100}"),
    ("a factor without values", "grid: {max_steps: []}", "e.yaml: grid.max_steps=\\[\\]: must be a list of values"),
    (
        "a factor of one value",
        "grid: {max_steps: 3}",
        "e.yaml: grid.max_steps=3: must be a list of values, or a mapping",
    ),
    ("an option that there is not", "settings: {a: {ttt_step: 1}}", "settings.a.ttt_step=1: .*Did you mean ttt_steps"),
    (
        "a value that makes no sense",
        "grid: {ttt_step_loss_decay: [0.6, 0]}",
        "grid.ttt_step_loss_decay=0: must be greater",
    ),
    ("a common value", "common: {max_steps: few}\nsettings: {a: {}}", "e.yaml: common.max_steps='few': is text"),
    ("a seed", "settings: {a: {seed: 1}}", "e.yaml: settings.a.seed=1: is no training option; leave it out"),
    (
        "a verifier",
        "common: {verifier: v}\nsettings: {a: {}}",
        "common.verifier='v': is no training option; leave it out",
    ),
    ("a folder", "common: {folder: f}\nsettings: {a: {}}", "e.yaml: common.folder='f': is no training option"),
    ("no such algorithm", "settings: {a: {algorithm: eagel3}}", "settings.a.algorithm='eagel3': .*Did you mean eagle3"),
    ("no such algorithm for all", "algorithm: 3\nsettings: {a: {}}", "e.yaml: algorithm=3: is no word"),
    ("no seeds", "seeds: 0\nsettings: {a: {}}", "e.yaml: seeds=0: must be at least 1"),
    ("half a token", "k: 0.5\nsettings: {a: {}}", "e.yaml: k=0.5: must be a whole number"),
    ("no draft length", "draft_lengths: [0]\nsettings: {a: {}}", "e.yaml: draft_lengths=\\[0\\]: must be at least 1"),
    ("one draft length", "draft_lengths: 4\nsettings: {a: {}}", "e.yaml: draft_lengths=4: must be a list"),
    ("no prompts", "n_prompts: -1\nsettings: {a: {}}", "e.yaml: n_prompts=-1: must be at least 1"),
    ("no workers", "workers: none\nsettings: {a: {}}", "e.yaml: workers='none': is text"),
    ("no such module", "import: mine.py\nsettings: {a: {}}", "e.yaml: import='mine.py': no such file"),
]

# what `--import` cannot import: name, line, module or file, what is answered, files
OWN = [
    ("no such file", LINES["train"], "{here}/mine.py", "import='.*mine.py': no such file; name a .py file", {}),
    ("a folder", LINES["evaluate"], "{here}/", "import='.*': is no .py file; name a .py file, or a module", {}),
    ("no such module", LINES["check"], "no_such_drafters", "import='no_such_drafters': no such module; install", {}),
    ("no name of a module", LINES["serve"], "my drafters", "import='my drafters': no such module; install", {}),
    ("nothing", LINES["export"], "", "import='': no such module; install it", {}),
    (
        "a syntax error",
        LINES["convert"],
        "{here}/mine.py",
        "import='.*mine.py': cannot be imported .SyntaxError: .*mend it",
        {"mine.py": "class Gated(:"},
    ),
    (
        "a missing library",
        LINES["doctor"],
        "{here}/mine.py",
        "import='.*mine.py': cannot be imported .ModuleNotFoundError: No module named 'no_such_library'.; mend it",
        {"mine.py": "import no_such_library"},
    ),
    (
        "a module that ends the program",
        LINES["demo"],
        "{here}/mine.py",
        "import='.*mine.py': cannot be imported .SystemExit: 3.; mend it",
        {"mine.py": "raise SystemExit(3)"},
    ),
    (
        "the name of another module",
        LINES["run"],
        "{here}/json.py",
        "import='.*json.py': a module 'json' is imported already; rename the file",
        {"json.py": ""},
    ),
]
OWN_RECIPES = [
    ("no such file", "import: mine.py\ncheck: {folder: out}", "recipe.yaml: import='mine.py': no such file"),
    ("in a section", "check: {folder: out, import: [no_such]}", "recipe.yaml: check.import='no_such': no such module"),
    ("a switch", "import: true\ncheck: {folder: out}", "recipe.yaml: import=True: must be a list of modules"),
    ("loads no drafter", "prepare: {import: json}", "prepare.import=..json..: the command prepare has no such field"),
]
CASES = [
    *_of_options(),
    *(Case(f"train: extra {given}", f"{LINES['train']} --extra '{given}'", expect) for given, expect in FURTHER),
    *(Case(f"{command}: {name}", f"{LINES[command]} {more}", expect) for command, name, more, expect in TOGETHER),
    *(Case(f"place: {line}", line, expect) for line, expect in PLACES),
    *(Case(f"spelling: {line}", line, expect) for line, expect in SPELLING),
    *(
        Case(
            f"recipe: {name}",
            f"train --recipe {{here}}/{'recipe.yaml' if '/' in file else file}",
            expect,
            {} if content is None else {file: content},
        )
        for name, file, content, expect in RECIPES
    ),
    *(Case(name, line, expect) for name, line, expect in WRONG),
    *(Case(f"experiment: {name}", LINES["experiment"], expect, {"e.yaml": text}) for name, text, expect in EXPERIMENTS),
    *(
        Case(
            f"run: {name}",
            "run {here}/recipe.yaml --output-dir {here}/out --dry-run",
            expect,
            {"recipe.yaml": text, **more},
        )
        for name, text, expect, more in RUNS
    ),
    *(
        Case(f"{line.split()[0]}: import_ {name}", f"{line} --import '{given}'", expect, files)
        for name, line, given, expect, files in OWN
    ),
    *(
        Case(f"run: import_ in a recipe: {name}", "run {here}/recipe.yaml --dry-run", expect, {"recipe.yaml": text})
        for name, text, expect in OWN_RECIPES
    ),
    Case(
        "a demo over another one",
        "demo --output-dir {here} --prompts {corpus} --heldout {corpus} --verifier {tiny} --algorithm medusa",
        "algorithm='medusa': .* was begun with algorithm='eagle3'; name another output_dir",
        {"demo.json": {"algorithm": "eagle3"}},
    ),
]
