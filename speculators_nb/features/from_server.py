"""Extraction of hidden states with one running vLLM or several.
They go to a folder, resumed after any interruption, or online into training."""

import base64
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ..core.concurrency import Breaker, concurrently
from ..core.files import DiskError
from ..core.http_client import EndpointError
from ..data.images import FORMATS, open_picture, picture_file
from ..jobs.servers import addresses_of
from .extraction import HiddenStatesClient, HiddenStatesPool, MemoryLimit, open_states
from .feature_folder import FeatureFolder, disk_error, origin, shard, split_of, table_of
from .feature_rows import FeatureError, FeatureRow, FeatureRows
from .in_process import feature_job

log = logging.getLogger(__name__)


def _inline(part):
    """A picture in a file becomes a data: address. What is no picture is not sent: a prepared
    table may be of unknown origin, and could name any file of this machine."""
    path = picture_file(part)
    if path is None:
        return part
    with open_picture(path, str(path)) as picture:
        kind = picture.format.lower() if picture.format in FORMATS else "jpeg"
    data = base64.b64encode(path.read_bytes()).decode()
    return part | {"image_url": {"url": f"data:image/{kind};base64,{data}"}}


def more_than_text(
    row: dict,  # of a prepared table
) -> list | None:  # its messages with the pictures inside; None: it has no pictures
    """Text is sent as token ids, which were cut to length; only a row with pictures is sent as
    messages. The server may not be able to read a picture's file, so its bytes are sent."""
    messages = row.get("messages")
    messages = json.loads(messages) if isinstance(messages, str) else messages
    parts = [m["content"] for m in messages or () if isinstance(m.get("content"), list)]
    if all(p.get("type") == "text" for content in parts for p in content):
        return None
    return [
        m | {"content": [_inline(p) for p in m["content"]]} if isinstance(m["content"], list) else m
        for m in messages or ()
    ]


class RowWriter:
    "Requests the states of one row, and writes them into a folder."

    def __init__(
        self,
        client: HiddenStatesClient | HiddenStatesPool,  # of the servers
        folder: FeatureFolder,  # gets the files
        dataset: Dataset,  # the rows
        max_bytes: int | None,  # states in flight; None: no bound
    ):
        self.client = client
        self.folder = folder
        self.limit = MemoryLimit(max_bytes)
        self.table = dataset.with_format(None)
        self.with_messages = "messages" in dataset.column_names
        self.token_bytes = self.hidden_size = 0  # known after the first row

    def __call__(
        self,
        i: int,  # row
    ) -> None:
        "Nothing, where it is there. Errors: FeatureError, EndpointError, DiskError."
        folder = self.folder
        if folder.has(i):  # by a process that was killed before it could settle it
            folder.stored.add(i)
            return
        with self.limit.reserve(folder.lengths[i] * self.token_bytes):
            messages = more_than_text(self.table[i]) if self.with_messages else None
            states = self.client.states(folder.tokens[i], messages)
            self.token_bytes = states[0].numel() * states.element_size()
            self.hidden_size = states.shape[-1]
            folder.write(i, states)


class _ServerExtraction:
    "Requests the rows of a folder until the job is done: claimed, requested, settled."

    def __init__(self, job, folder, writer, breaker):
        self.job, self.folder, self.writer, self.breaker = job, folder, writer, breaker
        self.start = job.agree(dict(rows=len(folder.todo)))  # what the first process found
        longest_first = sorted(folder.todo, key=lambda i: -folder.lengths[i])
        self.bar = folder.progress()
        self.units = job.units(longest_first, self.show)
        self.shown = 0  # rows of `settled` in the bar
        self.hand: set[int] = set()  # rows that were answered, and are in an open shard

    def show(self):
        "Bring the bar up to date: all rows of the job."
        settled = list(self.job.settled)[self.shown :]
        self.shown += len(settled)
        self.bar.update(sum(self.folder.lengths[i] for i in settled))

    def claimed(self, most=None):
        "Rows to request now, at most so many; ends where it is time to wait for others."
        for unit in self.units:
            if unit is None:
                self.waits = True
                return
            yield unit
            if most is not None and (most := most - 1) < 1:
                return

    def settle(self):
        "Settle what is whole on the disk."
        whole = self.hand & self.folder.stored  # once: threads add to it meanwhile
        for i in whole:
            self.job.settle(i)
        self.hand -= whole
        self.show()

    def request(self, rows, concurrency):
        "Request rows, as they are claimed; those that fail are named and counted."
        for i, result in concurrently(self.writer, rows, concurrency):
            of_row = isinstance(result, (FeatureError, EndpointError))
            if isinstance(result, Exception) and not of_row:
                raise result
            if self.breaker.see(result):
                self.hand.add(i)
            else:
                log.warning("row %d: %s", i, result)
                self.job.settle(i, 0)
            self.settle()

    def write(self, concurrency):
        "Do what others do not, until all is settled. The first row goes alone."
        most, n = 1, 1
        with self.folder, self.bar:
            while True:
                self.waits, before = False, len(self.job.settled)
                self.folder.shards.refresh()  # perhaps a former holder was killed
                self.request(self.claimed(most), n)
                most, n = None, concurrency
                if self.waits:
                    self.folder.close()
                    self.settle()
                elif before == len(self.job.settled):
                    return

    def complete(self, then):
        "Counts of the whole job, which `then` gets; rows that are gone although they are settled are made again."
        self.folder.shards.refresh()
        failed = {i for i, rows in self.job.settled.items() if not rows}
        mine = self.folder.stored | failed
        with self.folder:
            for i in self.folder.todo:
                if i not in mine:
                    self.writer(i)
        self.folder.remove_unfinished()  # of processes that were killed
        written = self.start["rows"] - len(failed)
        kept = len(self.folder.wanted) - self.start["rows"]
        counts = {"written": written, "kept": kept, "failed": len(failed)}
        if then:
            then(counts)
        return counts


def extract_from_server(
    url: str | Iterable[str],  # of a vLLM started with `extraction_options`; or of several
    rows: Dataset | str | Path,  # a prepared table, or its folder
    output_dir: str | Path,  # gets data_config.json, rows/, and files or shards
    storage: str | os.PathLike | Iterable,  # its folder or mooncake://…; one, or one for each
    layer_ids: list[int] | None = None,  # slots, last included; None: server connector's
    concurrency: int = 8,  # requests in flight
    dtype: torch.dtype | str = torch.bfloat16,  # of the stored states
    rank: int = 0,  # which rows, where `world_size` processes have a fixed share each
    world_size: int = 1,  # 1: all processes that work in the folder share its rows
    max_bytes: int | None = None,  # states in flight (folder, memory); None: only `concurrency`
    max_failures: int = 20,  # in a row, then the job stops
    model: str | None = None,  # served name; None: the only one
    timeout: float = 600.0,  # seconds that one answer may take
    tries: int = 8,  # requests for one answer, with back-off
    patience: float = 120.0,  # of several servers: seconds to wait while none answers
    shard_gb: float | None = None,  # GB of a file of many rows; None: a file for each row
    then: Callable[[dict], Any] | None = None,  # gets the counts, once, when all is done
) -> dict[str, int]:  # counts of the whole job: written, kept, failed
    """Write the features of rows that have no valid file. ValueError: another origin;
    TooManyFailures, NoServerLeft: servers down; DiskError: the rest is kept; BlockingIOError:
    another process fills the folder otherwise."""
    dataset, output_dir = table_of(rows), Path(output_dir).expanduser()
    client = open_states(url, storage, layer_ids, model, timeout, tries, patience)
    config = origin(client.about(), client.layer_ids, dataset, dtype)
    share = [*shard(len(dataset), rank, world_size)]
    with feature_job(output_dir, config, share, shard_gb=shard_gb) as job:
        folder = FeatureFolder(output_dir, dataset, config, share, job.is_primary, shard_gb)
        writer = RowWriter(client, folder, dataset, max_bytes)
        try:
            extraction = _ServerExtraction(job, folder, writer, Breaker(max_failures))
            extraction.write(concurrency)
            return job.finish(lambda: extraction.complete(then))
        except DiskError as e:
            raise disk_error(folder, e, writer.hidden_size) from e


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
        self.table = table_of(rows).with_format(None)
        self.rows = self.table.with_format("torch")
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
        row = self.table[i]
        return self.client.states(row["input_ids"], more_than_text(row)).to(self.dtype)

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
