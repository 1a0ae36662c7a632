"""How much of prompts a step computes while others wait for their next token: seconds, and not only tokens.

    a step   [ decodes: d d d d d d d d ][ prompts: c c c c c c c c ... ]
             |------- decode_s -------->|------ num x token_s ------->|   together about target_s

Both are learned from results: decode_s from steps without prompts (it grows with the rows, and with their contexts,
but contexts grow so slowly that an average follows them), token_s from what prompts added to a step. Averages forget by
a quarter at each observation; but tokens that got dearer, as they do the more there is before them, are believed at
once. For the same reason a chunk of a prompt is no longer than what there is before it, or than 512 tokens, so that a
prompt's next tokens never cost a multiple of what was observed, although the estimate is as old as the plans under way.

Prompts get what is left of the target, and never less than half of it or than LEAST tokens, so that they always go on:
a step may then take longer than the target, by half where prompts are computed in steps that decodes alone fill. And a
prompt takes longer, by what the decodes beside it take: more than 1.3 times as long where a step of decodes alone takes
40 % of the target or more. Where nobody waits for a token, nothing is held back.
"""

from collections.abc import Iterable

LEAST = 16  # tokens
UNKNOWN = 64  # tokens, of the first step that tells what they cost
FORGETTING = 0.25


class Pacing:
    """See the file's head. A target of 0 bounds nothing; what steps cost is learned all the same."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.decode_s = 0.0  # of a step of so many decodes:
        self.num_decodes = 0.0
        self.token_s = 0.0

    # --- questions

    def most_prompt_tokens(self, num_decodes: int) -> int | None:
        """How many positions of prompts to plan beside so many decodes; None: any number."""
        if not self.target_s or not num_decodes:
            return None
        if not self.token_s:
            return UNKNOWN
        left_s = max(self.target_s - self.decodes_s(num_decodes), self.target_s / 2)
        return max(int(left_s / self.token_s), LEAST)

    def predicted_s(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """What a step is expected to take; 0 for what was never seen."""
        return (self.decodes_s(num_decodes) if num_decodes else 0.0) + num_prompt_tokens * self.token_s

    def decodes_s(self, num_decodes: float) -> float:
        """A step of so many decodes. Fewer rows than those observed may take as long: a step has a cost of its own."""
        return self.decode_s * max(num_decodes / self.num_decodes, 1.0) if self.num_decodes else 0.0

    # --- commands

    def learn(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0.0:
            return
        if not num_prompt_tokens:
            if not num_decodes:
                return  # nothing but moves
            weight = FORGETTING if self.num_decodes else 1.0
            self.decode_s += weight * (seconds - self.decode_s)
            self.num_decodes += weight * (num_decodes - self.num_decodes)
        elif num_prompt_tokens >= LEAST:
            # Where prompts seem to cost nothing the decodes were overestimated: a tenth of the step is theirs at least.
            added_s = max(seconds - (self.decodes_s(num_decodes) if num_decodes else 0.0), seconds / 10)
            each_s = added_s / num_prompt_tokens
            weight = FORGETTING if self.token_s > each_s else 1.0
            self.token_s += weight * (each_s - self.token_s)

    def learn_decodes(self, num_decodes: int, seconds: Iterable[float]) -> None:
        """As `learn`, of several steps one after the other that have so many decodes each and nothing else."""
        for step_s in seconds:
            if step_s > 0.0:
                weight = FORGETTING if self.num_decodes else 1.0
                self.decode_s += weight * (step_s - self.decode_s)
                self.num_decodes += weight * (num_decodes - self.num_decodes)
