"""By what the ranks of a worker group show that they did the same: a digest of a step's plan and of what became of it.

    SHA-256( domain | the plan as a frame | the outcomes as a frame )

Outcomes are what every rank knows: tokens, which rows failed, losses. Reasons and log probabilities are rank 0's alone
and timings each rank's own; none of these enters. Frames are canonical, so that the digest is equal in every process.
"""

import hashlib
from struct import pack

from kilburn.shared.codec import encode
from kilburn.shared.messages import StepPlan, StepResult

_DOMAIN = b"kilburn.step.1\0"


def step_digest(plan: StepPlan, result: StepResult) -> bytes:
    """32 bytes. What a rank > 0 says of a step in StepDone, and what rank 0's answer must come to."""
    frame = encode(plan)
    failed = dict.fromkeys(result.failed, "")
    outcomes = StepResult(result.lease, result.step, result.num_tokens, result.tokens, failed, result.lost)
    return hashlib.sha256(_DOMAIN + pack("<Q", len(frame)) + frame + encode(outcomes)).digest()
