"""Several ranks say what one says: token for token, whatever moves, forks or is computed again meanwhile.

Rank 0 is this process; the others are three processes that play all worlds. Each world is pressed, so that it preempts,
and compared with one rank that has room for everything, by the rule of all twins: tokens are equal up to where the two
best of them are nearer to each other than TOLERANCE.
"""

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from kilburn.controller.core.events import BeamSettings, Submit
from kilburn.controller.core.policy import Preemption
from kilburn.shared.config import SettingsError
from kilburn.shared.messages import StepPlan
from kilburn.shared.model_files import ModelRefused
from kilburn.shared.sampling import Sampling
from kilburn.worker.measured import held
from kilburn.worker.models import weights
from kilburn.worker.parallel import Part, Ranks, bound_address, interface_of
from kilburn.worker.start import make_ready
from tests.worker.ranked import Crew, Ranked, loaded_with
from tests.worker.served import Answer
from tests.worker.tiny_models import make_tiny

TOLERANCE = 1e-4
PRESSED: dict[str, Any] = {"num_blocks": 26, "host_pool": 8 << 20}
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, logprobs=2),
    "drawn": Sampling(temperature=0.9, seed=7),
    "penalties": Sampling(temperature=0.7, presence_penalty=0.8, repetition_penalty=1.3, top_k=40, top_p=0.9, seed=3),
    "stop ids": Sampling(temperature=1.1, min_tokens=4, stop_ids=tuple(range(0, 320, 9)), seed=5),
}


def submits() -> list[Submit]:
    """Each sampling once alone and once as three of a prompt, prompts that begin alike, and a search for beams."""
    found = []
    for number, sampling in enumerate(SAMPLINGS.values()):
        prompt = tuple((11 * i + 5) % 320 for i in range(14)) + (number,) * (2 + number)
        found += [Submit(2 * number, prompt, 16, sampling, 1), Submit(2 * number + 1, prompt[3:], 9, sampling, 3)]
    beams = BeamSettings(3)
    return [*found, Submit(90, (7, 8, 9, 10, 11, 12), 8, Sampling(temperature=0.0, seed=1), 2, beams=beams)]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(3)
    yield made
    made.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda kind: make_tiny(tmp_path_factory.mktemp("ranks") / kind, kind, with_tokenizer=False))


@pytest.fixture(scope="module")
def alone(folder: Any) -> Any:
    """What one rank says that has room for all."""

    def answers(kind: str) -> dict[tuple[int, int], Answer]:
        ranked = Ranked(folder(kind), 1, Crew(0))
        found = ranked.answers(submits())
        assert ranked.snapshot.preempted_by_swap == ranked.snapshot.preempted_by_recompute == 0
        return found

    return cache(answers)


def check(ours: dict[tuple[int, int], Answer], theirs: dict[tuple[int, int], Answer]) -> None:
    assert ours.keys() == theirs.keys()
    for key, answer in ours.items():
        expected = theirs[key]
        differ = [i for i, (a, b) in enumerate(zip(answer.tokens, expected.tokens, strict=False)) if a != b]
        if differ:
            beside = expected.logprobs[differ[0]]
            assert len(beside) == 3, f"{key} differs at {differ[0]}"  # greedy: the token, and the two likeliest
            gap = beside[1][1] - beside[2][1]
            print(f"{key} differs at {differ[0]}: the gap of the two best is {gap:.2e}")
            assert gap <= TOLERANCE
            continue
        assert (len(answer.tokens), answer.reason) == (len(expected.tokens), expected.reason), key
        assert answer.score == pytest.approx(expected.score, abs=1e-3)
        for one, other in zip(answer.logprobs, expected.logprobs, strict=True):
            assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=1e-3), key


WORLDS = [
    ("llama", 2, Preemption.SWAP),
    ("llama", 4, Preemption.RECOMPUTE),  # four heads and two KV heads: each of these lies with two ranks
    ("qwen3", 2, Preemption.RECOMPUTE),
    ("qwen3", 4, Preemption.SWAP),
    ("opt", 2, Preemption.RECOMPUTE),  # its embedding is its head
    ("opt", 4, Preemption.SWAP),
    ("smollm", 3, Preemption.SWAP),  # so is this one's, and 320 tokens are not three equal shares
]


@pytest.mark.parametrize(("kind", "world", "way"), WORLDS)
def test_several_ranks_under_pressure_say_what_one_says(
    kind: str, world: int, way: Preemption, crew: Crew, folder: Any, alone: Any
) -> None:
    ranked = Ranked(folder(kind), world, crew, preemption=way, verify_swap=True, **PRESSED)
    check(ranked.answers(submits()), alone(kind))
    found = ranked.snapshot
    assert found.ranks == world
    if way is Preemption.SWAP:
        assert found.preempted_by_swap >= 1
        assert found.swapped_in >= 1
    else:
        assert found.preempted_by_recompute >= 1


def test_ranks_that_were_told_differently_end_the_lease_and_begin_anew(crew: Crew, folder: Any, alone: Any) -> None:
    """One plan reaches one rank with another step's number of blocks to move: a copy of a block onto a free one."""
    spoilt: list[int] = []

    def spoil(rank: int, plan: StepPlan) -> StepPlan:
        if plan.step != 5 or plan.lease != 1:
            return plan
        spoilt.append(rank)
        changed = StepPlan(plan.lease, plan.step, plan.rows, plan.counts, plan.grown_at, plan.grown_blocks, plan.admits)
        changed.copies = [(198, 199)]
        return changed

    ranked = Ranked(folder("llama"), 2, crew, spoil=spoil)
    check(ranked.answers(submits()), alone("llama"))
    assert spoilt == [1]
    assert [note.text for note in ranked.notes if "disagrees" in note.text] == [
        "lease 1: rank 1 disagrees about step 5"
    ]


def test_a_block_that_one_rank_cannot_read_is_lost_for_all(crew: Crew, folder: Any, alone: Any) -> None:
    ranked = Ranked(folder("opt"), 2, crew, preemption=Preemption.SWAP, verify_swap=True, **PRESSED)
    crew.members[0].ask("damage")
    assert crew.members[0].answer() == {"damaging": True}
    check(ranked.answers(submits()), alone("opt"))
    assert sum(len(result.lost) for result in ranked.results) >= 1


# --- parts


@pytest.mark.parametrize(("kind", "world"), [("llama", 2), ("llama", 4), ("opt", 2), ("smollm", 3)])
def test_a_rank_holds_its_own_part_and_no_more(kind: str, world: int, folder: Any) -> None:
    def own_bytes(part: Part) -> int:
        loaded = weights.load(folder(kind), torch.float32, torch.device("cpu"), ranks=Ranks(part))
        assert loaded.digest == weights.load(folder(kind), torch.float32, torch.device("cpu")).digest
        return held(loaded.model).own_bytes

    whole = own_bytes(Part())
    parts = [own_bytes(Part(rank, world)) for rank in range(world)]
    assert max(parts) < whole * 0.75
    assert max(parts) - min(parts) < whole * 0.02


@pytest.mark.parametrize(
    ("kind", "world", "works"), [("llama", 3, "1, 2, 4"), ("smollm", 2, "1, 3"), ("opt", 8, "1, 2, 4")]
)
def test_a_split_that_does_not_divide_is_refused_with_those_that_do(
    kind: str, world: int, works: str, folder: Any
) -> None:
    with pytest.raises(ModelRefused, match=rf"^--tp {world}: .*; give one of {works}"):
        make_ready(loaded_with(folder(kind), world, 0))


def test_static_scales_are_those_of_one_rank_cut_by_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured by whoever holds the whole model, and kept; without that several ranks ask for it."""
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path))
    settings: dict[str, Any] = {"kv_dtype": "int8", "kv_scales": "static", "max_len": 32}
    short = make_tiny(tmp_path / "model", "qwen3", with_tokenizer=False, overrides={"max_position_embeddings": 32})
    with pytest.raises(SettingsError, match="--tp 1"):
        make_ready(loaded_with(short, 2, 0, **settings))
    whole = make_ready(loaded_with(short, 1, 0, **settings))
    for world, rank, head in ((2, 1, 1), (4, 2, 1)):
        part = make_ready(loaded_with(short, world, rank, **settings))
        assert part.hello.model_digest == whole.hello.model_digest
        scales, all_scales = part.executor.runner.cache.scales, whole.executor.runner.cache.scales
        assert scales is not None
        assert all_scales is not None
        assert all((one == other[:, [head]]).all() for one, other in zip(scales, all_scales, strict=True))
    settings["kv_scales"] = "auto"
    assert make_ready(loaded_with(short, 2, 0, **settings)).hello.layout.scale_bytes > 0


# --- where they meet


def test_collectives_stay_on_loopback_unless_asked_by_name() -> None:
    assert bound_address("lo", False) == bound_address("127.0.0.1", False) == "127.0.0.1"
    assert bound_address("::1", False) == "::1"
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(SettingsError, match="--insecure-collectives"):
        bound_address("10.1.2.3", False)
    assert bound_address("10.1.2.3", True) == "10.1.2.3"
    with pytest.raises(SettingsError, match=r"no interface 'eth77' here; give one of .*lo"):
        bound_address("eth77", True)


def listening_at(pid: int) -> set[str]:
    """Addresses, in hex as /proc has them, at which a process accepts connections."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = entry.readlink() if entry.is_symlink() else Path()
        if str(target).startswith("socket:["):
            inodes.add(str(target)[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(words[1].partition(":")[0])
    return found


def test_nothing_listens_beyond_the_address_that_was_given(crew: Crew, folder: Any) -> None:
    """Neither the store that the ranks meet at nor the sockets that they compute over."""
    ranked = Ranked(folder("llama"), 2, crew)
    ranked.answers(submits()[:1])
    for pid in (os.getpid(), crew.members[0].process.pid):
        assert listening_at(pid) <= {"0100007F"}, "something listens beyond 127.0.0.1"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", "names no place"),
        ("localhost:80/" + "a" * 32, "names no place"),
        ("127.0.0.1:80/../../etc", "names no place"),
        ("10.0.0.1:80/" + "a" * 32, "see --collectives"),
    ],
)
def test_ranks_meet_nowhere_but_where_they_were_bound(place: str, words: str) -> None:
    ranks = Ranks(Part(1, 2))
    with pytest.raises(RuntimeError, match=words):
        ranks.meet(place, 1.0)
    with pytest.raises(RuntimeError, match="have parted"):
        ranks.sum(torch.zeros(1))


def test_what_is_asked_of_nccl_is_what_torch_says_of_it() -> None:
    """No CPU build of torch has NCCL's process group. Its declarations are here, and the class that it is a kind of."""
    declared = ast.parse((Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text())
    [nccl] = [node for node in declared.body if isinstance(node, ast.ClassDef) and node.name == "ProcessGroupNCCL"]
    [made] = [node for node in nccl.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    [options] = [node for node in nccl.body if isinstance(node, ast.ClassDef) and node.name == "Options"]
    assert [ast.unparse(base) for base in nccl.bases] == ["Backend"]
    assert [argument.arg for argument in made.args.args] == ["self", "store", "rank", "size", "options"]
    assert [ast.unparse(base) for base in options.bases] == ["Backend.Options"]
    kind = torch._C._distributed_c10d.Backend
    assert all(callable(getattr(kind, name)) for name in ("allreduce", "gather", "abort", "set_timeout"))
    assert hasattr(kind.Options, "_timeout")


def test_a_collective_may_take_what_its_step_may_and_no_longer() -> None:
    first, second = Ranks(Part(0, 2)), Ranks(Part(1, 2))
    place, floor_s = first.place(), 60.0
    meeting = Thread(target=second.meet, args=(place, floor_s))
    meeting.start()
    first.meet(place, floor_s)
    meeting.join()
    assert first._words is not None
    for plan_s, patience_s in ((0.0, 60.0), (75.0, 75.0), (5.0, 60.0)):
        first.allow(plan_s)
        assert first._words.options._timeout.total_seconds() == patience_s
    first.part_ways()
    second.part_ways()
