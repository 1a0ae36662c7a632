"""What a client was told of its request, and so what may still be done about it: no socket, no clock.

    next --> a member --+-- heard(events)                               to be written to the client, or held back
      ^                 +-- heard -> None: it will not answer for now    the next member
      '-----------------+-- it is gone                                   the next, while the client was told nothing;
                                                                         else the stream is over, with an error event

A stream holds its opening events back until the first token: until then another member may still take the request.
Each member is asked once, and at most MOST_TRIES of them: a request on which controllers die must not meet them all.

What this file does not know: how members are ordered, what a body means. The simulator runs it as it is.
"""

from collections.abc import Sequence

from kilburn.controller.gateway.events import is_for_another, is_opening
from kilburn.controller.gateway.roster import Member

MOST_TRIES = 3


class Passage:
    """See the file's head. `members`: whom to ask, the best first."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members[:MOST_TRIES]
        self.num_tries = 0
        self.has_begun = False  # the client was told something: its answer is this member's, or none
        self.held = b""  # events that the client was not told yet
        self.last = b""  # the newest event of those that it was told

    def next(self) -> Member | None:
        """Whom to ask now; None: nobody is left to ask, or nobody else may be asked."""
        if self.has_begun or self.num_tries == len(self._members):
            return None
        self.held, self.last = b"", b""
        self.num_tries += 1
        return self._members[self.num_tries - 1]

    def heard(self, events: Sequence[bytes]) -> bytes | None:
        """What to write to the client now, perhaps nothing; None: this member will not answer, and another may."""
        if not self.has_begun:
            said = next((event for event in events if not is_opening(event)), b"")
            if is_for_another(said):
                return None
        self.held += b"".join(events)
        self.last = events[-1] if events else self.last
        if not self.has_begun and all(map(is_opening, events)):
            return b""
        return self.ended()

    def ended(self) -> bytes:
        """What is left to write at the end of a stream."""
        self.has_begun = True
        held, self.held = self.held, b""
        return held
