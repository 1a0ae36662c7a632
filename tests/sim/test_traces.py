"""Traces of every form give the same shape, plain or gz, and a fault names its line."""

import gzip
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from kilburn.controller.simulate.servegen import draw_requests, read_clients
from kilburn.controller.simulate.traces import Asked, TraceError, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,396,0
"""
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"
MOONCAKE = """{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 4500, "input_length": 10, "output_length": 1, "hash_ids": [0]}
"""
TOKENS = '{"input_toks": 7, "output_toks": 9, "arrival_time_ns": 1500000000, "input_tok_ids": [1]}\n'
TURN = '{"from": "%s", "value": "%s"}'
CHAT = '{"conversations": [%s, %s]}'
SHAREGPT = CHAT % (TURN % ("human", "eight ch"), TURN % ("gpt", "four"))
NO_ANSWER = CHAT % (TURN % ("gpt", "hello"), TURN % ("human", "hello"))

FORMS = {
    "azure": (AZURE, [Asked(0.0, 374, 44), Asked(0.5, 396, 1)]),
    "lengths": (LENGTHS, [Asked(None, 74, 918)]),
    "mooncake": (MOONCAKE, [Asked(0.0, 600, 5, "", (0, 1)), Asked(1.5, 10, 1, "", (0,))]),
    "tokens": (TOKENS, [Asked(0.0, 7, 9)]),
    "sharegpt lines": (f"{NO_ANSWER}\n{SHAREGPT}\n", [Asked(None, 2, 1, "eight ch")]),
    "alpaca array": (
        '[{"instruction": "Say it.", "input": "", "output": "It is said."}, {"instruction": "x", "output": ""},'
        ' {"instruction": "Say", "input": "it", "output": "said"}]',
        [Asked(None, 1, 2, "Say it."), Asked(None, 1, 1, "Say\nit")],
    ),
    "answers": ('{"id": "5", "L_gt": 160}\n{"L_gt": 0}\n', [Asked(None, 0, 160), Asked(None, 0, 1)]),
    "sharegpt array": (f"[{SHAREGPT},\n {NO_ANSWER}]", [Asked(None, 2, 1, "eight ch")]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_every_form_is_read(tmp_path: Path, form: str, pack: type[bytes]) -> None:
    text, asked = FORMS[form]
    path = tmp_path / "trace"
    path.write_bytes(pack(text.encode()))
    found = read_trace(path)
    assert [(a.num_prompt, a.num_output, a.text, a.prefix_blocks) for a in found] == [
        (a.num_prompt, a.num_output, a.text, a.prefix_blocks) for a in asked
    ]
    assert [a.at_s for a in found] == [a.at_s if a.at_s is None else pytest.approx(a.at_s) for a in asked]


FAULTS = [
    (AZURE.replace("396", "many"), ":3: ContextTokens is 'many'"),
    (AZURE.replace("374", "0"), ":2: ContextTokens is '0'"),
    (AZURE.replace("2023-11-16 18:15:47", "yesterday"), ":3: TIMESTAMP is"),
    ("a,b\n1,2\n", ":1: unknown columns"),
    (MOONCAKE + "{", ":4: not JSON"),
    (MOONCAKE.replace("10", '"x"'), ":3: input_length is 'x'"),
    (MOONCAKE.replace("[0]", "[-1]"), ":3: hash_ids"),
    (TOKENS + '{"tokens": 1}', ":2: expected one of conversations, input_length, input_toks"),
    (TOKENS + "3", ":2: expected an object"),
    (SHAREGPT.replace('"value"', '"text"'), ":1: conversations is no list"),
    ('{"instruction": 3, "output": "x"}', ":1: instruction, input and output must be texts"),
    ('{"L_gt": -1}', ":1: L_gt is -1"),
    ("[{},\n{}", ":2: not JSON"),
    (f"[{SHAREGPT}, 3]", ": entry 2: expected an object"),
    (NO_ANSWER, ": holds no request"),
]


@pytest.mark.parametrize(("text", "fault"), FAULTS)
def test_a_fault_names_the_file_and_the_line(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{fault}")


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(AZURE.encode())[:20])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


# --- clients of a service

STEADY = "0,4,1.0,Gamma,1.0,0.25\n600,0,0,,0,0\n"
BURSTS = "0,2,3.0,Weibull,0.5,0.9\n600,2,3.0,Weibull,0.5,0.9\n"
LENGTHS_OF = '{"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}"}, "900": %s}'
LATER = '{"input_tokens": "{40: 1.0}", "output_tokens": "{7.0: 2e-1}", "reason_ratio": "{0.5: 1.0}"}'


def service(folder: Path, trace: str = STEADY, dataset: str = LENGTHS_OF % LATER) -> Path:
    (folder / "chunk-1-trace.csv").write_text(trace)
    (folder / "chunk-1-dataset.json.gz").write_bytes(gzip.compress(dataset.encode()))
    (folder / "chunk-2-trace.csv").write_text(BURSTS)
    (folder / "chunk-2-dataset.json").write_text(LENGTHS_OF % LATER)
    return folder


def test_requests_are_drawn_as_the_clients_ask(tmp_path: Path) -> None:
    clients = read_clients(service(tmp_path))
    assert [client.mean_rate for client in clients] == [2.0, 2.0]
    drawn = draw_requests(clients, 1200.0, 0.0, seed=3)
    assert drawn == draw_requests(clients, 1200.0, 0.0, seed=3) != draw_requests(clients, 1200.0, 0.0, seed=4)
    times = [asked.at_s or 0.0 for asked in drawn]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 1200
    # 4 a second for ten minutes and 2 a second for twenty, within five standard deviations (bursts: cv 2.2).
    assert len(drawn) == pytest.approx(4800, abs=5 * (2400 + 5 * 2400) ** 0.5)
    for asked in drawn:
        early = (asked.at_s or 0.0) < 900
        assert (asked.num_prompt in (10, 20) and asked.num_output == 3) if early else (
            (asked.num_prompt, asked.num_output) == (40, 7)
        )  # fmt: skip
    # The second client's bursts: its gaps vary more than those of a Poisson process.
    steady, bursts = (list(client.draw(600.0, 1.0, Random(1))) for client in clients)
    assert variation(steady) == pytest.approx(1.0, abs=0.1)
    assert variation(bursts) > 1.5
    slower = draw_requests(clients, 1200.0, rate=1.0, seed=3)
    assert len(slower) == pytest.approx(1200, abs=5 * (600 + 5 * 600) ** 0.5)


def variation(asked: list[Asked]) -> float:
    gaps = [(b.at_s or 0.0) - (a.at_s or 0.0) for a, b in pairwise(asked)]
    return pstdev(gaps) / fmean(gaps)


@pytest.mark.parametrize(
    ("trace", "dataset", "fault"),
    [
        ("0,1,1,Gamma,1,1\n0,x,1,Gamma,1,1\n", "", "chunk-1-trace.csv:2: expected start,rate,cv"),
        ("0,1,1,Poisson,1,1\n", "", "chunk-1-trace.csv:1: expected"),
        ("0,1,1,Gamma,0,1\n", "", "chunk-1-trace.csv:1: expected"),
        ("", "", "chunk-1-trace.csv:1: holds no window"),
        (STEADY, "{\n,", "chunk-1-dataset.json.gz:2: not JSON"),
        (STEADY, "[1]", "chunk-1-dataset.json.gz: expected an object of windows"),
        (STEADY, LENGTHS_OF % '{"input_tokens": "__import__()"}', "input_tokens of window 900: expected a text"),
        (STEADY, LENGTHS_OF % '{"input_tokens": "{1: 2: 3}"}', "input_tokens of window 900: '1: 2: 3' is no"),
    ],
)
def test_a_fault_of_a_client_names_its_file(tmp_path: Path, trace: str, dataset: str, fault: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_clients(service(tmp_path, trace, dataset))
    assert fault in str(caught.value)


def test_a_folder_without_clients_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no chunk-N"):
        read_clients(tmp_path)
    (tmp_path / "chunk-1-trace.csv").write_text(STEADY)
    with pytest.raises(TraceError, match="has no chunk-1-dataset"):
        read_clients(tmp_path)
