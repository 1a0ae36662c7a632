"""Hints about who holds what: bounded, ageing, and forgettable."""

from hypothesis import given
from hypothesis import strategies as st

from kilburn.controller.registry import InProcessRegistry

A, B = b"a" * 32, b"b" * 32


def test_learning_and_unlearning() -> None:
    registry = InProcessRegistry()
    registry.learn("one", [A, B], [], now=0.0)
    registry.learn("two", [A], [], now=1.0)
    assert registry.holders(A, now=2.0) == {"one", "two"}
    registry.learn("one", [], [A, A, b"never" * 8], now=3.0)
    assert registry.holders(A, now=3.0) == {"two"}
    registry.learn("two", [], [A], now=3.0)
    assert registry.holders(A, now=3.0) == frozenset()
    assert len(registry) == 1


def test_age() -> None:
    registry = InProcessRegistry(ttl_s=10.0)
    registry.learn("one", [A], [], now=0.0)
    assert registry.holders(A, now=10.0) == {"one"}
    assert registry.holders(A, now=10.1) == frozenset()
    registry.learn("one", [A], [], now=11.0)
    assert registry.holders(A, now=20.0) == {"one"}


@given(st.lists(st.tuples(st.sampled_from("xy"), st.binary(max_size=1), st.booleans())))
def test_it_equals_a_naive_one_within_its_bound(steps: list[tuple[str, bytes, bool]]) -> None:
    registry, naive = InProcessRegistry(max_digests=1000), set()
    small = InProcessRegistry(max_digests=3)
    for time, (group, digest, is_published) in enumerate(steps):
        published, withdrawn = ([digest], []) if is_published else ([], [digest])
        for each in (registry, small):
            each.learn(group, published, withdrawn, float(time))
        (naive.add if is_published else naive.discard)((group, digest))
        assert len(small) <= 3
        assert set(small._groups) == set(small._heard)
    for digest in {digest for _, digest, _ in steps}:
        assert registry.holders(digest, 0.0) == {group for group, known in naive if known == digest}
        assert small.holders(digest, 0.0) <= {"x", "y"}
