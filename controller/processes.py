"""The processes behind the peers, for whoever watches over them.

    Hello(name, pid) -> present --(it ended)-------------------------------> its peer has left
                           | silent, or late with a step                  ^
                           v                                              |
                        absent --(says Hello again)--> present            |
                           '---- patience_s later ---> stuck: whoever watches over it ends it

A process that is stopped, or hangs in a call that never returns, neither ends nor says Hello; nothing but SIGKILL helps
there, and only who started it may do that. A worker that is well is back soon: it hears that its lease is over, and
waits a few seconds at most before it says Hello. One in a step may have to finish that first.

What this file does not know: how a process is ended, and whether anybody watches over it.
"""

import asyncio
from collections.abc import Callable, Sequence

from kilburn.shared.messages import Hello

MOST_PROCESSES = 1024
RETURNS_S = 5.0  # the longest that a worker which is well waits before it says Hello again, and a little

Process = tuple[str, int]  # the name of its worker group, and its process id


class Processes:
    """See the file's head. `patience_s`: for one that is absent."""

    def __init__(self, patience_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._peers: dict[Process, bytes] = {}
        self._hellos: dict[bytes, Hello] = {}  # of each of these peers
        self._absent: dict[Process, asyncio.TimerHandle] = {}
        self.on_stuck: Callable[[str, int, str], None] = lambda name, pid, reason: None  # until somebody watches

    def present(self, peer: bytes, hello: Hello) -> None:
        process = hello.name, hello.pid
        self._forget(process)  # so that the newest are last
        self._peers[process], self._hellos[peer] = peer, hello
        if len(self._peers) > MOST_PROCESSES:
            self._forget(next(iter(self._peers)))

    def hello(self, peer: bytes) -> Hello | None:
        """What it said of itself, if it is remembered."""
        return self._hellos.get(peer)

    def absent(self, peers: Sequence[bytes], reason: str, busy_s: float = 0.0) -> None:
        """The lease of these is over since they say nothing, or do not answer; they may be busy for so long yet."""
        for process in [process for process, peer in self._peers.items() if peer in peers]:
            self._expect_no_more(process)
            patience_s = self._patience_s + busy_s
            self._absent[process] = self._loop.call_later(patience_s, self._stuck, process, patience_s, reason)

    def ended(self, name: str, pid: int) -> bytes | None:
        """Its peer, if it ever said Hello."""
        return self._forget((name, pid))

    def close(self) -> None:
        for process in list(self._absent):
            self._expect_no_more(process)

    def _stuck(self, process: Process, patience_s: float, reason: str) -> None:
        del self._absent[process]
        self.on_stuck(*process, f"did not come back within {patience_s:g} s ({reason})")

    def _expect_no_more(self, process: Process) -> None:
        timer = self._absent.pop(process, None)
        if timer is not None:
            timer.cancel()

    def _forget(self, process: Process) -> bytes | None:
        self._expect_no_more(process)
        peer = self._peers.pop(process, None)
        if peer is not None:
            self._hellos.pop(peer, None)
        return peer
