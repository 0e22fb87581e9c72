"""Extraction of hidden states with one running vLLM or several.
They go to a folder, resumed after any interruption, or online into training."""

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ..core.concurrency import Breaker, concurrently
from ..core.files import DiskError
from ..core.http_client import EndpointError
from ..core.options import check_options
from ..data.images import picture_inside
from ..data.messages import as_json, map_parts, parts_of, tools_of
from ..data.prepared_folder import config_of
from ..jobs.ranks import shard
from ..jobs.servers import addresses_of
from ..jobs.shared_output import share_writer
from .extraction import open_states
from .feature_folder import FeatureFolder, disk_error, origin, split_of, table_of
from .feature_rows import FeatureError, FeatureRow, FeatureRows

log = logging.getLogger(__name__)


def _chat(table, kwargs, i):
    row: Any = {} if table is None else table[i]
    messages: Any = as_json(row.get("messages"), "messages")
    if all(part.get("type") == "text" for part in parts_of(messages)):
        return None
    chat = {"messages": map_parts(messages, picture_inside)}
    if kwargs:
        chat["chat_template_kwargs"] = kwargs
    if tools := tools_of(row):
        chat |= {"tools": tools, "tool_choice": "none"}  # they are read, and none need be called
    return chat


def chat_request(rows: Dataset) -> Callable[[int], dict | None]:
    """Row of a prepared table -> what a request holds that renders it, with the pictures inside; None: it has no
    pictures. Text is sent as token ids, which were cut to length; only a row with pictures is sent as messages. What is
    no picture is not sent: a prepared table may be of unknown origin, and could name any file of this machine. A
    process that loads rows may be sent the function."""
    columns = [name for name in ("messages", "tools", "functions") if name in rows.column_names]
    table = rows.select_columns(columns).with_format(None) if "messages" in columns else None
    return partial(_chat, table, config_of(rows).get("origin", {}).get("template_kwargs"))


def _request_missing(folder, request, concurrency, breaker) -> int:
    """Request the missing rows, the longest first; how many failed, each of which is named. The first goes alone: a
    server with wrong options is refused before much is asked of it."""
    failed = 0
    longest_first = sorted(folder.todo, key=lambda i: -folder.lengths[i])
    with folder, folder.progress() as bar:
        for rows, n in ((longest_first[:1], 1), (longest_first[1:], concurrency)):
            for i, result in concurrently(request, rows, n):
                if isinstance(result, Exception) and not isinstance(result, (FeatureError, EndpointError)):
                    raise result
                if not breaker.see(result):
                    log.warning("row %d: %s", i, result)
                    failed += 1
                bar.update(folder.lengths[i])
    return failed


def extract_from_server(
    url: str | Iterable[str],  # of a vLLM started with `extraction_options`; or of several
    rows: Dataset | str | Path,  # a prepared table, or its folder
    output_dir: str | Path,  # gets data_config.json, rows/, and files or shards
    storage: str | os.PathLike | Iterable,  # its folder or mooncake://…; one, or one for each
    layer_ids: list[int] | None = None,  # slots, last included; None: server connector's
    concurrency: int = 8,  # requests in flight
    dtype: torch.dtype | str = torch.bfloat16,  # of the stored states
    rank: int = 0,  # of this process, which makes every `world_size`-th row
    world_size: int = 1,  # processes that share the rows
    max_failures: int = 20,  # in a row, then the job stops
    model: str | None = None,  # served name; None: the only one
    timeout: float = 600.0,  # seconds that one answer may take
    tries: int = 8,  # requests for one answer, with back-off
    patience: float = 120.0,  # of several servers: seconds to wait while none answers
    shard_gb: float | None = None,  # GB of a file of many rows; None: a file for each row
) -> dict[str, int]:  # counts of this share: written, kept, failed
    """Write the features of rows that have no valid file. ValueError: another origin;
    TooManyFailures, NoServerLeft: servers down; DiskError: the rest is kept; BlockingIOError:
    another process makes this share."""
    check_options(dict(concurrency=concurrency, rank=rank, world_size=world_size, shard_gb=shard_gb))
    check_options(dict(max_failures=max_failures, timeout=timeout, patience=patience))
    dataset, output_dir = table_of(rows), Path(output_dir).expanduser()
    client = open_states(url, storage, layer_ids, model, timeout, tries, patience)
    config = origin(client.about(), client.layer_ids, dataset, dtype)
    share = [*shard(len(dataset), rank, world_size)]
    chat_of, hidden_size = chat_request(dataset), 0

    def request(i):
        nonlocal hidden_size
        states = client.states(folder.tokens[i], chat_of(i))
        hidden_size = states.shape[-1]
        folder.write(i, states)

    with share_writer(output_dir, output_dir / ".writer", rank, world_size):
        folder = FeatureFolder(output_dir, dataset, config, share, world_size == 1, shard_gb)
        try:
            failed = _request_missing(folder, request, concurrency, Breaker(max_failures))
            kept = len(share) - len(folder.todo)
            return {"written": len(folder.todo) - failed, "kept": kept, "failed": failed}
        except DiskError as e:
            raise disk_error(folder, e, hidden_size) from e


class ServerFeatures(FeatureRows):
    "Samples whose states running vLLMs compute when they are read; nothing stays on disk."

    def __init__(
        self,
        url: str | Iterable[str],  # of a vLLM started with `extraction_options`; or several
        rows: Dataset | str | Path,  # a prepared table, or its folder
        storage: str | os.PathLike | Iterable,  # folder or mooncake://…; one, or one for each
        layer_ids: list[int] | None = None,  # slots, last included; None: server connector's
        layers: list[int] | None = None,  # for `hidden_states`; None: all sent but the last
        on_bad: str = "raise",  # "raise": FeatureError; "skip": not trained, named and counted
        concurrency: int = 8,  # requests in flight, in each rank
        dtype: torch.dtype = torch.bfloat16,  # of the features
        max_failures: int = 20,  # in a row, then training stops even with "skip"
        ahead: int = 4,  # packed rows that a trainer has requested before it needs them
        **server,  # model, timeout, tries, patience: of `open_states`
    ):
        self.rows = table_of(rows).with_format("torch")
        self.chat_of = chat_request(self.rows)
        self.client = open_states(url, storage, layer_ids, **server)
        self.concurrency, self.ahead = concurrency, ahead
        self.dtype = dtype
        self.breaker = Breaker(max_failures)
        self.where = f"the server {', '.join(addresses_of(url))!r}"
        super().__init__([int(n) for n in self.rows["seq_len"][:]], self.client.layer_ids, layers, on_bad)
        # the shortest row is requested now: a server with wrong options is an error here
        shortest = min(range(len(self)), key=self.lengths.__getitem__)
        self.shape = tuple(self._states(shortest).shape[1:])
        self.split = split_of(self.rows).get("split")
        self.made_by = self.client.about()

    def _states(self, i):
        return self.client.states(self.rows[i]["input_ids"], self.chat_of(i)).to(self.dtype)

    def read(self, i: int) -> FeatureRow:
        try:
            states = self._states(i)
        except (FeatureError, EndpointError) as e:
            self.breaker.see(e)
            raise e if isinstance(e, FeatureError) else FeatureError(f"row {i}", str(e)) from e
        self.breaker.see(states)
        row = self.rows[i]
        return FeatureRow(row["input_ids"].long(), row["loss_mask"].bool(), states)

    def __getitems__(self, indices: list[int]) -> list[dict]:
        samples = {}
        n = min(self.concurrency, len(indices))
        for i, result in concurrently(self.__getitem__, dict.fromkeys(indices), n):
            if isinstance(result, BaseException):
                raise result
            samples[i] = result
        return [samples[i] for i in indices]
