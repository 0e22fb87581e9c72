"""From conversations to a training set, with a report of everything that was left out.
The steps: deduplication, chat template, loss masks, length limits, shuffle, validation split."""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from tqdm.auto import tqdm

from ..core.files import atomic_folder, disk_errors, read_errors, write_object
from ..core.options import check_options
from ..core.provenance import provenance
from .chat_encoding import count_trained
from .chat_template import ChatTemplate, fingerprint_template
from .images import load_processor
from .messages import brief
from .pipeline import Encoder, Located, Result, Settings, run_pipeline
from .prepared_folder import Prepared, changes, load_prepared
from .sources import HELD_OUT, content_hash, files_of, hub_name, located, table_files
from ..nn.target_head import verifier_config
from ..verifier.folders import origin_of
from ..verifier.row_limits import RowLimits


log = logging.getLogger(__name__)


def fingerprint_data(data) -> tuple[str, Any]:
    """Hash a source of `located`, 16 hex digits: the bytes of its files, or the messages of its conversations, which
    are kept in memory; and the data, which can be read (again)."""
    h = hashlib.sha256()
    sources = data if isinstance(data, (list, tuple)) else [data]
    if all(isinstance(d, (str, Path)) and not hub_name(d) for d in sources):
        for file in chain.from_iterable(files_of(d) or () for d in sources):
            with read_errors(file), open(file, "rb") as f:
                h.update(hashlib.file_digest(f, "sha256").digest())
    else:
        data = Located(located(data))
        for _, row in data:
            try:
                content = content_hash(row)
            except Exception:
                content = brief(row)  # it cannot be read
            h.update(content.encode("utf-8", "surrogatepass"))
    return h.hexdigest()[:16], data


def _pictures(paths, folder, image_folder, allow_urls):
    "Where `resolve_images` looks for pictures, and where it stores them."
    root = next((path for path in (Path(name).expanduser() for name in paths) if path.exists()), Path("."))
    return {
        "folder": image_folder or (root.parent if root.is_file() else root),
        "store": folder.with_name(f"{folder.name}-images"),
        "allow_urls": allow_urls,
    }


def write_table(folder: Path, result: Result, fingerprint: str) -> dict[int, int]:
    """Write rows into an empty folder as `Dataset.save_to_disk` writes a table, with a part of them in memory at a
    time; the fingerprint names them in the caches of `datasets`. Returns token id -> trained occurrences, ascending
    ids."""
    features = result.rows.features
    empty = pa.table([pa.nulls(1, t) for t in features.arrow_schema.types], features.arrow_schema)
    # state.json and dataset_info.json, and a file of one row for that which follows
    Dataset(empty, fingerprint=fingerprint).with_format("torch").save_to_disk(folder)
    (name,) = table_files(folder)
    bar = tqdm(total=len(result.lengths), desc="write", unit="row", leave=False, delay=1)

    def written(writer):
        for table in result.rows.tables(result.order):
            writer.write_table(table)
            yield table
            bar.update(len(table))

    with bar, ArrowWriter(features=features, path=str(folder / name)) as writer:
        counts = count_trained(written(writer))
        writer.finalize()
    return counts


def _write(folder, result: Result, config, tokenizer):
    "Everything at once, or nothing. Temporary folders of runs that were killed are removed."
    place = folder.absolute()
    left = re.compile(rf"\.{re.escape(place.stem)}\.[0-9a-f]{{8}}{re.escape(place.suffix)}")
    for path in place.parent.glob(f".{place.stem}.*"):
        if left.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path)
    fingerprint = hashlib.sha256(json.dumps(config["origin"]).encode()).hexdigest()[:16]
    with atomic_folder(folder) as tmp:
        freq = write_table(tmp, result, fingerprint)
        with open(tmp / "sample_lengths.json", "w", encoding="utf-8") as file:
            for i, n in enumerate(result.lengths):
                file.write(f'{", " if i else "{"}"{i}": {n}')
            file.write("}")
        if result.held_out:
            with open(tmp / HELD_OUT, "w", encoding="utf-8", errors="backslashreplace") as file:
                for row in result.questions():
                    if "prompt" in row:
                        row["text"] = tokenizer.decode(row["prompt"])  # for a reader
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        (tmp / "token_freq.json").write_text(json.dumps(freq), encoding="utf-8")
        torch.save(freq, tmp / "token_freq.pt")  # numbers; for the upstream library
        write_object(tmp / "data_config.json", config)


def _make(folder, data, paths, encoder, verifier, vocab_size, origin, num_proc):
    "Make the folder: of data, which has these paths, for the verifier of this path, if it has one."
    template, settings = encoder.template, encoder.settings
    with tempfile.TemporaryFile(dir=folder.absolute().parent) as file:
        result = run_pipeline(data, encoder, num_proc, file=file)
        if result.counts.lines("control_tokens"):
            log.warning("prepare: %s", result.counts.spelled())
        for excess in result.beyond:
            log.warning("prepare: %s. %s", excess.text(first=result.first_beyond), excess.remedy)
        if not result.rows.pictures:  # how they would be read is in no row
            origin = {name: value for name, value in origin.items() if name != "image_processor"}
        name = str(verifier or template.name)
        record = provenance(
            "prepare_data",
            {
                "data": paths or f"{result.counts.n['read']} conversations in memory",
                "verifier": name,
                "output_dir": str(folder),
                **settings._asdict(),
            },
            {f"data {i}" if i else "data": path for i, path in enumerate(paths)} | {"verifier": verifier},
        )
        config = {  # with the fields of the upstream library
            "model": {"target_model_path": name, "vocab_size": vocab_size},
            "data": {
                "num_samples": len(result.lengths),
                "num_tokens": int(result.lengths.sum()),
                "seq_length": settings.max_length,
                "seed": settings.seed,
            },
            "split": result.split,
            "origin": origin,
            "report": result.counts.report(len(result.order), result.beyond),
            "format": {"schema": {"input_ids": ["seq"], "loss_mask": ["seq"], "seq_len": []}},
        }
        _write(folder, result, {"version": "3.0"} | record | config, template.tokenizer)


BEFORE = {  # what origins do not say that were recorded before there was a choice
    "train_reasoning": True,
    "train_tool_calls": True,
    "image_folder": None,
    "allow_urls": False,
}


def prepare_data(
    data: str | Path | Iterable,  # conversations: a path, hf:<id>, a name: gsm8k; or themselves
    verifier,  # folder or hub id of the verifier; or its tokenizer or processor
    output_dir: str | Path,  # the folder to make
    max_length: int = 2048,  # tokens in a row
    max_samples: int | None = None,  # so many conversations, a random sample; None: all
    rows: str = "conversation",  # or "turn": a row per assistant turn, only that turn trained
    too_long: str = "cut",  # or "drop": what happens to a row that is longer
    min_trained: int = 1,  # trained tokens that a row must have
    dedup: bool = True,  # drop conversations with the same messages as another
    shuffle: bool = True,  # False: keep the order of conversations, max_samples takes the first
    val_fraction: float = 0.05,  # share of the conversations that are held out of training
    seed: int = 0,  # of the sample and the order
    draft_vocab_size: int | None = None,  # also choose a draft vocabulary of this size
    template_kwargs: dict | None = None,  # for the template, e.g. {"enable_thinking": False}
    train_reasoning: bool = True,  # train what answers think before they answer
    train_tool_calls: bool = True,  # train the calls of tools in answers
    image_folder: str | Path | None = None,  # root of picture paths; None: the data's folder
    allow_urls: bool = False,  # fetch pictures from the network
    num_proc: int | None = None,  # processes; None: as many as there are processors, up to 8
    overwrite: bool = False,  # replace a prepared folder that was made from something else
    trust_remote_code: bool = False,  # run code that comes with the verifier's tokenizer
) -> Prepared:  # the folder, open; displays its report
    """Tokenise, mask, filter, shuffle, split and store conversations. What held-out ones ask is
    in `heldout.jsonl`, which `evaluate` reads. The same call again does nothing. Pictures that
    come as bytes or from the network go to `{output_dir}-images`. Conversations that cannot be
    used are counted in the report, with file and line of the first. ValueError: a setting, a
    file that is not what it claims to be (by file and line), a folder that was made from
    something else, or nothing left. OSError: the disk is full, or may not be written, with the
    path."""
    settings = Settings(
        max_length=max_length,
        max_samples=max_samples,
        rows=rows,
        too_long=too_long,
        min_trained=min_trained,
        dedup=dedup,
        shuffle=shuffle,
        val_fraction=val_fraction,
        seed=seed,
        template_kwargs=template_kwargs or {},
        train_reasoning=train_reasoning,
        train_tool_calls=train_tool_calls,
    )
    other = {"draft_vocab_size": draft_vocab_size, "num_proc": num_proc}
    check_options(settings._asdict() | other | {"output_dir": output_dir}, "prepare")
    if val_fraction and not dedup:
        log.warning(
            "dedup=False with val_fraction=%g: equal conversations may be on both sides, and "
            "what is measured on them was trained; leave dedup on",
            val_fraction,
        )
    path, config, owner = None, None, verifier
    if isinstance(verifier, (str, Path)):
        path, config = verifier, verifier_config(verifier, trust_remote_code)
        owner = load_processor(verifier, trust_remote_code)
    template = ChatTemplate(owner, **settings.template_kwargs)
    vocab_size = config.get_text_config().vocab_size if config else None
    data_hash, readable = fingerprint_data(data)
    if image_folder is not None:
        image_folder = str(Path(image_folder).expanduser().absolute())
    origin = {"data": data_hash, "tokenizer": fingerprint_template(template)} | settings._asdict()
    pictures = getattr(owner, "image_processor", None)  # how many tokens has one of some size?
    pictures = pictures and json.dumps(pictures.to_dict(), sort_keys=True, default=str)
    pictures = pictures and hashlib.sha256(pictures.encode()).hexdigest()[:16]
    origin |= {"image_folder": image_folder, "allow_urls": allow_urls, "image_processor": pictures}
    folder = Path(output_dir).expanduser()  # as `datasets` where it writes the table
    sources = data if isinstance(data, (list, tuple)) else [data]
    paths = [str(d) for d in sources if isinstance(d, (str, Path))]
    place = folder.absolute()
    encoder = Encoder(
        template,
        settings,
        vocab_size or len(template.tokenizer),
        _pictures(paths, place, image_folder, allow_urls),
        RowLimits.of(config) if config else RowLimits(),
    )
    if num_proc is None:
        num_proc = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_proc = min(num_proc, 8)
    with disk_errors(folder):
        place.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder), FileLock(place.with_name(f".{place.name}.lock")):
        old = origin_of(folder)
        changed = old and changes(BEFORE | {"image_processor": pictures} | old, origin)
        if changed and not overwrite:
            raise ValueError(
                f"output_dir {str(folder)!r} was prepared from something else: "
                f"{'; '.join(changed)}. Choose a new folder, or pass overwrite=True."
            )
        if old is None or changed:
            _make(folder, readable, paths, encoder, path, vocab_size, origin, num_proc)
        prepared = load_prepared(folder)
    if draft_vocab_size:
        prepared.add_vocab_mapping(draft_vocab_size, vocab_size)
    return prepared
