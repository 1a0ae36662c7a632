"""What the clients of a service are owed, whatever fails: judged from what was said, what they were told, and who died.

    whole       what a client was told is the beginning of what one life of one controller said to it; all of it, where
                the stream came to its end
    own losses  a stream that breaks off was told something, ends between two events, and the life that held it has
                died, or was not heard of by the gateway for a while
    at once     ... and no longer ago than it takes to find out
    in time     nobody asks another controller once the client was told something; each is asked once, and TRIES of
                them at most; whoever was told nothing gets an answer if one of these could give it
    quiet       nobody waits for ever
    sensible    who is asked first is not worse, by all that the gateway knows, than another

Nothing here knows how gateways decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kilburn.controller.gateway.roster import Member, State
from kilburn.controller.simulate.scenario import Errand
from kilburn.controller.simulate.site import Reply, Site
from kilburn.controller.simulate.witness import WorldBroken, demand

TRIES = 3
FOR_NOW = ("queue_full", "no_worker", "shutting_down")  # refusals that another controller need not share


@dataclass(slots=True)
class Record:
    """One request of one client."""

    errand: Errand
    gateway: str
    at_s: float
    num_known: int = 0  # controllers that its gateway knew of
    asked: list[str] = field(default_factory=list)  # addresses
    site: Site | None = None  # whose answer it is being told, or is waited for
    told: bytearray = field(default_factory=bytearray)
    end: str = ""  # how it ended
    ended_s: float = 0.0

    @property
    def number(self) -> int:
        return self.errand.submit.request_id

    @property
    def reply(self) -> Reply | None:
        return None if self.site is None else self.site.replies.get(self.number)


class Customers:
    """See the file's head. Raises WorldBroken."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}

    def waiting(self) -> list[int]:
        return [number for number, record in self.records.items() if not record.end]

    def asks(self, errand: Errand, gateway: str, now: float) -> Record:
        record = self.records[errand.submit.request_id] = Record(errand, gateway, now)
        return record

    def routed(
        self, record: Record, members: Sequence[Member], found: Mapping[str, int], busy: Mapping[str, int]
    ) -> None:
        """In which order controllers will be asked. `busy`: how many of its requests each has, by address."""
        record.num_known = len(members)
        for other in members[1:]:
            first = members[0]
            demand(
                first.state.value <= other.state.value, "one that is lost, or not ready, is asked first", record.number
            )
            if first.state is not other.state or found.get(other.id, 0) < found.get(first.id, 0):
                continue
            loads = [max(busy.get(m.address, 0), m.about.num_requests if m.about else 0) for m in (first, other)]
            holds = loads[0] <= loads[1]
            demand(
                holds,
                f"asked where {loads[0]} requests are, though {loads[1]} are where as much is known",
                record.number,
            )

    def tries(self, record: Record, address: str, site: Site | None) -> None:
        demand(not record.told, "another controller is asked, though the client was told something", record.number)
        demand(address not in record.asked, f"{address} is asked twice", record.number)
        record.asked.append(address)
        demand(len(record.asked) <= TRIES, "too many controllers are asked", record.number)
        record.site = site

    def told(self, record: Record, data: bytes) -> None:
        reply = record.reply
        if reply is None or record.end:
            raise WorldBroken("somebody is told something that nobody said", record.number)
        start = len(record.told)
        said = bytes(reply.said[start : start + len(data)])
        demand(said == data, f"{data!r} is told, where {said!r} was said", record.number)
        record.told += data

    # --- how it ends

    def _ends(self, record: Record, end: str, now: float) -> None:
        demand(not record.end, f"a request ends twice: {record.end}, {end}", record.number)
        record.end, record.ended_s = end, now

    def answered(self, record: Record, now: float) -> None:
        reply = record.reply
        is_whole = reply is not None and not reply.open and reply.said == record.told
        demand(is_whole, "an answer is not whole", record.number)
        holds = reply is None or reply.refused not in FOR_NOW
        demand(holds, "a client is told that a controller is busy, while others were not asked", record.number)
        self._ends(record, "answered", now)

    def breaks_off(self, record: Record, is_excused: bool, now: float) -> None:
        demand(
            bool(record.told), "a stream breaks off that had not begun: another could have been asked", record.number
        )
        demand(record.told.endswith(b"\n\n"), "a stream breaks off within an event", record.number)
        demand(is_excused, "a stream is lost, though the controller that holds it lives and is heard", record.number)
        self._ends(record, "broken off", now)

    def unanswered(self, record: Record, refused: Sequence[str], now: float) -> None:
        """`refused`: the words of those who were asked and would not answer."""
        num_due = min(record.num_known, TRIES)
        holds = not record.told and len(record.asked) == num_due
        demand(holds, f"given up after {len(record.asked)} of {num_due} controllers were asked", record.number)
        self._ends(record, "refused" if refused else "unanswered", now)

    def left(self, record: Record, why: str, now: float) -> None:
        """The client left, or its gateway is gone."""
        if not record.end:
            self._ends(record, why, now)

    # --- laws about time

    def found_out(self, site: Site) -> None:
        """Long enough after a life ended: nobody still waits for it."""
        for record in self.records.values():
            if record.site is site and not record.end:
                raise WorldBroken(f"still waits for {site.id}, which ended at {site.ended_s}", record.number)

    def check_all(self) -> None:
        for record in self.records.values():
            demand(bool(record.end), "a client was never answered", record.number)

    def check_calm(self, number: int) -> None:
        """Once all is calm, whoever asks is answered, whatever had failed before."""
        record = self.records[number]
        reply = record.reply
        holds = record.end == "answered" and reply is not None and not reply.refused
        why = reply.refused if reply is not None else ""
        demand(holds, f"all is calm, and a client is {record.end}: {why or 'no answer'}", number)


def is_known_ready(members: Sequence[Member], addresses: Sequence[str]) -> bool:
    """Whether a gateway knows these, and that they are ready."""
    ready = {member.address for member in members if member.state is State.READY}
    return set(addresses) <= ready
