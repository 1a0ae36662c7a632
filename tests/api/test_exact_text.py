"""Streamed text equals whole text for every cut and every stop string, over characters that are hard to cut."""

import json
from pathlib import Path

import pytest

from bench import text as exact
from tests.api.vocabularies import FAMILIES

HARD = [
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "\U0001f44b\U0001f3fd\u200d\u2642\ufe0f\U0001f1e8\U0001f1ed",
    "e\u0301 Z\u0351\u036b\u0343\u036a\u0302a\u0344l\u0357\u0308go",
    "漢字かな交じり文、한국어 조합 \u1112\u1161\u11ab",
    "\u202eabc\u202c \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\u0e01\u0e33\u0e25\u0e31\u0e07 \u0928\u092e\u0938\u094d\u0924\u0947 \u200b\ufeff\u2028\x00\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u0130i\u0131 \u1e9e ﬁ Ⅻ",
    " \t\n\r\n  two  blanks  ",
    "<|im_end|>\n<|im_start|>system </s> ' OR 1=1 -- <script>",
    "aaaaaaaaaaaaaaaaaaaab",
    "It is leading. It is",
]


@pytest.mark.parametrize("kind", FAMILIES)
def test_streamed_text_is_the_whole_text(kind: str) -> None:
    text = FAMILIES[kind]()
    assert [fault for written in HARD for fault in exact.faults_of(text, written)] == []


def test_the_command_finds_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strings = tmp_path / "strings.json"
    strings.write_text(json.dumps(["hello world", "漢"]))
    assert exact.main(["--strings", str(strings)]) == 0
    assert "2 texts       0 faults" in capsys.readouterr().out
    monkeypatch.setattr(exact, "read_slowly", lambda whole, stop, include: (whole.upper(), None))
    assert exact.main(["--strings", str(strings)]) == 1
    strings.write_text("{}")
    with pytest.raises(SystemExit):
        exact.main(["--strings", str(strings)])
