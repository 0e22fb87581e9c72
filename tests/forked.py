"""A process of a test, forked from it: what it needs is imported already, and it can be killed.

It computes on the CPU. After a fork CUDA cannot be used where the parent has used it, or only asked for it ("Cannot
re-initialize CUDA in forked subprocess"), and to spawn instead, functions would have to be pickled; tests give
closures."""

import multiprocessing
import os
import threading
import traceback

import torch
from tqdm.auto import tqdm

FORK = multiprocessing.get_context("fork")


def begin(function, *args, **kwargs):
    "The started process, which ends with the test's."
    process = FORK.Process(target=work, args=(function, args, kwargs), daemon=True)
    process.start()
    return process


def without_cuda():
    """For a process that was forked: it sees no device of CUDA, and none do that it starts. torch remembers their
    number from before the fork, so the variable alone would come too late."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0


def work(function, args, kwargs):
    without_cuda()
    tqdm.set_lock(threading.RLock())  # the one that is inherited is the parent's too, and a kill would leave it locked
    torch.set_num_threads(1)  # threads do not survive a fork
    function(*args, **kwargs)


def ask(function):
    "Begin; what is returned waits for the function's result, and fails with its error."
    told = FORK.Queue()

    def tell():
        try:
            told.put((function(), None))
        except BaseException:
            told.put((None, traceback.format_exc()))

    FORK.Process(target=work, args=(tell, (), {})).start()  # no daemon: it may start processes itself

    def answer(seconds=300):
        result, error = told.get(timeout=seconds)
        assert error is None, error
        return result

    return answer
