"""A gateway on the virtual clock: production's roster, passage and names of blocks, on lines that are late or cut.

    client --ask--> named_blocks, registry --> Roster.order --> Passage --> a line to a site, and back
                                                   ^
                                         probes, announcements

A connection that cannot be made is given up after CONNECT_S. The lines of a process that ended break at once, and what
it had sent may be lost; those to a machine that is gone say nothing any more, until its probes are missed, or until it
is back and says that it knows nothing of them.
"""

from collections import Counter
from dataclasses import dataclass, field

from kilburn.controller.gateway.app import CONNECT_S
from kilburn.controller.gateway.events import EventCutter
from kilburn.controller.gateway.fleet import PATIENCE_S, PROBE_S
from kilburn.controller.gateway.passage import Passage
from kilburn.controller.gateway.prompts import Prompt, named_blocks, note_found
from kilburn.controller.gateway.roster import Member, Roster
from kilburn.controller.simulate.agenda import Action
from kilburn.controller.simulate.customers import Customers, Record
from kilburn.controller.simulate.network import REGISTRY, Network
from kilburn.controller.simulate.scenario import Errand
from kilburn.controller.simulate.site import Site

FLEET_S = 1.0  # between looks at who announced himself


@dataclass(eq=False, slots=True)
class Line:
    """One try of one request with one controller."""

    record: Record
    passage: Passage
    member: Member
    site: Site | None  # None: nobody listens, or nobody can be reached
    asked_s: float
    refused: list[str]  # of the tries before: the codes of those who would not answer
    number: int = 0  # on the roster
    ready_s: float = 0.0  # when all that was sent has come
    is_over: bool = False
    cutter: EventCutter = field(default_factory=EventCutter)


class Front:
    """See the file's head. `public`: tokens of the public named prefixes."""

    def __init__(
        self, name: str, listed: list[str], public: list[tuple[int, ...]], network: Network, customers: Customers
    ) -> None:
        self.name, self.public, self.network, self.customers = name, public, network, customers
        self.roster = Roster(listed, network.circumstances.lost_s, network.now)
        self.lines: list[Line] = []
        self.is_alive = True

    def begin(self) -> None:
        self._watch()
        self._read()

    def end(self) -> None:
        """The process is gone: its clients lose their connections, and so do the controllers."""
        self.is_alive = False
        for line in self._open_lines():
            self._close(line)
            self.customers.left(line.record, "the gateway ended", self.network.now)

    def _open_lines(self) -> list[Line]:
        self.lines = [line for line in self.lines if not line.is_over]
        return list(self.lines)

    # --- who is there

    def _watch(self) -> None:
        for member in self.roster.members:
            self._probe(member)
        self._again(PROBE_S, self._watch)

    def _again(self, seconds: float, action: Action) -> None:
        if self.is_alive:
            self.network.agenda.after(seconds, action)

    def _probe(self, member: Member) -> None:
        network = self.network
        machine, site = network.site_at(member.address)
        patience_s, sent_at = min(self.roster.lost_s, PATIENCE_S), network.now
        there = f"site{machine}"
        at_s = network.arrival_s(self.name, there)
        if machine in network.silent or at_s - network.now > patience_s:
            self._again(patience_s, lambda: self.roster.unanswered(member, sent_at, network.now))
        elif site is None:
            network.later(at_s, lambda: self.roster.unanswered(member, sent_at, network.now))
        else:
            is_ready = site.is_ready
            network.later(at_s, lambda: self.roster.answered(member, is_ready, network.now))

    def _read(self) -> None:
        if not self.network.is_cut(self.name, REGISTRY):
            self.roster.heard(self.network.announced(), self.network.now)
        self._again(FLEET_S, self._read)

    # --- requests

    def ask(self, errand: Errand) -> None:
        """A client asks."""
        record = self.customers.asks(errand, self.name, self.network.now)
        prompt, found = Prompt(tuple(errand.submit.prompt), errand.submit.salt), dict[str, int]()
        if not self.network.is_cut(self.name, REGISTRY):
            for model_digest, block_size in self.roster.kinds:
                named = named_blocks(prompt, self.public, model_digest, block_size)
                note_found(found, named, self.network.hints, self.network.now)
        members = self.roster.order(len(prompt.ids), found)
        busy = Counter(line.member.address for line in self._open_lines())
        self.customers.routed(record, members, found, busy)
        self.network.seen["routed by prefix"] += bool(members) and found.get(members[0].id, 0) > 0
        self._next(record, Passage(members), [])

    def leave(self, number: int) -> None:
        """A client leaves."""
        for line in self._open_lines():
            if line.record.number == number:
                self._close(line)
                self.customers.left(line.record, "left", self.network.now)

    def _next(self, record: Record, passage: Passage, refused: list[str], is_excused: bool = False) -> None:
        """`is_excused`: whether the controller that is not asked any more is known to have failed."""
        network, member = self.network, passage.next()
        if member is None and passage.has_begun:
            self.customers.breaks_off(record, is_excused, network.now)
        elif member is None:
            self.customers.unanswered(record, refused, network.now)
        else:
            self._try(record, passage, member, refused)

    def _try(self, record: Record, passage: Passage, member: Member, refused: list[str]) -> None:
        network = self.network
        network.seen["retried"] += passage.num_tries > 1
        machine, site = network.site_at(member.address)
        line = Line(record, passage, member, site, network.now, refused)
        self.customers.tries(record, member.address, site)
        line.number = self.roster.begins(member, lambda: self._breaks(line), network.now)
        self.lines.append(line)
        line.ready_s = network.arrival_s(self.name, f"site{machine}")
        if machine in network.silent or line.ready_s - network.now > CONNECT_S:
            line.site = record.site = None
            self._again(CONNECT_S, lambda: self._breaks(line))
        elif site is None:
            network.later(line.ready_s, lambda: self._breaks(line))
        else:
            network.later(line.ready_s, lambda: self._connected(line, site))

    def _connected(self, line: Line, site: Site) -> None:
        if not line.is_over and site.is_alive:
            site.ask(line.record.errand, lambda data, is_all: self._sent(line, data, is_all))

    def _sent(self, line: Line, data: bytes, is_all: bool) -> None:
        """The controller wrote something: it comes, perhaps in parts."""
        network = self.network
        at = network.rng.randrange(len(data)) if network.rng.random() < 0.2 else len(data)
        for part, is_last in ((data[:at], False), (data[at:], is_all)):
            line.ready_s = network.arrival_s(f"site{line.site.number}" if line.site else "", self.name, line.ready_s)
            network.later(line.ready_s, lambda part=part, is_last=is_last: self._comes(line, part, is_last))  # type: ignore[misc]

    def _comes(self, line: Line, data: bytes, is_all: bool) -> None:
        if line.is_over:
            return
        events = list(line.cutter.feed(data))
        told = line.passage.heard(events)
        if told is None:
            self._close(line)
            reply = line.record.reply
            self.network.seen["refused, and asked elsewhere"] += 1
            self._next(line.record, line.passage, [*line.refused, reply.refused if reply else ""])
            return
        told += line.passage.ended() if is_all else b""
        if told:
            self.customers.told(line.record, told)
        if is_all:
            self._close(line)
            self.customers.answered(line.record, self.network.now)

    def broken(self, site: Site) -> None:
        """Connections to this life were reset."""
        for line in self._open_lines():
            if line.site is site:
                self._breaks(line)

    def _breaks(self, line: Line) -> None:
        """Nothing comes by this line any more."""
        if line.is_over:
            return
        self._close(line)
        self._next(line.record, line.passage, line.refused, self._is_excused(line))

    def _is_excused(self, line: Line) -> bool:
        """Whether the controller has died, or was not heard of for as long as it may be silent."""
        if line.site is None or not line.site.is_alive:
            return True
        since_s = self.network.now - self.roster.lost_s - 3 * PROBE_S
        return self.network.was_cut((self.name, f"site{line.site.number}"), since_s)

    def _close(self, line: Line) -> None:
        """The controller hears of it, if it is there."""
        line.is_over = True
        self.roster.ends(line.member, line.number)
        if line.site is not None:
            site, number = line.site, line.record.number
            at_s = self.network.arrival_s(self.name, f"site{site.number}", line.ready_s)
            self.network.later(at_s, lambda: site.leave(number))
