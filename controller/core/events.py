"""All that the core can be told, and all that it can ask for.

    effects = engine.handle(events, now)

Events are facts: they have happened and cannot be refused. Effects are wishes that the edge fulfils in order. The core
never learns whether text came out of its tokens, nor the edge how blocks are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kilburn.shared.grammar import Grammar
from kilburn.shared.messages import FromController, FromWorker
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason

# --- events


class EarlyStopping(Enum):
    """When a beam search is over. See beam.py."""

    HEURISTIC = "heuristic"  # the API's false
    FULL = "full"  # the API's true
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSettings:
    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


@dataclass(frozen=True, slots=True)
class Submit:
    """A request as token ids. `request_id` is the edge's own, never a client's, and unique in this process's life.

    sampling.seed is set; sampling.stop_ids are those that end a sequence; sampling.choose is the core's to fill in.
    The core answers with Refused, or with Emit... and one Finished for each of `n` indices. With `beams` it answers
    with a Beam for each of the `n` best ones instead, when the search is over.
    """

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    n: int = 1
    priority: int = 0  # lower runs first, as vLLM has it
    salt: bytes = b""
    beams: BeamSettings | None = None
    queue_s: float | None = None  # how long it may wait to begin, and
    request_s: float | None = None  # take in all: within what the settings allow
    tenant: bytes = b""  # whose it is, and
    weight: float = 1.0  # the share of that tenant, where there are shares
    grammar: Grammar | None = None  # that its answers must follow; sampling.grammar is its digest

    @property
    def width(self) -> int:
        """Sequences that may run together."""
        return self.n if self.beams is None else self.beams.width


@dataclass(frozen=True, slots=True)
class Stop:
    """The text layer found a stop string in this sequence: it ends as if by a stop id. Idempotent."""

    request_id: int
    index: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client left: the whole group ends, and nothing more is emitted for it. Idempotent."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Compute this prefix and hold it. Answered with Refused, or with Pinned once it is held by some worker group.

    `prefix_id` is of the same kind as a request_id. A public prefix is unsalted.
    """

    prefix_id: int
    tokens: tuple[int, ...]
    salt: bytes = b""
    is_public: bool = False


@dataclass(frozen=True, slots=True)
class Unpin:
    """The name was deleted. Idempotent."""

    prefix_id: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A well-formed message from a peer. `peer` is its routing identity: a name and a start nonce."""

    peer: bytes
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Left:
    """A peer cannot be reached, sent garbage, or its process is known to have ended."""

    peer: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Retire:
    """A worker group is to leave: its requests go on elsewhere, or end there where no other takes them. Idempotent."""

    group: str


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A connection of some worker has ended, of which nobody knows: each is asked whether it is there."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; engine.deadline says when one is wanted."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Take no new requests, finish those that are here, and tell the workers to drain."""


Event = Submit | Stop | Cancel | Pin | Unpin | Arrived | Left | Retire | Disturbed | Tick | Shutdown


# --- effects


class Refusal(Enum):
    """Why a request was turned away at the door. The edge gives each its HTTP status."""

    EMPTY = "empty"  # a prompt of no tokens
    TOO_LONG = "too long"  # cannot fit the model's length, or any pool
    TOO_WIDE = "too wide"  # more sequences than rows or budget
    QUEUE_FULL = "queue full"
    NO_WORKER = "no worker"
    QUEUE_TIMEOUT = "queue timeout"  # it waited too long to begin
    REQUEST_TIMEOUT = "request timeout"  # its time ran out before it began
    GRAMMAR = "grammar"  # no worker can follow the grammar that is asked for
    PINS_FULL = "pins full"  # a named prefix beyond what may be pinned, or that would strand an accepted request
    SHUTTING_DOWN = "shutting down"


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: int
    refusal: Refusal
    message: str  # for the client: what is wrong, and which setting or field to change
    retry_after_s: int = 0  # when there may be room, by the rate at which the queue drains; 0: nothing is known


@dataclass(slots=True)
class Started:
    """The group was admitted for the first time: `cached_tokens` of its prompt need not be computed."""

    request_id: int
    cached_tokens: int


@dataclass(slots=True)
class PromptScored:
    """Log probabilities of the prompt, where they were asked for: of the positions from `start` on.

    Every position but the first comes once, in order, and before any token. `ids` and `logprobs` are `width` entries a
    position, the prompt's own token first; `ranks` has one entry each.
    """

    request_id: int
    start: int
    width: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Drawn:
    """One token of an Emit. `logprobs`: the token itself, then the likeliest, best first; () where nobody asked."""

    request_id: int
    index: int
    token: int
    logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Emit:
    """Sequences went on by one token each. Never sent twice for a position.

    Columns, since an object for each row of each step is a good part of what a step of many rows costs.
    """

    request_ids: list[int]
    indices: list[int]
    tokens: list[int]
    logprobs: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # by place in the columns

    def each(self) -> Iterator[Drawn]:
        """One by one, for whoever is in no hurry."""
        for i, (request_id, index, token) in enumerate(zip(self.request_ids, self.indices, self.tokens, strict=True)):
            yield Drawn(request_id, index, token, self.logprobs.get(i, ()))


@dataclass(slots=True)
class Finished:
    """A sequence ended. The last word on it. `message` explains FinishReason.ERROR to the client."""

    request_id: int
    index: int
    reason: FinishReason
    message: str = ""


@dataclass(slots=True)
class Beam:
    """A choice of a beam search, whole; the last word on it. Index 0 is the best by score."""

    request_id: int
    index: int
    tokens: tuple[int, ...]  # generated ones, a stop id included
    cumulative_logprob: float
    score: float
    reason: FinishReason


@dataclass(slots=True)
class Pinned:
    """A named prefix is computed and held by a worker group. Comes again after a worker's restart."""

    prefix_id: int
    group: str
    num_blocks: int


@dataclass(slots=True)
class NotPinned:
    """A worker group could not compute a named prefix, or has no room for it. It tries again in its next lease."""

    prefix_id: int
    group: str
    message: str


@dataclass(slots=True)
class Send:
    """Put this message on the wire to `peer`."""

    peer: bytes
    message: FromController


@dataclass(slots=True)
class Names:
    """Blocks of a worker group that became findable by their digest, and digests that ceased to be. Hints."""

    group: str
    published: list[bytes]
    withdrawn: list[bytes]


@dataclass(frozen=True, slots=True)
class Stuck:
    """These peers fell silent, or are late with a step: their lease ends, and they may never speak again."""

    peers: tuple[bytes, ...]
    reason: str
    busy_s: float = 0.0  # what they were asked for may take so long from now, and they say nothing before it is done


class Turn(Enum):
    """What may happen to a request between its Submit and its end, beside tokens."""

    PLACED = "placed"  # in the line of a worker group
    PREPARED = "prepared"  # the grammar that it waited for is there
    DISPLACED = "displaced"  # its worker group is lost; it waits for another
    PREEMPTED = "preempted"
    SWAPPED_OUT = "swapped out"  # its blocks are on the host
    SWAPPED_IN = "swapped in"
    RESUMED = "resumed"  # on rows again, not yet with all that it had
    RETURNED = "returned"  # all is there again
    CHUNK = "chunk"  # known tokens computed: a prompt, or what was lost


@dataclass(slots=True)
class Turned:
    """A turn in a request's life, for whoever tells its story. Nothing depends on it."""

    request_id: int
    turn: Turn
    text: str = ""
    since: float | None = None  # when it began; None: it took no time of its own


class NoteKind(Enum):
    PREEMPTED = "preempted"
    RETURNED = "returned"  # a preempted group is all there again
    RANK_WAITS = "rank waits"  # for the others of its group
    LEASE_BEGAN = "lease began"
    LEASE_ENDED = "lease ended"
    LEASE_LEAVES = "lease leaves"
    NAME_TAKEN = "name taken"  # a process waits while another has its name
    POISON = "poison"  # a request that ended worker after worker
    LAW_BROKEN = "law broken"


@dataclass(frozen=True, slots=True)
class Note:
    """Something an operator may want to know. Nothing depends on it."""

    kind: NoteKind
    text: str


Effect = (
    Refused
    | Started
    | PromptScored
    | Emit
    | Finished
    | Beam
    | Pinned
    | NotPinned
    | Send
    | Names
    | Note
    | Turned
    | Stuck
)
