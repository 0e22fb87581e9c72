"A process of a test, forked from it: what it needs is imported already, and it can be killed."

import multiprocessing
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


def work(function, args, kwargs):
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
