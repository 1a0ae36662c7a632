"""A request waits for its grammar out of the line: asked for, answered, asked for again, denied, forgotten."""

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Cancel, Effect, Event, Refusal, Refused, Send, Submit, Tick
from kilburn.controller.core.grammars import MOST_ASKED
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.grammar import Grammar
from kilburn.shared.messages import Forget, FromWorker, Prepare, Prepared, StepPlan, Unpreparable
from kilburn.shared.sampling import Sampling
from tests.core.worker import hello

PEER = b"w.0"
ONE, OTHER = Grammar.of('start: "a"'), Grammar.of('start: "b"')


def bound(number: int, grammar: Grammar | None = ONE) -> Submit:
    digest = b"" if grammar is None else grammar.digest
    return Submit(number, (1, 2, 3), 4, Sampling(temperature=0.0, grammar=digest), grammar=grammar)


class Asked:
    """An engine, and what it says to its one worker."""

    def __init__(self) -> None:
        self.engine, self.now = Engine(EngineSettings(depth=16, prepare_s=5.0, silence_s=1e9)), 0.0
        self.effects: list[Effect] = []
        self.tell(Arrived(PEER, hello()))

    def tell(self, *events: Event, after_s: float = 0.0) -> list[object]:
        """Returns the messages that this brings about, as far as they are about grammars or plans."""
        self.now += after_s
        self.effects = self.engine.handle(events, self.now)
        self.engine.validate()
        sent = [effect.message for effect in self.effects if isinstance(effect, Send)]
        return [message for message in sent if isinstance(message, Prepare | Forget | StepPlan)]

    def hear(self, message: FromWorker) -> list[object]:
        return self.tell(Arrived(PEER, message))

    @property
    def refusals(self) -> dict[int, Refusal]:
        return {effect.request_id: effect.refusal for effect in self.effects if isinstance(effect, Refused)}

    @property
    def num_waiting(self) -> int:
        (group,) = self.engine.snapshot().groups
        return group.waiting_for_grammar


def admitted(messages: list[object]) -> list[bytes]:
    return [admit.sampling.grammar for plan in messages if isinstance(plan, StepPlan) for admit in plan.admits]


def test_nobody_else_waits_for_a_grammar() -> None:
    asked = Asked()
    assert asked.tell(bound(1), bound(2)) == [Prepare(1, 1, ONE.digest, ONE.source)]  # once for both
    assert asked.num_waiting == 2
    assert [row.wait for row in asked.engine.block_map().requests] == ["its grammar", "its grammar"]
    assert admitted(asked.tell(bound(3, None))) == [b""]
    assert admitted(asked.hear(Prepared(1, 1))) == [ONE.digest, ONE.digest]
    assert asked.num_waiting == 0
    assert admitted(asked.tell(bound(4))) == [ONE.digest]  # it is there


def test_plans_go_as_deep_with_a_grammar_as_without() -> None:
    bound_one, free_one = Asked(), Asked()
    bound_one.tell(bound(1))
    free = [(plan.rows, plan.counts) for plan in free_one.tell(bound(1, None)) if isinstance(plan, StepPlan)]
    held = [(plan.rows, plan.counts) for plan in bound_one.hear(Prepared(1, 1)) if isinstance(plan, StepPlan)]
    assert held == free  # no result is back, and no token known
    assert len(held) == 4


def test_an_answer_is_to_one_asking() -> None:
    asked = Asked()
    asked.tell(bound(1))
    assert asked.tell(Cancel(1)) == [Forget(1, ONE.digest)]
    assert asked.tell(bound(2)) == [Prepare(1, 2, ONE.digest, ONE.source)]
    assert asked.hear(Prepared(1, 1)) == []  # that one was forgotten since
    assert asked.num_waiting == 1
    assert admitted(asked.hear(Prepared(1, 2))) == [ONE.digest]
    assert asked.hear(Prepared(1, 2)) == asked.hear(Prepared(1, 9)) == []


def test_what_cannot_be_had_refuses_those_who_need_it() -> None:
    asked = Asked()
    asked.tell(bound(1), bound(2), bound(3, OTHER))
    assert asked.hear(Unpreparable(1, 1, "no")) == [Forget(1, ONE.digest)]
    assert asked.refusals == {1: Refusal.GRAMMAR, 2: Refusal.GRAMMAR}
    assert admitted(asked.hear(Prepared(1, 2))) == [OTHER.digest]


def test_a_worker_that_does_not_answer_is_asked_again_and_then_no_more() -> None:
    asked = Asked()
    asked.tell(bound(1))
    for number in range(2, MOST_ASKED + 1):
        assert asked.tell(Tick(), after_s=4.9) == []
        assert asked.engine.deadline is not None
        assert asked.engine.deadline <= asked.now + 0.11
        assert asked.tell(Tick(), after_s=0.1) == [Prepare(1, number, ONE.digest, ONE.source)]
    assert asked.tell(Tick(), after_s=5.0) == [Forget(1, ONE.digest)]
    assert asked.refusals == {1: Refusal.NO_WORKER}
    assert asked.engine.is_idle
    (group,) = asked.engine.snapshot().groups
    assert (group.grammars, group.grammars_prepared, group.grammars_failed) == (0, 0, 1)
