"""A worker group's right to hold blocks and get plans.

    heard_at --- silence_s / 2 --> SUSPECT (no new requests are placed there) --- silence_s --> GONE

A lease ends once and for ever; whatever its worker says afterwards carries an old number and is dropped. The worker
comes back by a new Hello, with empty pools. The ranks of a group have one lease, which needs all of them: it was heard
when the most silent one was.

A name has one lease. While that is heard, another process that comes by the same name waits. The same process, which
has lost its connection, gets a new lease at once, and so does whoever comes while the old one is suspect.
"""

from collections.abc import Sequence
from enum import Enum

from kilburn.shared.messages import Hello
from kilburn.shared.types import LawBroken


class LeaseState(Enum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


MOVES: dict[LeaseState, dict[LeaseState, str]] = {
    LeaseState.JOINING: {LeaseState.READY: "all ranks said Hello", LeaseState.GONE: "a rank left"},
    LeaseState.READY: {
        LeaseState.SUSPECT: "half the silence allowed",
        LeaseState.DRAINING: "told to leave, and nothing is left to do",
        LeaseState.GONE: "any doubt",
    },
    LeaseState.SUSPECT: {
        LeaseState.READY: "heard again",
        LeaseState.DRAINING: "told to leave, and nothing is left to do",
        LeaseState.GONE: "silence, or any doubt",
    },
    LeaseState.DRAINING: {LeaseState.GONE: "the worker left"},
    LeaseState.GONE: {},
}
if MOVES.keys() != set(LeaseState):
    raise LawBroken("a lease state without a row in the table of moves")


class Lease:
    """Of one worker group, from its Hello on. `peers`: its ranks, in their order."""

    __slots__ = (
        "_heard",
        "beat_s",
        "boots",
        "heard_at",
        "hello",
        "id",
        "is_leaving",
        "next_beat_at",
        "num_beats_heard",
        "num_beats_sent",
        "peers",
        "ranks",
        "silence_s",
        "state",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        peers: Sequence[bytes],
        hello: Hello,
        beat_s: float,
        silence_s: float,
        now: float,
        boots: Sequence[str] = (),
    ) -> None:
        self.id, self.peers, self.hello = id, tuple(peers), hello
        self.boots = tuple(boots) or (hello.boot,) * len(self.peers)
        self.ranks = {peer: rank for rank, peer in enumerate(peers)}
        self._heard = [now] * len(self.peers)
        self.beat_s, self.silence_s = beat_s, silence_s
        self.state = LeaseState.JOINING
        self.is_leaving = False  # somebody asked for it: what it has is finished or moved, and nothing new comes
        self.heard_at = now
        self.next_beat_at = now + beat_s
        self.num_beats_heard = self.num_beats_sent = 0

    def move(self, to: LeaseState) -> None:
        """The one door between states."""
        if to not in MOVES[self.state]:
            raise LawBroken(f"no move from {self.state.value} to {to.value} for lease {self.id}")
        self.state = to

    @property
    def takes_requests(self) -> bool:
        return self.state is LeaseState.READY and not self.is_leaving

    @property
    def peer(self) -> bytes:
        """Rank 0, by which the group is known."""
        return self.peers[0]

    @property
    def most_silent(self) -> int:
        """The rank that was not heard for longest."""
        return self._heard.index(self.heard_at)

    def silent_peers(self, now: float) -> tuple[bytes, ...]:
        heard = zip(self.peers, self._heard, strict=True)
        return tuple([peer for peer, heard_at in heard if now >= heard_at + self.silence_s])

    def keeps_out(self, hello: Hello) -> bool:
        """Whether a process that says Hello by the name of this lease has to wait: another one has it, and is heard."""
        is_its_own = hello.rank < len(self.boots) and self.boots[hello.rank] == hello.boot
        return not is_its_own and self.state is not LeaseState.SUSPECT

    def heard(self, peer: bytes, now: float) -> None:
        self._heard[self.ranks[peer]] = now
        self.heard_at = min(self._heard)
        if self.state is LeaseState.SUSPECT and now < self.heard_at + self.silence_s / 2:
            self.move(LeaseState.READY)

    def is_silent(self, now: float) -> bool:
        return now >= self.heard_at + self.silence_s

    def doubt(self, now: float) -> None:
        """Called as time passes: half the silence makes a lease suspect."""
        if self.state is LeaseState.READY and now >= self.heard_at + self.silence_s / 2:
            self.move(LeaseState.SUSPECT)

    def is_beat_due(self, now: float) -> bool:
        return now >= self.next_beat_at

    def beaten(self, now: float) -> None:
        self.next_beat_at = now + self.beat_s
        self.num_beats_sent += 1

    @property
    def deadline(self) -> float:
        """When time alone will next change something here."""
        doubt = self.heard_at + self.silence_s * (0.5 if self.state is LeaseState.READY else 1.0)
        return min(doubt, self.next_beat_at)
