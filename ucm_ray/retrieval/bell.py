"""Small calls to a shard on the same machine, through a pipe each way.

A Ray call costs both processes some milliseconds of processor time, as much as scoring a step's query. Where a query's
numbers lie in a lane (see `lane`) there is little left to send: two pipes carry it in some ten microseconds. As with a
lane, the shard opens the client's descriptors, which fails, as it must, on another machine, in another container or for
another user; and nothing is left behind by a process that is killed.
"""

import logging
import os
import pickle
import select
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")


class Bell:
    """The client's side for one shard. Answers come in the order of the calls."""

    def __init__(self):
        shard_reads, self._calls = os.pipe()
        self._answers, shard_writes = os.pipe()
        self._of_shard = (shard_reads, shard_writes)
        os.set_blocking(self._calls, False)
        self._open = True
        self._waiting: deque[Callable[[list | Exception], None]] = deque()
        self._lock = threading.Lock()

    @property
    def invitation(self) -> tuple[str, str]:
        """What the shard needs to `serve`: paths of its ends."""
        return tuple(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._of_shard)

    def accepted(self, by_shard: bool) -> None:
        """The shard has opened its ends, or could not: ours are closed, so that the end of either process is seen."""
        for descriptor in self._of_shard:
            os.close(descriptor)
        threading.Thread(target=self._listen, name="retrieval-bell", daemon=True).start()
        if not by_shard:
            self.close()

    def ring(self, args: tuple, done: Callable[[list | Exception], None]) -> bool:
        """Calls the shard and returns at once; `done` gets `[result]` or an exception from another thread. False, and
        nothing is called: the shard is gone, too many calls wait, or the arguments are more than a pipe takes at once.
        """
        data = pickle.dumps(args, protocol=5)
        message = _LENGTH.pack(len(data)) + data
        if len(message) > select.PIPE_BUF:  # might be written in part
            return False
        with self._lock:
            if not self._open:
                return False
            self._waiting.append(done)
            try:
                os.write(self._calls, message)
            except OSError:
                self._waiting.pop()
                return False
            return True

    def close(self) -> None:
        """Calls no more. What was called is still answered."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._calls)

    def _listen(self) -> None:
        with open(self._answers, "rb") as answers:
            while (result := _receive(answers)) is not None:
                self._settle(self._waiting.popleft(), result if isinstance(result, Exception) else [result])
        self.close()
        while self._waiting:
            self._settle(self._waiting.popleft(), ConnectionError("the shard is gone"))

    @staticmethod
    def _settle(done: Callable, result: list | Exception) -> None:
        try:
            done(result)
        except Exception:
            logger.exception("what follows a shard's answer failed")


def serve(invitation: tuple[str, str], call: Callable) -> bool:
    """The shard's side: a thread that answers a client's calls with `call(*args)` until the client hangs up. False if
    this process cannot open the client's pipes."""
    calls, answers = _open_pipe(invitation[0], os.O_RDONLY), _open_pipe(invitation[1], os.O_WRONLY)
    if calls is None or answers is None:
        for descriptor in (calls, answers):
            if descriptor is not None:
                os.close(descriptor)
        return False
    threading.Thread(target=_serve, args=(open(calls, "rb"), open(answers, "wb"), call), name="retrieval-bell",
                     daemon=True).start()
    return True


def _open_pipe(path: str, mode: int) -> int | None:
    """A descriptor; None for what cannot be opened or is no pipe."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return None
        return os.open(path, mode | os.O_CLOEXEC)
    except OSError:
        return None


def _serve(calls: BinaryIO, answers: BinaryIO, call: Callable) -> None:
    try:
        with calls, answers:
            while (args := _receive(calls)) is not None:
                try:
                    result = call(*args)
                except Exception as error:
                    result = RuntimeError(f"{type(error).__name__}: {error}")
                data = pickle.dumps(result, protocol=5)
                answers.write(_LENGTH.pack(len(data)) + data)
                answers.flush()
    except OSError:
        logger.debug("a client hung up while it was answered")


def _receive(pipe: BinaryIO):
    """The next message; None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    data = pipe.read(size)
    return pickle.loads(data) if len(data) == size else None
