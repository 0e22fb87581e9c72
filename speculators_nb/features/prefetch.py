"""Prefetch for training on features that are computed while it runs.
A bounded number of packed rows is requested ahead, each row once, and a slow trainer holds the requests back."""

import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from .feature_rows import sample_of


def _work(tasks):
    while (task := tasks.get()) is not None:
        future, dataset, i = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(dataset[i])
            except BaseException as e:
                future.set_exception(e)
        del task, future, dataset  # a sample is the trainer's alone


def _end(tasks, threads):
    for _ in range(threads):
        tasks.put(None)


class PrefetchedRows(torch.utils.data.Dataset):
    """Samples of packed rows, requested before the loader asks for them: `ahead` rows, and samples in so many threads,
    in flight."""

    def __init__(self, dataset: Any, ahead: int, threads: int):
        if ahead < 1 or threads < 1:
            raise ValueError(f"ahead={ahead}, threads={threads}: both must be 1 or more")
        self.dataset = dataset
        self.ahead = ahead
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=_work, args=[self.tasks], daemon=True).start()
        weakref.finalize(self, _end, self.tasks, threads)
        self.sampler: Iterable[list[int]] = ()  # of the loader: yields the same rows each time it is read
        self.order = iter(self.sampler)  # rows that are not requested yet
        self.rows: deque[tuple[list[int], list[Future]]] = deque()  # that are

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[i]

    def __getitems__(self, indices: list[int]) -> list:
        if not self.rows or self.rows[0][0] != indices:
            self._begin(indices)
        _, futures = self.rows.popleft()
        self._fill()
        try:
            return [future.result() for future in futures]
        except BaseException:
            self._cancel()
            raise

    def _request(self, indices):
        "Request the samples of a packed row, after those that were requested before."
        futures = [Future() for _ in indices]
        for future, i in zip(futures, indices):
            self.tasks.put((future, self.dataset, i))
        return futures

    def _begin(self, indices):
        "Read the order up to this row."
        self._cancel()
        rest = itertools.dropwhile(lambda row: list(row) != indices, self.sampler)
        self.order = itertools.islice(rest, 1, None)
        self.rows.append((indices, self._request(indices)))

    def _fill(self):
        for row in itertools.islice(self.order, self.ahead - len(self.rows)):
            self.rows.append((list(row), self._request(row)))

    def _cancel(self):
        for _, futures in self.rows:
            for future in futures:
                future.cancel()
        self.rows.clear()


def source_of(dataset: Any) -> Any:
    "The source of features that a dataset, perhaps a `Subset`, reads from."
    return source_of(dataset.dataset) if isinstance(dataset, Subset) else dataset


def prefetched(dataset: Any) -> Any:
    "A dataset of samples, with rows requested ahead where its source computes them."
    source = source_of(dataset)
    ahead = getattr(source, "ahead", 0)
    return PrefetchedRows(dataset, ahead, source.concurrency) if ahead else dataset


def follow_order(loader: DataLoader) -> DataLoader:
    "The loader; if its dataset is `prefetched`, it knows its order now."
    order: Any = loader.batch_sampler
    if isinstance(loader.dataset, PrefetchedRows):
        loader.dataset.sampler = order
    return loader


def without_states(dataset: Any, i: int) -> dict[str, torch.Tensor]:
    "Sample i, as from `sample_of`; where its source would have to compute it, with states of no channels."
    return tokens_of(dataset, i) if getattr(source_of(dataset), "ahead", 0) else dataset[i]


def tokens_of(dataset: Any, i: int) -> dict[str, torch.Tensor]:
    "Sample i, as from `sample_of`, with states of no channels where its source has a table of tokens."
    if isinstance(dataset, Subset):
        return tokens_of(dataset.dataset, dataset.indices[i])
    if getattr(dataset, "rows", None) is None:
        return dataset[i]
    ids, mask = dataset.tokens(i)
    return sample_of(ids.long(), mask.bool(), torch.empty(len(ids), 2, 0))
