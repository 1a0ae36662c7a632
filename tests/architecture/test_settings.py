"""Settings: one name in three places, one meaning, all faults at once, each in the words of the user."""

from pathlib import Path

import pytest

from kilburn.shared.config import (
    ControllerSettings,
    GatewaySettings,
    PlanSettings,
    ServeSettings,
    Settings,
    SettingsError,
    SimulateSettings,
    TopSettings,
    TuneSettings,
    WorkerSettings,
    as_flags,
    help_text,
    load,
    narrowed,
)
from kilburn.shared.kinds import (
    Choice,
    Choices,
    Count,
    Counts,
    Duration,
    Kind,
    Number,
    Numbers,
    Share,
    Size,
    SizeOrShare,
    Switch,
)
from kilburn.shared.settings import declared, flag, variable


def problems(cls: type[Settings], argv: list[str], environ: dict[str, str], positional: str = "") -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(cls, argv, environ, positional)
    return caught.value.problems


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "kilburn.toml"
    file.write_text('model = "from-file"\nmax_rows = 3\nmax_len = 30\nthreads = 1\nexit_with_parent = true\n')
    environ = {"KILBURN_MAX_ROWS": "4", "KILBURN_MAX_LEN": "40", "KILBURN_CONFIG": str(file), "HOME": "/"}
    settings = load(WorkerSettings, ["--max-rows", "5", "--no-exit-with-parent"], environ)
    assert (settings.max_rows, settings.max_len, settings.threads) == (5, 40, 1)
    assert (settings.model, settings.exit_with_parent) == ("from-file", False)
    assert settings.block_size == WorkerSettings(model="x").block_size


def test_every_fault_is_reported_at_once_in_the_form_that_the_user_wrote(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('max_row = 3\nport = "x"\nmodel = [1]\nhost = "ok"\n')
    argv = ["--prot", "80", "--max-waiting=many", "--depth", "--config", str(file), "stray"]
    environ = {
        "KILBURN_PROT": "1",
        "KILBURN_DRAIN_SECONDS": "5 weeks",
        "KILBURN_API_KEYS": "k",
        "KILBURN_MAX_ROWS": "x",
    }
    text = "\n".join(found := problems(ControllerSettings, argv, environ))
    for part in (
        "--prot: no such flag; did you mean --port?",
        "--max-waiting: 'many' will not do; give a whole number from 1 to 1000000",
        "--depth: needs a value",
        "stray: not understood",
        "KILBURN_PROT: no such setting, so unset it; did you mean KILBURN_PORT?",
        "KILBURN_DRAIN_SECONDS: '5 weeks' will not do; give a time such as",
        f"max_row in {file}: no such setting; did you mean max_rows?",
        f"port in {file}: 'x' will not do; give a whole number from 0 to 65535",
        f"model in {file}: give one text, number or boolean, not list",
        "--model: missing",
    ):
        assert part in text
    assert len(found) == 10  # KILBURN_MAX_ROWS is another command's, and KILBURN_API_KEYS no setting


def test_faults_of_two_settings_together_name_the_one_to_change() -> None:
    found = problems(WorkerSettings, ["--num-blocks", "9"], {"KILBURN_MODEL": "m", "KILBURN_KV_MEMORY": "1GiB"})
    assert found == ["--num-blocks: the pool's size is given twice; leave out num_blocks or kv_memory"]
    found = problems(ServeSettings, ["m"], {"KILBURN_MAX_ROWS": "600", "KILBURN_SILENCE_SECONDS": "0.5s"}, "model")
    assert [line.split(":")[0] for line in found] == ["KILBURN_SILENCE_SECONDS", "--max-step-tokens"]


@pytest.mark.parametrize("file", ["max_rows 3", "\udcff", "a = 'b"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, file: str) -> None:
    path = tmp_path / "k.toml"
    path.write_bytes(file.encode("utf-8", "surrogateescape"))
    assert "is not TOML" in problems(WorkerSettings, ["--model=m", f"--config={path}"], {})[0]
    assert "cannot read" in problems(WorkerSettings, ["--model=m", f"--config={path}x"], {})[0]


PARSED: list[tuple[Kind, str, object]] = [
    (Size(), "0", 0),
    (Size(), "1024", 1024),
    (Size(), "512MiB", 512 << 20),
    (Size(), "1.5 GiB", 3 << 29),
    (Size(), "2gb", 2 * 10**9),
    (SizeOrShare(), "4GiB", 4 << 30),
    (SizeOrShare(), "1.5GiB", 3 << 29),
    (SizeOrShare(), "0", 0),
    (SizeOrShare(), "2048", 2048),
    (SizeOrShare(), "25%", Share(0.25)),
    (SizeOrShare(), "12.5 %", Share(0.125)),
    (SizeOrShare(), "0.25", Share(0.25)),
    (SizeOrShare(), "100%", Share(1.0)),
    (SizeOrShare(), "0%", 0),
    (Duration(), "250ms", 0.25),
    (Duration(), "30", 30.0),
    (Duration(), "2m", 120.0),
    (Duration(), "1.5h", 5400.0),
    (Switch(), "On", True),
    (Switch(), "no", False),
    (Count(-3, 3), "-3", -3),
    (Counts(1, 9), "1, 9,5", (1, 9, 5)),
    (Number(0, 9), "1.5", 1.5),
    (Numbers(0.5, 9), "0.5, 2,9", (0.5, 2.0, 9.0)),
    (Choices(("a", "b")), "b, a", ("b", "a")),
    (Choice(("auto", "bfloat16"), (("bf16", "bfloat16"),)), "bf16", "bfloat16"),
]


@pytest.mark.parametrize(("kind", "text", "value"), PARSED)
def test_values_are_read_with_their_units_and_written_back(kind: Kind, text: str, value: object) -> None:
    assert kind.parse(text) == value
    assert kind.parse(kind.show(value)) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Size(), "-1"),
        (Size(), "1GiX"),
        (Size(), "1e9"),
        (Size(), ""),
        (Size(low=1024), "1"),
        (SizeOrShare(), "101%"),
        (SizeOrShare(), "1.5"),
        (SizeOrShare(), "-0.5"),
        (SizeOrShare(), "a quarter"),
        (Duration(), "1 fortnight"),
        (Duration(low_s=1), "10ms"),
        (Duration(), "nan"),
        (Count(0, 9), "10"),
        (Count(0, 9), "1.0"),
        (Count(0, 9), ""),
        (Switch(), "2"),
        (Counts(1, 9), "1,,2"),
        (Counts(1, 9), "0"),
        (Counts(1, 9), ""),
        (Number(0, 9), "-1"),
        (Number(0, 9), "inf"),
        (Numbers(0, 9), "1;2"),
        (Numbers(0, 9), "10"),
        (Choices(("a", "b")), "a,c"),
    ],
)
def test_what_is_no_value_says_what_to_give(kind: Kind, text: str) -> None:
    with pytest.raises(ValueError, match=r"^give "):
        kind.parse(text)


def test_a_worker_started_with_flags_has_the_settings_that_serve_has() -> None:
    served = load(
        ServeSettings,
        ["m", "--kv-memory=96MiB", "--max-rows=7", "--host-pool=12.5%"],
        {"KILBURN_DTYPE": "float32"},
        "model",
    )
    worker = narrowed(served, WorkerSettings)
    assert load(WorkerSettings, as_flags(worker), {"KILBURN_MAX_ROWS": "9", "KILBURN_PORT": "1"}) == worker
    assert (worker.kv_memory, worker.max_rows, worker.dtype) == (96 << 20, 7, "float32")
    assert worker.host_pool == Share(0.125)


EVERY_COMMAND = [
    ControllerSettings,
    WorkerSettings,
    ServeSettings,
    GatewaySettings,
    PlanSettings,
    SimulateSettings,
    TopSettings,
    TuneSettings,
]


@pytest.mark.parametrize("cls", EVERY_COMMAND)
def test_help_names_every_setting_once_and_fits_a_terminal(cls: type[Settings]) -> None:
    lines = help_text(cls, "kilburn x", "About.").splitlines()
    assert all(len(line) <= 100 for line in lines)
    for name in declared(cls):
        assert sum(line.startswith(f"  {flag(name)}") and line.split()[0] == flag(name) for line in lines) == 1
        assert variable(name) == "KILBURN_" + flag(name)[2:].replace("-", "_").upper()
