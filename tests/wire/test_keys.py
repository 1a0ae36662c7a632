"""Key files, and where a link may be without them."""

import stat
from pathlib import Path

import pytest

from kilburn.controller.link import ControllerLink, new_keys
from kilburn.shared.keys import ControllerKeys, SettingError, WorkerKeys, checked_endpoint
from kilburn.worker.link import WorkerLink

LOCAL = [
    ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
    ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
    ("tcp://127.3.2.1:0", "tcp://127.3.2.1:0"),
    ("tcp://[::1]:5555", "tcp://[::1]:5555"),
    ("tcp://[::ffff:127.0.0.1]:5555", "tcp://127.0.0.1:5555"),
    ("tcp://localhost:5555", "tcp://127.0.0.1:5555"),
    ("ipc:///tmp/kilburn", "ipc:///tmp/kilburn"),
]
BEYOND = [
    "tcp://*:5555",
    "tcp://0.0.0.0:5555",
    "tcp://[::]:5555",
    "tcp://10.0.0.1:5555",
    "tcp://127.0.0.1.example.invalid:5555",
    "tcp://eth0:5555",
    "tcp://lo:5555",
    "tcp://[::ffff:10.0.0.1]:5555",
    "tcp://0:5555",
    "tcp://[fe80::1]:5555",
]
NONSENSE = [
    "",
    "127.0.0.1:5555",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:99999",
    "tcp://127.0.0.1:5555;tcp://0.0.0.0:5555",
    "tcp://127.0.0.1:5555 ",
    "tcp://127.0.0.1:5555\n",
    "inproc://kilburn",
    "ipc://*",
    "ipc://@abstract",
    "ipc://relative",
    "ipc:///" + "x" * 200,
    "pgm://127.0.0.1;239.0.0.1:5555",
    "ws://127.0.0.1:5555",
]


@pytest.mark.parametrize(("endpoint", "numeric"), LOCAL)
@pytest.mark.parametrize("has_keys", [False, True])
def test_local_needs_no_keys(endpoint: str, numeric: str, has_keys: bool) -> None:
    assert checked_endpoint(endpoint, has_keys, "--bind") == numeric


@pytest.mark.parametrize("endpoint", BEYOND)
def test_beyond_this_machine_keys_are_wanted(endpoint: str) -> None:
    assert checked_endpoint(endpoint, True, "--bind") == endpoint
    with pytest.raises(SettingError, match=r"--bind .*kilburn keys new.*--curve-keys"):
        checked_endpoint(endpoint, False, "--bind")
    with pytest.raises(SettingError, match="--bind"):
        ControllerLink(endpoint, lambda events: None)
    with pytest.raises(SettingError, match="connect"):
        WorkerLink(endpoint, "w0")


@pytest.mark.parametrize("endpoint", NONSENSE)
@pytest.mark.parametrize("has_keys", [False, True])
def test_nonsense(endpoint: str, has_keys: bool) -> None:
    with pytest.raises(SettingError, match="--bind "):
        checked_endpoint(endpoint, has_keys, "--bind")


def test_files(tmp_path: Path) -> None:
    made = new_keys(tmp_path / "keys", ["a", "b"])
    for path in (made.controller, made.allowed, *made.workers):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ours = ControllerKeys.in_folder(tmp_path / "keys")
    theirs = [WorkerKeys.in_folder(tmp_path / "keys", name) for name in "ab"]
    assert ours.allowed == {keys.pair.public for keys in theirs}
    assert {keys.controller for keys in theirs} == {ours.pair.public}
    assert len({ours.pair.secret, *[keys.pair.secret for keys in theirs]}) == 3
    assert ours.pair.secret not in repr(ours)
    assert all(ours.pair.secret not in path.read_text() for path in (made.allowed, *made.workers))


@pytest.mark.parametrize("existing", ["controller.key", "workers.allow", "worker-0.key"])
def test_nothing_is_overwritten(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(SettingError, match=existing):
        new_keys(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"


@pytest.mark.parametrize("name", ["", "../out", "a/b", "controller", "x" * 65, 'quo"te', ".hidden", "new\nline"])
def test_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="worker name"):
        new_keys(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("content", "mode", "story"),
    [
        (None, 0o644, "chmod 600"),
        (None, 0o620, "chmod 600"),
        ("public = 5", 0o600, "public"),
        ('public = "short"', 0o600, "40 characters"),
        ("not toml", 0o600, "TOML"),
        ("\udcff", 0o600, "TOML"),
        ("", 0o600, "public"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str | None, mode: int, story: str) -> None:
    made = new_keys(tmp_path)
    if content is not None:
        made.workers[0].write_bytes(content.encode("utf-8", "surrogateescape"))
    made.workers[0].chmod(mode)
    with pytest.raises(SettingError, match=story):
        WorkerKeys.read(made.workers[0])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"controller\.key.*kilburn keys new"):
        ControllerKeys.in_folder(tmp_path)


def test_an_allow_list_that_others_may_write_is_refused(tmp_path: Path) -> None:
    new_keys(tmp_path).allowed.chmod(0o666)
    with pytest.raises(SettingError, match="chmod 600"):
        ControllerKeys.in_folder(tmp_path)
