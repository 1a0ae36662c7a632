"""Traces of every form give the same shape, plain or gz, and a fault names its line."""

import gzip
from pathlib import Path

import pytest

from bench.traces import Asked, TraceError, read_trace

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
