"""Which request ends workers, and that it takes no more of them, nor of its neighbours, with it.

    a worker is lost, of which no one can say why     every request with work under way there was in the blast
    twice, and it drew no token between               suspect: it is next computed alone, in steps of its own (a probe)
    the probe draws its token                         innocent, and back among the others
    the worker is lost again                          it fails by itself, with an error that says so

Whoever draws a token between two losses is not what causes them: a poisonous request takes the worker at the same
place each time it gets there. Its neighbours in the plan are suspects too, for a probe each. While one is probed the
others on that group hold their rows and wait; other groups do not notice.
"""

from kilburn.controller.core.sequence import Blasts, Group

TWICE = 2
POISON = (
    "the worker ended each time it computed this request, the last time with nothing beside it; it is not tried again"
)


def _mark(group: Group) -> tuple[int, int]:
    """How far a group has come. Any change is progress."""
    return group.num_drawn_by_ended, max((len(sequence.tokens) for sequence in group.live), default=0)


def is_suspect(group: Group) -> bool:
    return group.blasts.num >= TWICE and group.blasts.mark == _mark(group)


def was_in_blast(group: Group) -> None:
    """A worker was lost with work of this group under way."""
    mark, before = _mark(group), group.blasts
    group.blasts = Blasts(before.num + 1 if before.mark == mark else 1, mark)
