"""Cells of work in processes with time limits, several side by side; one at a time may have the device to itself.

A worker process (process.py) gets a list of cells and answers in lines of JSON: {"began": name}, {"row": {...}},
{"ended": name}, {"turn": "ask"}, {"turn": "done"}. A cell that runs over its limit, or whose process dies, becomes a
row with an `error`; the cells after it go on in a new process. While one worker has its turn, the process groups of all
others are stopped (SIGSTOP), so that its clock measures it alone: they compile meanwhile, which takes most of the time.

A cell may say `gib`, the device memory that it takes (of the lists of cells that wait, the first begins whose memory is
free; one that was overtaken OVERTAKEN times is not overtaken again but by fillers), `needs`, the seconds without which
it is not begun, `limit`, the most seconds that it may take, and `filler`: at most FILLERS processes with such cells run
at once, so that they do not keep others waiting.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

COMMAND = (sys.executable, "-m", "benchmarks.gpu.process")
TURN_SECONDS = 25  # a turn that takes longer ends, and the others go on
LIMIT = 200.0  # seconds of a cell
OVERTAKEN, FILLERS = 3, 2


def gib(cells):
    return max((cell.get("gib", 0.0) for cell in cells), default=0.0)


class Worker:
    """One process, and the cells that it has still to do."""

    def __init__(self, cells, inbox, environment, command):
        self.given, self.cells, self.now, self.began, self.stopped = cells, list(cells), None, time.monotonic(), False
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [*command, json.dumps(cells)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=self.read, args=(inbox,), daemon=True).start()

    def read(self, inbox):
        for line in self.process.stdout:
            inbox.put((self, json.loads(line)))
        inbox.put((self, {"died": self.process.wait()}))

    def signal(self, number):
        """To the process and all that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def stop(self, stopped):
        if stopped != self.stopped:
            self.signal(signal.SIGSTOP if stopped else signal.SIGCONT)
            self.stopped = stopped

    def kill(self):
        self.signal(signal.SIGKILL)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass  # it is inside of the device's driver; the others go on

    def said(self):
        """What it wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read()


class Pool:
    """Run jobs (lists of cells, each for one process).

    `on_row(row)` is called for every result; `log` (a file) gets what the processes write to stderr. After `seconds`
    everything ends; `memory` is the device's, in GiB."""

    def __init__(self, jobs, on_row, log, environment, workers=1, seconds=120.0, memory=float("inf"), command=COMMAND):
        self.waiting, self.running, self.asking, self.turn = [list(job) for job in jobs], [], [], None
        self.on_row, self.log, self.environment, self.command = on_row, log, environment, command
        self.workers, self.memory, self.deadline = workers, memory, time.monotonic() + seconds
        self.inbox, self.left, self.turn_began = queue.Queue(), [], 0.0

    def run(self):
        """Until all is done or the time is up; returns the cells that were not finished."""
        try:
            while self.waiting or self.running:
                if time.monotonic() > self.deadline:
                    break
                self.start_some()
                self.receive()
                self.give_turn()
                self.watch_limits()
            return self.left + [c for job in [*(w.cells for w in self.running), *self.waiting] for c in job]
        finally:
            for worker in self.running:
                worker.kill()
                self.keep_log(worker)

    def start_some(self):
        while not self.turn and len(self.running) < self.workers and (job := self.next_job()):
            ends = time.time() + self.deadline - time.monotonic()
            self.running.append(
                Worker([cell | dict(ends=ends) for cell in job], self.inbox, self.environment, self.command)
            )

    def next_job(self):
        """The first that may begin now, or None. Cells without enough time are left out."""
        running = [worker.cells for worker in self.running]
        free = self.memory - sum(map(gib, running))
        fillers = sum(any(cell.get("filler") for cell in cells) for cells in running)
        passed = []  # what is more important and has no memory
        for job in list(self.waiting):
            late = [cell for cell in job if cell.get("needs", 0.0) > self.deadline - time.monotonic()]
            self.left += late
            job[:] = [cell for cell in job if cell not in late]
            if not job:
                self.waiting.remove(job)
                continue
            filler = job[0].get("filler")
            may = fillers < FILLERS if filler else all(each[0].get("overtaken", 0) < OVERTAKEN for each in passed)
            if not running or (may and gib(job) <= free):
                self.waiting.remove(job)
                for each in [] if filler else passed:
                    each[0]["overtaken"] = each[0].get("overtaken", 0) + 1
                return job
            if not filler:
                passed.append(job)
        return None

    def receive(self):
        try:
            worker, said = self.inbox.get(timeout=0.05)
        except queue.Empty:
            return
        if worker not in self.running:
            return  # its last words after it was killed
        if "began" in said:
            worker.now, worker.began = worker.cells[0], time.monotonic()
        elif "row" in said:
            self.row(worker, said["row"])
        elif "ended" in said:
            worker.now, worker.began = None, time.monotonic()
            worker.cells.pop(0)
        elif said.get("turn") == "ask":
            self.asking.append(worker)
        elif said.get("turn") == "done":
            self.end_turn(worker)
        elif "died" in said:
            self.gone(worker, None if said["died"] == 0 else f"{died(said['died'])}: {last_line(worker.said())}")

    def row(self, worker, row):
        cell = worker.now
        crowded = row.get("kind") == "memory" and len(self.running) > 1 and cell.get("gib") != self.memory
        if crowded and "variant" not in row:
            self.waiting.insert(0, [cell | dict(gib=self.memory)])  # once more, with nothing beside it
        elif row.get("left_out"):
            self.left.append(cell | dict(name=f"{cell['name']}: {row['variant']}"))
        else:
            self.on_row({"cell": cell["name"], **row})

    def give_turn(self):
        if self.turn and time.monotonic() - self.turn_began > TURN_SECONDS:
            self.end_turn(self.turn)
        self.asking = [worker for worker in self.asking if worker in self.running]
        if not self.turn and self.asking:
            self.turn, self.turn_began = self.asking.pop(0), time.monotonic()
            for other in self.running:
                if other is not self.turn:
                    other.stop(True)
            self.turn.process.stdin.write("go\n")
            self.turn.process.stdin.flush()

    def end_turn(self, worker):
        if worker is not self.turn:
            return
        took, self.turn = time.monotonic() - self.turn_began, None
        for other in self.running:
            if other.stopped:
                other.stop(False)
                other.began += took  # its own clock stood still

    def watch_limits(self):
        for worker in list(self.running):
            limit = worker.cells[0].get("limit", LIMIT) if worker.cells else LIMIT
            if not worker.stopped and time.monotonic() - worker.began > limit:
                worker.kill()
                self.gone(worker, f"killed after {limit:.0f} s")

    def gone(self, worker, why):
        """A process has ended: an unfinished cell becomes a row, the cells after it go to a new process."""
        self.end_turn(worker)
        self.running.remove(worker)
        self.keep_log(worker)
        if why and worker.cells:
            self.on_row({"cell": worker.cells[0]["name"], **worker.cells[0].get("labels", {}), "error": why})
            worker.cells.pop(0)
        if worker.cells:
            self.waiting.insert(0, worker.cells)

    def keep_log(self, worker):
        self.log.write(f"== {', '.join(cell['name'] for cell in worker.given)}\n{worker.said()}\n")
        self.log.flush()


def died(code):
    """What an exit code says."""
    return (
        f"the process ended with code {code}" if code > 0 else f"the process was ended by {signal.Signals(-code).name}"
    )


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "it wrote nothing to stderr"
