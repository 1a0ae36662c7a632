"""Every message between the controller and a worker, on one page.

worker -> controller   Hello StepResult StepDone StepFailed Prepared Unpreparable Beat Goodbye
controller -> worker   Welcome Reject StepPlan Prepare Forget Beat Drain Gone

    worker                    controller
      | Hello ----------------->|   after loading, compiling and warming up
      |<--------- Welcome(lease)|   or Reject
      |<-------- StepPlan(1)    |   up to `depth` plans ahead of the results
      |<-------- StepPlan(2)    |
      | StepResult(1) --------->|   one outcome per Advance, in the plan's order
      | Beat ------------------>|   and back: the link is alive
      |<--------- Gone          |   the lease is over; only a new Hello resynchronises

A worker group of several ranks is several peers: a Hello from each, one Welcome to all, every plan to all. Rank 0 alone
answers with StepResult, the others confirm with StepDone.

A plan's work is columns, not objects: `rows[i]` advances by `counts[i]` positions. Steps count from 1 in each lease,
without gaps. Messages are values: nobody changes one after it was made. Lists are lists where the hot path builds
them; `codec` says how each looks on the wire.
"""

from dataclasses import dataclass, field

from kilburn.shared.layout import KVLayout
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import Tier

PROTOCOL_VERSION = 1


# --- both ways


@dataclass(frozen=True, slots=True)
class Beat:
    """I am here. From a worker `step` is the newest step that it finished, from the controller the newest sent."""

    lease: int
    step: int


# --- worker -> controller


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What a worker holds beside its pools, by the rows of its ledger, in bytes. Shown to operators."""

    weights: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    graphs: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank is loaded, compiled and warm, and asks for a lease."""

    name: str  # of the worker group
    model_digest: bytes  # 32 bytes: config, tensors, files, revision, KV dtype, RoPE
    layout: KVLayout
    num_blocks: int  # device pool
    num_host_blocks: int  # pinned host pool
    max_rows: int  # sequences in a batch
    max_step_tokens: int  # positions in a plan
    max_len: int  # tokens in a sequence
    vocab_size: int
    rank: int = 0
    world: int = 1
    pid: int = 0  # shown to operators; no meaning to the core
    memory: WorkerMemory = WorkerMemory()  # as measured; left out by older builds
    rendezvous: str = ""  # of rank 0, where there are others: where they meet it in the next lease
    boot: str = ""  # drawn when the process started: which life of this name it is; empty, as of older builds


@dataclass(frozen=True, slots=True)
class KvLost:
    """The content of a block proved unreadable when step `step` read it for the Advance at `index`."""

    index: int
    tier: Tier
    block: int
    step: int


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of the tokens drawn by the Advance at `index`, from the model's own distribution.

    For each drawn token `width` = 1 + Sampling.logprobs entries: the token itself, then the likeliest, best first.
    """

    index: int
    width: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # float32 on the wire


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens that the Advance at `index` computed: of the positions from `start` on.

    For each position `width` = 1 + Sampling.prompt_logprobs entries: the prompt's own token, then the likeliest, best
    first; and the rank of the own token, where 1 is the likeliest.
    """

    index: int
    start: int
    width: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # float32 on the wire
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a step's seconds went, on the worker's clock."""

    idle_s: float = 0.0  # waiting for the plan
    apply_s: float = 0.0  # deltas, swaps, copies, inputs
    forward_s: float = 0.0
    sample_s: float = 0.0
    moves_s: float = 0.0  # swaps and copies; part of apply_s


@dataclass(slots=True)
class StepResult:
    """What became of each Advance of a plan, in its order."""

    lease: int
    step: int
    num_tokens: list[int]  # per Advance: tokens drawn (0 where it ended before the last known token)
    tokens: list[int]  # all of them, one Advance after the other
    failed: dict[int, str] = field(default_factory=dict)  # index -> reason, for one request only
    lost: tuple[KvLost, ...] = ()
    logprobs: tuple[RowLogprobs, ...] = ()
    timings: Timings = Timings()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """A rank > 0 ran the step; `digest` covers the plan and the outcomes."""

    lease: int
    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The whole step failed. Ends the lease."""

    lease: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The grammar of the Prepare with this number is compiled: rows may be admitted with it until its Forget."""

    lease: int
    number: int


@dataclass(frozen=True, slots=True)
class Unpreparable:
    """The grammar of the Prepare with this number cannot be had here."""

    lease: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The worker leaves of its own will."""

    reason: str


# --- controller -> worker


@dataclass(frozen=True, slots=True)
class Welcome:
    lease: int
    beat_s: float  # send a Beat this often
    silence_s: float  # no frame for so long: the lease is over
    depth: int  # plans that may be under way at once
    rendezvous: str = ""  # where the ranks of a group meet, as rank 0 said; empty for a world of one
    step_s: float = 0.0  # what any step may take before the lease ends; 0, as of older builds: not said


@dataclass(frozen=True, slots=True)
class Reject:
    reason: str


@dataclass(frozen=True, slots=True)
class Admit:
    """A row begins a life. Sets the row and runs nothing."""

    row: int
    start: int  # positions [0, start) have their KV in `blocks`
    num_prompt: int  # the border between prompt and generated tokens
    tokens: tuple[int, ...]  # the known tokens from `start` on; at least one
    history: tuple[int, ...]  # the tokens before `start`, only where sampling.needs_history
    blocks: tuple[int, ...]  # the table so far
    sampling: Sampling
    scored_from: int = 0  # where sampling.prompt_logprobs asks for any: those of positions before are known already


@dataclass(slots=True)
class StepPlan:
    """One step: swaps out, copies, swaps in, admits, then the advances as one batch.

    Advance i: row rows[i] computes its next counts[i] positions, after its table has grown by the blocks g with
    grown_at[g] == i, in order. It samples when it reaches the end of the row's known tokens.
    """

    lease: int
    step: int
    rows: list[int]
    counts: list[int]
    grown_at: list[int] = field(default_factory=list)
    grown_blocks: list[int] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination), both on the device
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    allowed_s: float = 0.0  # what it may take, where that is more than the Welcome's step_s; 0: no more


@dataclass(frozen=True, slots=True)
class Prepare:
    """Compile a grammar, beside the steps and not in one, and keep it until its Forget. The same may come again."""

    lease: int
    number: int  # of this asking, from 1 in each lease: what the answer is to
    digest: bytes
    source: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """No row will be admitted with this grammar before another Prepare."""

    lease: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Drain:
    """No new work will come; leave when nothing is under way."""

    lease: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The lease is over. Lease 0: none is given for now, and another Hello later may get one."""

    lease: int
    reason: str


FromWorker = Hello | StepResult | StepDone | StepFailed | Prepared | Unpreparable | Beat | Goodbye
FromController = Welcome | Reject | StepPlan | Prepare | Forget | Beat | Drain | Gone
Message = FromWorker | FromController
