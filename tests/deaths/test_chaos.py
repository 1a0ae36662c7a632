"""A short run of the chaos bench, with real workers on a tiny model: everything must hold that a long one demands."""

from pathlib import Path

import pytest

from bench import chaos
from tests.worker.tiny_models import make_tiny


def test_nothing_is_lost_while_everything_breaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny(tmp_path / "tiny-llama", "llama")
    words = ["--seconds=25", "--seed=23", "--calm=1", f"--model={model}", f"--logs={tmp_path / 'logs'}"]
    assert chaos.main(words) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "clean" in said
    assert "worker killed" in said
