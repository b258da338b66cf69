"""Runs the items of benchmarks/gpu.py in processes that can crash, hang or lose the GPU."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from report import Row

from gpu_steps import steps as gpu_steps
from gpu_steps.steps import MESSAGE, Item, Options


def failure(error: str, message: str, trace: str = "") -> Row:
    return {"error": error, "message": message[-MESSAGE:], "trace": trace[-MESSAGE:]}


def work(
    options: Options, step: str, indices: list[int], connection: Connection, asked: float
) -> None:
    """Runs in a worker process: sends the rows of each item, and ends after a failure."""
    os.setpgrp()  # child processes are killed together
    faulthandler.enable()
    try:
        with gpu_steps.ready(options, step):
            for index in indices:
                start = time.monotonic()
                rows = gpu_steps.items(options, step)[index].run()
                took = {"start_s": start - asked, "seconds": time.monotonic() - start}
                took = {name: round(seconds, 3) for name, seconds in took.items()}
                connection.send([row | took for row in rows or [{}]])
                asked = time.monotonic()
    except BaseException as error:  # pytest's outcomes are not Exceptions
        trace = traceback.format_exc(limit=-3)
        connection.send([failure(type(error).__name__, str(error), trace)])
    sys.stdout.flush()
    os._exit(0)  # skips the GPU's teardown, which may crash after an error


class Worker:
    """A process, the items it has not finished, and the deadline of the next one."""

    def __init__(self, context: Any, options: Options, step: str, indices: list[int]) -> None:
        self.left = deque(indices)
        self.connection, theirs = context.Pipe(duplex=False)
        arguments = (options, step, indices, theirs, time.monotonic())
        self.process = context.Process(target=work, args=arguments)
        self.process.start()
        theirs.close()
        self.failed = self.ended = False

    def allow(self, seconds: float, end: float) -> None:
        now = time.monotonic()
        self.seconds = min(seconds, end - now)
        self.deadline = now + self.seconds

    def receive(self) -> list[Row]:
        """Returns the rows of its next item, or none while it is busy; sets `ended`."""
        if self.connection.poll():
            try:
                rows: list[Row] = self.connection.recv()
                self.failed = any("error" in row for row in rows)
                return rows
            except EOFError:
                self.ended = True
                self.process.join()
                crashed = self.left and not self.failed
                return [failure("Crash", f"exit code {self.process.exitcode}")] if crashed else []
        if time.monotonic() < self.deadline:
            return []
        self.ended = True
        self.kill()
        return [failure("Timeout", f"took more than {self.seconds:.0f} s")]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # already ended, or not yet a group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(10)  # the GPU may hold it for longer


def run_items(
    context: Any, options: Options, step: str, end: float, record: Callable[[Row], None]
) -> int:
    """Records the rows of a step's items; returns the number of items not run in time."""
    items: list[Item] = gpu_steps.items(options, step)
    groups = itertools.groupby(range(len(items)), lambda index: items[index].group)
    waiting = deque(list(indices) for _, indices in groups)
    running: list[Worker] = []
    try:
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < options.processes(step) and time.monotonic() < end:
                running.append(Worker(context, options, step, waiting.popleft()))
                running[-1].allow(items[running[-1].left[0]].seconds, end)
            soonest = min(worker.deadline for worker in running)
            wait([worker.connection for worker in running], max(0, soonest - time.monotonic()))
            for worker in list(running):
                if rows := worker.receive():
                    labels = items[worker.left.popleft()].labels
                    for row in rows:
                        record({"step": step, **labels, **row})
                if worker.ended:
                    running.remove(worker)
                    if worker.left:
                        waiting.appendleft(list(worker.left))
                elif rows and worker.left:
                    worker.allow(items[worker.left[0]].seconds, end)
    finally:
        for worker in running:
            worker.kill()
    return sum(map(len, waiting))
