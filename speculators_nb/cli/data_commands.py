"""The commands `regenerate`, `features` and `vocab` as functions: they take names and folders, and write a folder."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path

from ..core.checkpoints import resolve_checkpoint
from ..core.options import HERE, check_options
from ..core.provenance import write_provenance
from ..data.chat_template import open_tokenizer
from ..data.prepare import prepare
from ..data.prepared_folder import load_prepared, read_data_config
from ..features.feature_folder import table_of
from ..features.from_server import extract_from_server
from ..features.in_process import extract_features
from ..jobs.on_ray import on_ray
from ..jobs.ranks import Ranks, ranks_of, shard
from ..jobs.servers import one_or_several
from ..jobs.shared_output import one_writer
from ..nn.compiled import product_dtype
from ..nn.draft_vocabulary import load_vocab_mapping, vocab_mapping_from_frequencies
from ..nn.target_head import text_config, verifier_config
from ..plan.disk import features_on_disk, free_disk
from ..regenerate.from_server import regenerate_from_server
from ..regenerate.in_process import regenerate as answer_here
from ..regenerate.journal import Report
from ..regenerate.self_prompts import write_self_prompts
from ..verifier.folders import named_by
from ..verifier.row_limits import RowLimits
from ..verifier.tapped_model import Verifier, faster_dtype


def device_of(name: str | None) -> torch.device:
    """Where to compute; None or auto: this rank's accelerator, if any. ValueError for a device that torch does not
    know, or that this machine does not have."""
    check_options(dict(device=name))
    if not name or name == "auto":
        # a CUDA build of torch names "cuda" on a machine without a driver, too
        found = torch.accelerator.current_accelerator(check_available=True)
        found = found or torch.device("cpu")
        ranks = ranks_of()
        if found.type == "cpu" or ranks.world_size == 1:
            return found
        return torch.device(found.type, ranks.local_rank % torch.accelerator.device_count())
    device = torch.device(name)
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    n = 1 if device.type == "cpu" else 0
    if module and module.is_available():
        n = module.device_count()
    if (device.index or 0) >= n:
        raise ValueError(
            f"device={str(name)!r}: torch finds {n or 'no'} such device{'s' * (n > 1)} on this "
            f"machine; leave it out for {device_of(None).type}"
        )
    return device


log = logging.getLogger(__name__)


def open_verifier(
    verifier: str | os.PathLike,
    aux_layer_ids: list[int] | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    compute_dtype: str | None = None,
) -> tuple[Verifier, Any]:
    """A verifier, which taps some layers (None: the default three), and its tokenizer; `device` as of `device_of`,
    `attn_implementation`, e.g. sdpa, eager (None: transformers' choice), `compute_dtype` float32: weights in that, else
    in the checkpoint's. FileNotFoundError: neither a folder nor on the hub."""
    options: dict[str, Any] = dict(attn_implementation=attn_implementation)
    options |= dict(dtype="float32" if compute_dtype == "float32" else "auto")
    options |= {"trust_remote_code": True} if trust_remote_code else {}
    resolve_checkpoint(verifier)  # a wrong name has its own error
    place = device_of(device)  # before the weights are read
    tokenizer = open_tokenizer(verifier, trust_remote_code)
    if device == "auto":  # layers that fit no device are on the CPU, then on the disk
        options |= dict(device_map="auto", offload_folder=cached_assets_path("speculators_nb"))
    layers = aux_layer_ids or None
    return Verifier.from_pretrained(str(verifier), layers, device=place, **options), tokenizer


def dtype_of(verifier: Verifier, compute_dtype: str | None) -> torch.dtype | None:
    "The number format in which a verifier's products are computed (auto: as is faster here); None: the verifier's."
    if verifier.dtype == torch.bfloat16 and product_dtype(verifier.device) != torch.bfloat16:
        log.warning(
            "this CPU has no bfloat16 arithmetic, and the verifier's weights are bfloat16: compute_dtype=float32 is "
            "several times as fast, and needs twice the memory for weights"
        )
    if compute_dtype == "auto":
        return faster_dtype(verifier)
    return torch.bfloat16 if compute_dtype == "bfloat16" else None


def regenerate(
    data: str,  # conversations: .jsonl, .json, a folder of them, hf:<id>, or a name: gsm8k
    output: Path,  # .jsonl with the answers; an interrupted run is continued there
    verifier: str | None = None,  # folder or hub id; with server: tokenizer if it sends no ids
    server: list[str] | str | None = None,  # OpenAI-compatible, e.g. http://a:8000 (repeatable)
    model: str | None = None,  # its name there; default: the only one
    self_prompts: int | None = None,  # write so many questions into `data` first, a .jsonl
    max_samples: int | None = None,  # use the first so many conversations; default: all
    max_new_tokens: int = 256,  # of each answer
    max_length: int = 2048,  # a conversation ends where its prompt is this long
    temperature: float = 0.0,  # 0: greedy
    sampling: dict | None = None,  # {"top_p": 0.9}, weighted: {"temperature": [[0, 1], [1, 3]]}
    languages: list[str] | None = None,  # languages to keep, e.g. en (repeatable); default: all
    batch_size: int | None = None,  # answers at once, without a server; default: by memory
    concurrency: int = 16,  # conversations in work at once, with a server
    patience: float = 120.0,  # seconds to wait while none of several servers answers
    seed: int = 0,  # of the sampling
    rank: int = 0,  # which share, where world_size processes share the conversations
    world_size: int = 1,  # shares; 1: as torchrun or srun says, else all of it here
    compute_dtype: str | None = None,  # without a server; auto: bfloat16 where a CPU is faster
    device: str | None = None,  # without a server; auto: layers over all; default: accelerator
    attn_implementation: str | None = None,  # without a server: eager, …; default: as it fits
    engine: str = "local",  # local: this process; ray: a task for each share on a Ray cluster
) -> Report:  # counts of this share; what failed and why
    "Let the verifier answer the questions itself."
    check_options(arguments := dict(locals()), "regenerate")
    if engine == "ray":
        report, *others = on_ray(regenerate, arguments | dict(engine="local"), "output")
        for other in others:
            report.add_report(other)
        _check_answered(report, data, output)
        return report
    ranks = _ranks(rank, world_size)
    given: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        max_length=max_length,
        sampling=sampling,
        languages=languages or None,
        limit=max_samples,
    )
    share: dict[str, Any] = dict(rank=ranks.rank, world_size=ranks.world_size)
    if server is not None:
        report = regenerate_from_server(
            server,
            data,
            output,
            model=model,
            tokenizer=verifier,
            concurrency=concurrency,
            patience=patience,
            **share,
            **given,
        )
    else:
        assert verifier is not None  # or check_options refuses
        opened, tokenizer = open_verifier(verifier, None, device, False, attn_implementation, compute_dtype)
        if self_prompts is not None:
            dropped = write_self_prompts(
                opened, tokenizer, data, self_prompts, languages or None, seed, batch_size or 96
            )
            log.info("%d questions; dropped: %s", self_prompts, dict(dropped))
        computed = dtype_of(opened, compute_dtype)
        report = answer_here(
            opened, tokenizer, data, output, batch_size=batch_size, compute_dtype=computed, **share, **given
        )
    if ranks.rank == 0 and report.done:
        origin = {"data": data, "verifier": verifier, "server": one_or_several(server)}
        write_provenance(output, "regenerate", given | dict(model=model), origin, **report, **_shares(ranks))
    if ranks.world_size == 1:
        _check_answered(report, data, output)
    return report


def _ranks(rank, world_size) -> Ranks:
    "Which share of the rows this process makes: as it is given, else as torchrun or srun says."
    return ranks_of() if world_size == 1 else Ranks(rank, world_size)


def _shares(ranks) -> dict[str, int]:
    "What the record of the first of several shares says, beside its counts."
    return dict(world_size=ranks.world_size) if ranks.world_size > 1 else {}


def _check_answered(report, data, output):
    "ValueError: there was nothing to answer, or nothing could be answered."
    if not report.done:
        raise ValueError(f"data={str(data)!r}: holds no conversation; name a file that has some")
    if report["failed"] and not report["written"] + report["kept"]:
        reason, n = report["failed"].most_common(1)[0]
        first = report.first["failed", reason]
        raise ValueError(
            f"none of {report['failed'].total()} conversations was answered; {n} of them: {reason} (first: {first}). "
            f"{Path(output).with_suffix('.errors.jsonl')} names each; mend it, and run the same command again"
        )


COUNTED = ("written", "kept", "failed")  # rows of a share


def features(
    verifier: str,  # folder or hub id
    data: str,  # prepared folder, or conversations: a file, a folder, hf:<id>, a name: gsm8k
    output_dir: Path,  # where the features go; an interrupted run is continued there
    source: str = "hf",  # hf: the verifier in this process; vllm: a server
    server: list[str] | str | None = None,  # with vllm; default: port 8000 here (repeatable)
    storage: str | None = None,  # with vllm: what serve --hidden-states names
    max_length: int = 2048,  # rows longer than this are cut, where `data` is not prepared yet
    max_samples: int | None = None,  # use the first so many; default: all
    aux_layer_ids: list[int] | None = None,  # layers, ascending (repeatable); default: three
    dtype: str = "bfloat16",  # of the stored features; float8_e4m3fn halves the disk
    shard_gb: float | None = None,  # GB of a file of many rows; default: a file for each row
    compute_dtype: str = "auto",  # of products, with hf; auto: bfloat16 where a CPU is faster
    max_tokens: int = 8192,  # padded tokens in one forward pass, with hf
    concurrency: int = 8,  # requests in flight, with vllm
    patience: float = 120.0,  # seconds to wait while none of several servers answers
    rank: int = 0,  # which share, where world_size processes share the rows
    world_size: int = 1,  # shares; 1: as torchrun or srun says, else all of it here
    device: str | None = None,  # with hf; auto: layers over all; default: the accelerator
    attn_implementation: str | None = None,  # with hf: sdpa, eager, …; default: as it fits
    trust_remote_code: bool = False,  # run code that comes with the verifier
    engine: str = "local",  # local: this process; ray: a task for each share on a Ray cluster
) -> dict:  # counts of this share; rows and tokens of all; output_dir
    "Write the verifier's hidden states on every row."
    check_options(options := dict(locals()), "features")
    if engine == "ray":
        shares = on_ray(features, options | dict(engine="local"), "output_dir")
        return shares[0] | {name: sum(s[name] for s in shares) for name in COUNTED if name in shares[0]}
    ranks, served = _ranks(rank, world_size), source == "vllm"
    layers = model = vocab_size = None
    if served:
        tokenizer, config = open_tokenizer(verifier, trust_remote_code), text_config(verifier_config(verifier))
        layers = [*aux_layer_ids, config.num_hidden_layers] if aux_layer_ids else None
        hidden_size, states = config.hidden_size, len(layers or range(4))
    else:
        model, tokenizer = open_verifier(
            verifier, aux_layer_ids, device, trust_remote_code, attn_implementation, compute_dtype
        )
        vocab_size = model.model.get_input_embeddings().get_parameter("weight").shape[0]
        hidden_size, states = model.hidden_size, len(model.aux_layer_ids) + 1
    if Path(data).is_dir() and any((Path(data) / f / "dataset_info.json").is_file() for f in (".", "rows")):
        rows = table_of(data)  # a prepared folder as it is
        rows = rows if max_samples is None else rows.select(range(min(max_samples, len(rows))))
    else:
        rows = prepare(data, tokenizer, max_length, limit=max_samples, vocab_size=vocab_size)
    share = rows.select(shard(len(rows), ranks.rank, ranks.world_size))
    tokens, free = sum(share["seq_len"]), free_disk(output_dir)
    disk = features_on_disk(tokens, len(share), hidden_size, states, dtype, free)
    log.info("features of %d rows, %d tokens: %.3g GB on the disk", len(share), tokens, disk.need / 1e9)
    if not disk.fits:
        place = Path(output_dir).absolute()
        lacks = "%s has %.3g GB free, which is less: name another output_dir, or %s"
        log.warning(lacks, place, free / 1e9, disk.remedy)
    if model is None:
        assert storage is not None  # or check_options refuses
        RowLimits.of(text_config(verifier_config(verifier))).warn(log, "features", rows["seq_len"][:])
        counts = extract_from_server(
            server or HERE,
            rows,
            output_dir,
            storage,
            layers,
            concurrency=concurrency,
            dtype=dtype,
            rank=ranks.rank,
            world_size=ranks.world_size,
            patience=patience,
            shard_gb=shard_gb,
        )
    else:
        counts = extract_features(
            model,
            rows,
            output_dir,
            dtype=dtype,
            max_tokens=max_tokens,
            rank=ranks.rank,
            world_size=ranks.world_size,
            compute_dtype=dtype_of(model, compute_dtype),
            shard_gb=shard_gb,
        )
    if ranks.rank == 0:
        used = one_or_several(server or HERE) if served else None
        record = dict(source=source, server=used, dtype=dtype, max_length=max_length, max_samples=max_samples)
        origin = {"verifier": verifier, "data": data}
        write_provenance(output_dir, "features", record, origin, **counts, **_shares(ranks))
    return counts | dict(rows=len(rows), tokens=sum(rows["seq_len"]), output_dir=output_dir)


def vocab(
    data_dir: Path,  # prepared folder or feature folder
    draft_vocab_size: int,  # N, tokens that the drafter knows
    output_dir: Path | None = None,  # for d2t-N.npy, t2d-N.npy; default: beside rows, for train
    vocab_size: int | None = None,  # of the verifier; default: as the folder says
    overwrite: bool = False,  # replace another vocabulary of this size
) -> dict:  # draft_vocab_size, vocab_size, output_dir, covered: share of trained tokens known
    "Choose the tokens of a drafter: the most frequent ones of the training answers."
    check_options(locals(), "vocab")
    data_dir = Path(data_dir)
    prepared = load_prepared(data_dir / "rows" if (data_dir / "rows").is_dir() else data_dir)
    model = read_data_config(data_dir).get("model", {})
    vocab_size = vocab_size or model.get("vocab_size")
    if not vocab_size and model.get("target_model_path"):
        with named_by(data_dir):
            vocab_size = text_config(verifier_config(model["target_model_path"], False)).vocab_size
    place = Path(output_dir or prepared.folder)
    with one_writer(place):
        if vocab_size and not overwrite:
            chosen = vocab_mapping_from_frequencies(prepared.token_freq, draft_vocab_size, vocab_size)
            try:
                there = load_vocab_mapping(place, len(chosen[1]), len(chosen[0]))
                same = all(torch.equal(a.long(), b.long()) for a, b in zip(there, chosen))
            except FileNotFoundError:
                same = True
            except ValueError:  # a broken one, or another verifier's
                same = False
            if not same:
                raise FileExistsError(
                    f"{place}: holds another draft vocabulary of {draft_vocab_size} tokens; name "
                    "another output_dir, or pass overwrite=True"
                )
        t2d, d2t = prepared.add_vocab_mapping(draft_vocab_size, vocab_size, place)
        if output_dir is not None:
            write_provenance(
                output_dir, "vocab", dict(draft_vocab_size=draft_vocab_size, vocab_size=vocab_size), {"data": data_dir}
            )
    known = sum(n for t, n in prepared.token_freq.items() if t2d[t])
    return {
        "draft_vocab_size": draft_vocab_size,
        "vocab_size": len(t2d),
        "covered": known / max(1, sum(prepared.token_freq.values())),
        "output_dir": output_dir or prepared.folder,
    }
