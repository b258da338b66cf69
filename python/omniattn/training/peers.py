"""Watches the ranks of a run: if one fails or hangs, the others name it."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

#: Key in the store: the first rank that failed, and how.
_FAILED = "failed"
#: Parts of the messages of torch's errors of communication that have no type of their own.
_MESSAGES = ("gloo/", "Connection closed by peer", "Connection reset by peer", "NCCL")


class RankError(RuntimeError):
    """Another rank failed, ended or does not answer."""


class Peers:
    """Messages of the ranks of the default process group, in its store.

    Attributes:
        grace: seconds in which the ranks that wait in vain must say so, after the first that does.
    """

    grace = 10.0

    def __init__(self) -> None:
        self.store = PrefixStore("omniattn", _get_default_store())
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._published = False

    @contextmanager
    def named(self, where: str) -> Iterator[None]:
        """Tells other ranks of errors in this context, and names the rank of an error that comes
        from another one.

        Raises:
            RankError: an error of communication.
        """
        if self._published:  # an error that the caller has handled
            self.store.delete_key(_FAILED)
            self._published = False
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            if not _is_of_messages(error):
                text = " ".join(str(error).split())[:1000]
                self._publish(f"failed in {where}: {type(error).__name__}: {text}", self.rank)
                raise
            raise RankError(self._blame(where)) from error

    def failure(self) -> str | None:
        """Returns the first failure of a rank, None without one."""
        try:
            return self.store.get(_FAILED).decode() if self.store.check([_FAILED]) else None
        except (dist.DistError, RuntimeError):
            return f"rank 0 of {self.ranks}, which keeps the store, has ended"

    def _publish(self, text: str, *ranks: int) -> None:
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.ranks}"
        try:
            found = self.store.compare_set(_FAILED, "", f"{names} {text}").decode()
        except (dist.DistError, RuntimeError):
            return  # the others notice that the store has ended
        self._published = found == f"{names} {text}"

    def _blame(self, where: str) -> str:
        """Returns what went wrong on another rank, after an error of communication."""
        end = time.monotonic() + self.grace
        waiting = {self.rank}
        try:
            self.store.set(f"waiting/{self.rank}", "")
            while len(waiting) < self.ranks and time.monotonic() < end:
                # The first rank may keep the store, so that it lets the others read before it ends.
                if self.rank > 0 and self.store.check([_FAILED]):
                    break
                time.sleep(0.05)
                waiting = {r for r in range(self.ranks) if self.store.check([f"waiting/{r}"])}
                if self.store.check([_FAILED]) and len(waiting) == self.ranks - 1:
                    break
            if missing := sorted(set(range(self.ranks)) - waiting):
                self._publish(f"ended or does not answer in {where}", *missing)
        except (dist.DistError, RuntimeError):
            pass  # `failure` says so
        return self.failure() or f"the ranks of {where} could not reach each other"


def _is_of_messages(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _MESSAGES)


class Watch(threading.Thread):
    """Ends this process if another rank has failed and this one does not notice.

    As a context: a rank that hangs cannot raise an error, but the others have named it, so that
    this thread says where it hangs, and exits with code 1.
    """

    def __init__(self, peers: Peers, name: str) -> None:
        super().__init__(daemon=True, name="omniattn-watch")
        self.peers, self.command = peers, name
        self._done = threading.Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()

    def run(self) -> None:
        while not self._done.wait(0.5):
            failure = self.peers.failure()
            if failure is None or self._done.wait(self.peers.grace):
                continue
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            place = traceback.extract_stack(frame)[-1]
            sys.stderr.write(
                f"{self.command}: {failure}; rank {self.peers.rank} was in {place.name} "
                f"({place.filename}:{place.lineno})\n"
            )
            sys.stderr.flush()
            os._exit(1)
