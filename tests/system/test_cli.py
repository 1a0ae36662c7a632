"""The command line as a user meets it: help, faults, statuses."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kilburn.shared.model_files import BUNDLED_NAME


def kilburn(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kilburn.controller.cli", *words],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("words", [[], ["--help"], ["help"], ["-h"]])
def test_without_a_command_it_says_what_there_is(words: list[str]) -> None:
    done = kilburn(*words)
    assert done.returncode == 0
    for word in ("serve", "controller", "worker", "keys", BUNDLED_NAME):
        assert word in done.stdout


@pytest.mark.parametrize("command", ["serve", "controller", "worker", "keys"])
def test_every_command_has_its_help(command: str) -> None:
    done = kilburn(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: kilburn {command}")


def test_the_version_is_one_line() -> None:
    done = kilburn("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kilburn ")


def test_an_unknown_command_is_answered_with_the_nearest() -> None:
    done = kilburn("sreve")
    assert done.returncode == 2
    assert "did you mean serve?" in done.stderr


@pytest.mark.parametrize("command", ["serve", "controller", "worker"])
def test_all_faults_come_at_once_and_nothing_is_started(command: str) -> None:
    done = kilburn(command, "--max-step-tokens", "x", "--nonsense", "1", KILBURN_PROT="1")
    assert done.returncode == 2
    for part in (
        "4 settings need a change",
        "--max-step-tokens: 'x'",
        "--nonsense",
        "KILBURN_PROT",
        "--model: missing",
    ):
        assert part in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["serve", "controller", "worker"])
def test_a_model_that_is_not_there_is_named(command: str, tmp_path: Path) -> None:
    done = kilburn(command, str(tmp_path / "none"))
    assert done.returncode == 2
    assert str(tmp_path / "none") in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_are_made_for_their_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    done = kilburn("keys", "new", str(folder), "gpu-1", "gpu-2")
    assert done.returncode == 0, done.stderr
    assert {file.name for file in folder.iterdir()} == {"controller.key", "workers.allow", "gpu-1.key", "gpu-2.key"}
    for file in folder.iterdir():
        assert str(file) in done.stdout
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
    before = (folder / "controller.key").read_bytes()
    again = kilburn("keys", "new", str(folder))
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    assert (folder / "controller.key").read_bytes() == before


def test_keys_without_a_folder_is_a_fault() -> None:
    assert kilburn("keys", "new").returncode == 2
