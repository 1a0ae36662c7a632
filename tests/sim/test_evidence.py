"""The evidence's own code, on data made here: laws of its figures, lengths of texts, faults that name their line."""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gguf import GGUFWriter

from bench import paper, paper_blocks, paper_figures, paper_sharing
from bench.paper_data import (
    ALPACA,
    AZURE,
    CLIENTS,
    MOONCAKE,
    PAIRS,
    ROW_S,
    SENTENCES,
    SHAREGPT,
    Apart,
    Data,
    DearRows,
    served,
    slower,
)
from bench.paper_lengths import (
    LLAMA,
    OPT,
    chats,
    conversations,
    counter,
    first_turns,
    instructions,
    mean_filled,
    sessions,
    translations,
)
from kilburn.controller.simulate.demand import best_hit_share
from kilburn.controller.simulate.outcome import outcome_of
from kilburn.controller.simulate.roofline import Linear, Load
from kilburn.controller.simulate.sizing import run_controller
from kilburn.controller.simulate.traces import Asked, TraceError

BYTES = [chr(256 + byte) if byte < 33 or 126 < byte < 161 or byte == 173 else chr(byte) for byte in range(256)]


def write_vocabulary(path: Path, kind: str) -> None:
    """One that cuts text into its bytes."""
    plain = path.with_suffix(".plain")
    writer = GGUFWriter(plain, "llama")
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(BYTES)
        writer.add_token_merges([])
    else:
        writer.add_token_list(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])
        writer.add_token_types([2] + [6] * 256)
        writer.add_token_scores([0.0] * 257)
        writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def talk(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": "gpt" if i % 2 else "human", "value": text} for i, text in enumerate(texts)]}


def lines_of(rows: Iterable[Any]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data of every form, under the names that the figures ask for."""
    root, rng = tmp_path_factory.mktemp("data"), Random(7)
    (root / "deep").mkdir()
    write_vocabulary(root / OPT, "gpt2")
    write_vocabulary(root / "deep" / LLAMA, "llama")
    talks = [talk(*("x" * rng.randint(20, 700) for _ in range(2 * rng.randint(1, 3)))) for _ in range(40)]
    (root / "deep" / SHAREGPT).write_bytes(gzip.compress(lines_of(talks)))
    asks = [
        {"instruction": "i" * rng.randint(5, 30), "input": "", "output": "o" * rng.randint(10, 120)} for _ in range(40)
    ]
    (root / ALPACA).write_bytes(gzip.compress(json.dumps(asks).encode()))
    (root / SENTENCES).write_text("\n".join("e" * rng.randint(10, 60) for _ in range(40)))
    (root / PAIRS).write_text("\n".join(f"en\t1\t{'e' * 20}\tn\tp\t{'g' * 30}\t\t" for _ in range(4)))
    for file in AZURE.values():
        rows = [f"2023-11-16 18:15:{i:02}.5,{rng.randint(50, 900)},{rng.randint(5, 90)}" for i in range(40)]
        (root / file).write_bytes(gzip.compress("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]).encode()))
    for file in MOONCAKE.values():
        blocks = [[0, 1, 2 + i % 3, 10 + i] for i in range(30)]
        entries = [{"timestamp": 200 * i, "input_length": 1800, "output_length": 20, "hash_ids": ids}
                   for i, ids in enumerate(blocks)]  # fmt: skip
        (root / file).write_bytes(gzip.compress(lines_of(entries)))
    for name in CLIENTS.values():
        (root / name).mkdir()
        (root / name / "chunk-1-trace.csv").write_text("0,4,1.0,Gamma,1.0,0.25\n")
        dataset = {"0": {"input_tokens": "{100: 1.0}", "output_tokens": "{30: 1.0}"}}
        (root / name / "chunk-1-dataset.json").write_text(json.dumps(dataset))
    return root


def made(folder: Path, into: Path, only: str, share: float) -> dict[str, dict[str, Any]]:
    """Figures by name, as their files have them."""
    assert (
        paper.main(["--data", f"{folder}", "--into", f"{into}", "--jobs", "1", "--only", only, "--share", f"{share}"])
        == 0
    )
    found = {}
    for name in only.split(","):
        found[name] = json.loads((into / "evidence" / f"figure-{name}.json").read_text())
        assert all(len(row) == len(found[name]["heads"]) for row in found[name]["rows"])
        assert found[name]["rows"]
        assert found[name]["data"]
        assert found[name]["command"].startswith(f"python bench/paper.py --data DATA --only {name}")
        for panel in found[name]["panels"]:
            assert all(len(xs) in (0, len(ys)) and ys for xs, ys in panel["lines"].values())
        assert "<svg" in (into / "evidence" / f"figure-{name}.svg").read_text()
    return found


def column(figure: dict[str, Any], head: str) -> list[float]:
    return [float(row[figure["heads"].index(head)]) for row in figure["rows"]]


def test_where_memory_goes(folder: Path, tmp_path: Path) -> None:
    figures = made(folder, tmp_path, "2,13,15", share=0.02)
    shares = [column(figures["2"], f"{kind} %") for kind in ("used", "reserved", "internal", "external")]
    assert [sum(parts) for parts in zip(*shares, strict=True)] == pytest.approx([100.0] * 4, abs=0.3)
    assert shares[0] == sorted(shares[0])  # Max, Pow2, Oracle, paged
    assert shares[0][3] > 2 * shares[0][1]
    together = column(figures["13"], "mean in a step")
    assert together[0] == pytest.approx(7.0, abs=0.2)  # what Max holds of 2,048 each, whatever comes
    assert together[0] <= together[1] <= together[2] + 0.5
    assert column(figures["13"], "slower steps")[3] > together[3]
    assert len(figures["15"]["rows"]) == 18
    for row in figures["15"]["rows"]:
        assert 0 < float(row[3]) < 100 * (1 - 1 / int(row[2]))  # of so many sequences all but one at most


def test_latency_against_rate(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {("opt-66b", ALPACA): (1.0, 8.0), ("opt-13b", SHAREGPT): (0.5, 2.0)}
    monkeypatch.setattr(paper_figures, "FIGURE_12", fewer)
    monkeypatch.setattr(paper_sharing, "FIGURE_14", {("samples", 2): (8.0,), ("beams", 4): (8.0,)})
    monkeypatch.setattr(paper_sharing, "RATES_OF_BEAMS", (8.0,))
    monkeypatch.setattr(paper_sharing, "RATES_OF_ROWS", {1: (8.0,), 5: (8.0,)})
    figures = made(folder, tmp_path, "12,14,beams,16,rows,17", share=0.004)
    for figure in figures.values():
        for panel in figure["panels"]:
            for rates, latencies in panel["lines"].values():
                assert rates == sorted(rates)
                assert all(latency > 0 for latency in latencies)
    assert {row[0] for row in figures["12"]["rows"]} == {
        "OPT-66B, Alpaca",
        "OPT-13B, ShareGPT",
        "OPT-13B, ShareGPT, slower steps",
    }
    assert all(float(row[2]) > 0 for row in figures["17"]["rows"])
    assert (len(figures["beams"]["rows"]), len(figures["rows"]["rows"])) == (3, 2)


def test_blocks_and_what_leaves(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_blocks, "BLOCK_SIZES", (16, 256))
    figures = made(folder, tmp_path, "18,19,blocks,links", share=0.008)
    assert all(cost > 0 for cost in column(figures["18"], "attention / read"))
    few, much = column(figures["18"], "ShareGPT: waste %")
    assert few < much
    recompute = column(figures["19"], "recomputing it")
    assert min(recompute) == max(recompute) > 0  # does not depend on the block
    assert {row[-1] for row in figures["blocks"]["rows"]} <= {"16", "256"}
    assert len(figures["links"]["rows"]) == 5


def test_recorded_traffic(folder: Path, tmp_path: Path) -> None:
    figures = made(folder, tmp_path, "azure,prefixes,tier,fair", share=0.02)
    heads = figures["azure"]["heads"]
    for row in figures["azure"]["rows"]:  # nobody's first token comes sooner than with the device alone
        assert float(row[heads.index("first token p50, s")]) >= float(row[heads.index("best")]) - 0.001
    for name in ("prefixes", "tier"):
        found, best = column(figures[name], "found %"), column(figures[name], "endless cache")
        assert all(a <= b for a, b in zip(found, best, strict=True))
        assert max(best) > 20


def test_a_figure_is_made_alone_and_the_document_of_all_that_are_there(folder: Path, tmp_path: Path) -> None:
    for only in ("fair", "2"):
        made(folder, tmp_path, only, share=0.005)
    text = (tmp_path / "EVIDENCE.md").read_text()
    assert text.index("(Figure 2)") < text.index("## Order of arrival")  # in its own order, whichever came last
    assert f"`python bench/paper.py --data DATA --only fair --share 0.005` on {SHAREGPT}" in text
    assert paper.main(["--into", f"{tmp_path}"]) == 0  # without data: the document again
    assert (tmp_path / "EVIDENCE.md").read_text() == text


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["--data", f"{tmp_path}", "--into", f"{tmp_path / 'docs'}", "--only", "azure"]) == 1
    assert f"figure azure: left out; {tmp_path}: holds no {AZURE['Azure conversation']}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        paper.main(["--only", "3", "--into", f"{tmp_path}"])
    assert "--only: no figure 3; there are 2, 12" in capsys.readouterr().err


# --- lengths


def test_lengths_are_counted_by_the_vocabulary(folder: Path, tmp_path: Path) -> None:
    tokens, path = counter(folder / OPT), tmp_path / "talks"
    assert tokens("añ") == 3
    path.write_bytes(lines_of([talk("ask", "answer", "more", "said"), talk("lonely"), talk("abc", "de")]))
    assert list(first_turns(path, tokens)) == [Asked(None, 4, 6), Asked(None, 4, 2)]
    assert list(chats(path, tokens, most=8)) == [Asked(None, 4, 6), Asked(None, 8, 4), Asked(None, 4, 2)]
    path.write_text(
        '[{"instruction": "ab", "input": "c", "output": "def"}, {"instruction": "a", "input": "", "output": ""}]'
    )
    assert list(instructions(path, tokens)) == [Asked(None, 5, 3)]
    for one in translations(folder / SENTENCES, folder / PAIRS, tokens):
        assert one.num_output == round(one.num_prompt * 30 / 20) + 1
    # Steps of an answer of 4 to a prompt of 10 look at 12 slots in the mean, those of one of 2 to 1 at 2.
    assert mean_filled([Asked(None, 10, 4), Asked(None, 1, 2)]) == pytest.approx((4 * 12 + 2 * 2) / 6)


FAULTS: list[tuple[Callable[[Path], Any], str, str]] = [
    (
        lambda path: list(first_turns(path, len)),
        '{"conversations": []}\n{"conversations": [{"from": "gpt"}]}',
        ":2: expected",
    ),
    (lambda path: list(first_turns(path, len)), '{"conversations": []}\n{', ":2: not JSON"),
    (lambda path: list(instructions(path, len)), '[{"instruction": "a", "input": ""}]', ": entry 1: expected"),
    (lambda path: list(translations(path, path, len)), "a\tb\tc\td\te\tf\na\tb", ":2: expected 8 columns"),
    (lambda path: counter(path), "no vocabulary", ": no GGUF file with a vocabulary"),
]


@pytest.mark.parametrize(("read", "text", "fault"), FAULTS)
def test_a_fault_names_the_file_and_the_line(
    tmp_path: Path, read: Callable[[Path], Any], text: str, fault: str
) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{fault}")


def test_what_was_said_is_found_again(folder: Path) -> None:
    talks = list(conversations(folder / "deep" / SHAREGPT))
    asked = sessions(talks, len, rate=0.2, seconds=400.0, pause_s=50.0, max_len=4096)
    later = [one for one in asked if one.before]
    assert later
    assert all(one.num_prompt > sum(one.before) for one in later)
    assert [one.at_s for one in asked] == sorted(one.at_s or 0.0 for one in asked)
    best = best_hit_share(asked, 16)
    assert 0.3 < best < 1
    # Answers end long before the next question, and nothing is evicted: all that an endless cache would have.
    assert outcome_of(*run_controller(served(), asked)).hit_share == pytest.approx(best, abs=0.01)


def test_machines_that_show_why_numbers_differ() -> None:
    machine = Linear(fixed_s=1.0, row_s=0.1, token_s=0.01)
    both, rows, chunks = Load(num_rows=5, num_sampled=6), Load(num_rows=5), Load(num_chunks=1, num_chunk_tokens=50)
    both.num_chunks, both.num_chunk_tokens = 1, 50
    assert Apart(machine).seconds(both)[1] == pytest.approx(machine.seconds(both)[1] + 1.0)
    for load in (rows, chunks):
        assert Apart(machine).seconds(load) == machine.seconds(load)
    assert slower("opt-13b").machine.seconds(rows)[1] > 0.01
    assert DearRows(machine).seconds(both)[1] == pytest.approx(machine.seconds(both)[1] + 6 * ROW_S)


def test_data_is_found_at_any_depth(folder: Path) -> None:
    assert Data(folder).path(LLAMA) == folder / "deep" / LLAMA
    with pytest.raises(TraceError, match=r"holds no absent\.csv"):
        Data(folder).path("absent.csv")
