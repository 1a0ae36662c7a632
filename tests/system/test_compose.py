"""compose.yaml as far as it can be tried without containers: read by docker-compose, every service run as a process.

Each service's own command and environment are started, with the names of hosts mapped to loopback, ports to free ones,
and volumes to folders of the test; then a chat goes through. Grafana cannot be had here: its command is not run.
"""

import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import files, requires, version
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from packaging.requirements import Requirement

from bench.ports import free_port
from kilburn.controller.auth import Role, Tenant, read_keys
from kilburn.controller.provision import run_provision
from kilburn.shared.config import ProvisionSettings
from kilburn.shared.model_files import cache_root
from tests.api.vocabularies import write_folder
from tests.architecture.test_packaging import plain
from tests.system.redis_server import binary

ROOT = Path(__file__).parents[2]
MB = 1_000_000
# Of python:3.11-slim-bookworm for amd64, unpacked, rounded up from what `docker image ls` shows (some 130 MB).
BASE_IMAGE_MB = 140
MOST_IMAGE_MB = 300


def composed() -> dict[str, Any]:
    """The services, as docker-compose understands them, with no setting of anybody's."""
    done = subprocess.run(
        ["docker-compose", "config"],
        cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return services


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return composed()


def test_a_worker_on_the_cpu_is_the_default_and_one_on_a_gpu_takes_its_place(services: dict[str, Any]) -> None:
    assert set(services) == {"prepare", "controller", "redis", "prometheus", "grafana", "worker", "worker-gpu"}
    profiled = {name: service["profiles"] for name, service in services.items() if "profiles" in service}
    assert profiled == {"worker": ["cpu"], "worker-gpu": ["gpu"]}
    lines = (ROOT / ".env").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["COMPOSE_PROFILES=cpu"]
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_every_service_is_confined(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["init"] is True, f"{name}: process 1 ignores signals that it has not asked for"
        assert service["cap_drop"] == ["ALL"], name
        assert service["mem_limit"], name
        assert service["pids_limit"], name
        assert not service.get("privileged"), name
        assert "container_name" not in service, f"{name} could not be scaled"
        if name != "prepare":
            assert service["healthcheck"]["test"], name
            assert service["restart"] == "unless-stopped", name
            assert service["depends_on"]["prepare"] == {"condition": "service_completed_successfully"}, name
        for port in service.get("ports", ()):
            assert str(port).startswith("127.0.0.1:"), f"{name} is open to other machines"
        for volume in service["volumes"]:
            if "-keys:" in volume and name != "prepare":
                assert volume.endswith(":ro"), f"{name} could change keys"
    holders: dict[str, set[str]] = {}
    for name, service in services.items():
        for volume in service["volumes"]:
            if "-keys:" in volume and name != "prepare":
                holders.setdefault(volume.split(":")[0], set()).add(name)
    assert holders.pop("worker-keys") == {"worker", "worker-gpu"}
    assert all(len(names) == 1 for names in holders.values()), "keys of one service are another's to read"


def test_the_dockerfile_has_no_fault_that_a_linter_knows() -> None:
    linter = Path(pytest.__file__).parents[4] / "bin" / "hadolint"  # of the environment that the tests come from
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    stages = re.findall(r"^FROM .* AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {"controller", "worker"} <= set(stages)
    text = (ROOT / "Dockerfile").read_text()
    for stage in ("controller", "worker"):
        assert "USER 10001" in text.split(f" AS {stage}\n")[1].split("FROM ")[0], f"{stage} runs as root"


def test_no_image_is_built_by_two_services_and_none_is_wanted_that_nobody_builds(services: dict[str, Any]) -> None:
    """Two services that build one name have it exported at once, and the second export fails."""
    built = [service["image"] for service in services.values() if "build" in service]
    assert sorted(built) == ["kilburn-controller", "kilburn-worker"]
    for name, service in services.items():
        if service["image"] in built and "build" not in service:
            assert service["pull_policy"] == "never", f"{name} would look for {service['image']} in a registry"
            assert "prepare" in service["depends_on"], f"{name} may come before its image"


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {plain(name): version for name, _, version in (line.partition("==") for line in lines)}


def wanted(extras: list[str]) -> set[str]:
    """All that the project with these extras stands on, as pip would find it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    found: set[str] = set()
    while lines:
        asked = Requirement(lines.pop())
        if (name := plain(asked.name)) in found or (asked.marker and not asked.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        lines += requires(name) or []
    return found


def install(names: set[str], into: Path) -> None:
    """What pip would install of these: the files that it installed here, where the versions are the pinned ones."""
    pins = pinned()
    for name in names:
        assert (name, version(name)) == (name, pins[name]), "these tests run with other versions than constraints.txt"
        for file in files(name) or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (into / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), into / file)


def test_the_controllers_image_is_small_traces_and_has_no_torch() -> None:
    """What its stage installs, in a fresh environment, and on top of the base image.

    The pinned packages are copied from the environment of the tests and compiled, as pip does: having pip ask an index
    for each of them is most of a minute.
    """
    stage = (ROOT / "Dockerfile").read_text().split(" AS build-controller\n")[1].split("FROM ")[0]
    line = re.fullmatch(r'RUN pip --python \S+ install -c constraints.txt "\.\[(\w+)\]"', stage.strip())
    assert line, stage  # compiled, too: nothing says --no-compile
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "environment"
        venv.create(fresh, with_pip=False, symlinks=True)
        (site,) = (fresh / "lib").glob("python*/site-packages")
        install(wanted([line[1]]), site)
        source = Path(folder) / "source"
        source.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        for name in ("shared", "kernels", "worker", "controller"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        options = ["-q", "--no-deps", "--no-index"]
        for command in (
            [*pip, "wheel", *options, "--no-build-isolation", "-w", folder, str(source)],
            [*pip, "--python", str(fresh / "bin" / "python"), "install", *options, "-f", folder, "kilburn"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
        assert compileall.compile_dir(site, quiet=2, workers=2)
        size = sum(file.lstat().st_size for file in fresh.rglob("*") if not file.is_symlink())
        packages = {path.name for path in site.iterdir()}
        assert not packages & {"torch", "numpy", "transformers", "triton", "numba", "pip"}
        told = subprocess.run(
            [fresh / "bin" / "kilburn", "--help"], capture_output=True, text=True, timeout=60, check=True
        )
        assert "kilburn controller" in told.stdout
        begin = "import kilburn.controller.app as app; app.exporter_to('http://127.0.0.1:9').shutdown()"
        done = subprocess.run(
            [fresh / "bin" / "python", "-c", begin], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
    print(f"controller image: {BASE_IMAGE_MB} MB of base and {size / MB:.0f} MB installed")
    assert size / MB + BASE_IMAGE_MB < MOST_IMAGE_MB


def test_a_second_provision_keeps_what_operators_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they took out; a key whose file was deleted is drawn anew, and the old one opens nothing."""
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path))  # provision sets it; here it is to be as before
    (tmp_path / "model").mkdir()
    model = write_folder(tmp_path / "model")
    settings = ProvisionSettings(model=str(model), into=str(tmp_path / "made"))
    keys, client = tmp_path / "made" / "controller" / "api.keys", tmp_path / "made" / "client" / "api.key"
    assert run_provision(settings) == 0
    first = keys.read_text()
    ring = read_keys(str(keys), "")
    assert ring.tenant_of(client.read_text()) == Tenant("operator", Role.ADMIN)
    scraper = (tmp_path / "made" / "prometheus" / "scrape.key").read_text()
    assert ring.tenant_of(scraper) == Tenant("prometheus", Role.METRICS)
    by_hand = f"# of ours\nalice:sk-by-hand-0001:weight=2\n{first.splitlines()[0]}\n"  # and no line for prometheus
    keys.write_text(by_hand)
    assert run_provision(settings) == 0
    assert keys.read_text() == by_hand
    old = client.read_text()
    client.unlink()
    assert run_provision(settings) == 0
    assert client.read_text() != old
    ring = read_keys(str(keys), "")
    assert ring.tenant_of(old) is None
    assert ring.tenant_of(client.read_text()) == Tenant("operator", Role.ADMIN)
    assert ring.tenant_of("sk-by-hand-0001") == Tenant("alice", weight=2.0)
    assert keys.read_text().startswith("# of ours\n")
    keys.unlink()
    assert run_provision(settings) == 0
    assert read_keys(str(keys), "").tenant_of(scraper) == Tenant("prometheus", Role.METRICS)


class Stack:
    """The services as processes."""

    def __init__(self, services: dict[str, Any], folder: Path) -> None:
        self._services, self._folder = services, folder
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.ports = {name: free_port() for name in ("8000", "5557", "6379", "9090")}
        self.paths: dict[str, str] = {}
        for service in services.values():
            for volume in service["volumes"]:
                source, target, *_ = volume.split(":")
                here = folder / "volumes" / source.strip("/").replace("/", "_")
                self.paths.setdefault(target, str(here))
                if source.startswith("/"):
                    if not here.exists():
                        shutil.copytree(source, here)
                else:
                    here.mkdir(parents=True, exist_ok=True)
        # Where prepare mounts all of them side by side it is told their common folder.
        self.paths["/var/lib/kilburn"] = str(folder / "volumes" / "kilburn")
        (folder / "volumes" / "kilburn").mkdir()
        for target in [target for target in self.paths if re.fullmatch(r"/var/lib/kilburn/\w+", target)]:
            (folder / "volumes" / "kilburn" / Path(target).name).symlink_to(self.paths[target])
        # What any worker on this machine compiles at its first start; others may have done so already.
        if (kernels := cache_root() / "kernels").exists():
            shutil.copytree(kernels, Path(self.paths["/var/cache/kilburn"]) / "kernels")
        for file in (Path(self.paths["/etc/prometheus"])).glob("*.yml"):
            file.write_text(self.mapped(file.read_text()))

    def mapped(self, text: str) -> str:
        """Hosts to loopback, ports to free ones, volumes to folders."""
        for target in sorted(self.paths, key=len, reverse=True):
            text = re.sub(rf"(?<![\w/.-]){re.escape(target)}(?=[/\s\"']|$)", self.paths[target].replace("\\", ""), text)
        text = re.sub(r"\b(controller|redis|prometheus)(?=:\d)", "127.0.0.1", text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        for port, ours in self.ports.items():
            text = re.sub(rf"(?<=127\.0\.0\.1:){port}\b", str(ours), text)
        return text

    def command(self, words: list[str]) -> list[str]:
        programs = {
            "kilburn": [sys.executable, "-m", "kilburn.controller.cli"],
            "redis-server": [binary()],
            "/bin/prometheus": [str(shutil.which("prometheus"))],
        }
        return [*programs[words[0]], *(self.mapped(word) for word in words[1:])]

    def environ(self, name: str) -> dict[str, str]:
        given = {key: self.mapped(str(value)) for key, value in (self._services[name].get("environment") or {}).items()}
        if "KILBURN_PORT" in given:
            given["KILBURN_PORT"] = str(self.ports[given["KILBURN_PORT"]])
        image = {"KILBURN_CACHE": self.paths["/var/cache/kilburn"], "PYTHONUNBUFFERED": "1"}
        kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
        return {**kept, "HOME": str(self._folder), "OMP_WAIT_POLICY": "PASSIVE", **image, **given}

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        service = self._services[name]
        words = [*(service.get("entrypoint") or []), *service["command"], *more]
        with self.log_file(name).open("ab") as log:
            process = subprocess.Popen(
                self.command(words), env=self.environ(name), stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, cwd=self._folder, start_new_session=True,
            )  # fmt: skip
        self._processes.append((name, process))
        return process

    def log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def is_healthy(self, name: str) -> bool:
        """By the service's own check."""
        _, *words = self._services[name]["healthcheck"]["test"]
        done = subprocess.run(self.command(words), env=self.environ(name), capture_output=True, timeout=30, check=False)
        return done.returncode == 0

    def wait_for(self, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, {
                name: self.log_file(name).read_text()[-3000:] for name, _ in self._processes
            }
            time.sleep(0.1)

    def stop(self) -> dict[str, int]:
        """How each service ended when it was asked to."""
        statuses = {}
        for name, process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                statuses[name] = process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                statuses[name] = process.wait()
        return statuses


@pytest.fixture
def stack(services: dict[str, Any], tmp_path: Path) -> Iterator[Stack]:
    with ExitStack() as held:
        stack = Stack(services, tmp_path)
        held.callback(stack.stop)
        yield stack


def test_every_services_own_command_and_environment_serve_a_chat(services: dict[str, Any], stack: Stack) -> None:
    assert stack.start("prepare").wait(200) == 0, stack.log_file("prepare").read_text()
    told = re.search(
        r"^API key +in (\S+); .* docker compose run --rm prepare cat \1$", stack.log_file("prepare").read_text(), re.M
    )
    assert told is not None
    secret = Path(told[1]).read_text()
    for name in ("redis", "controller", "worker", "worker", "prometheus"):  # --scale worker=2
        stack.start(name)
    again = stack.start("prepare")  # as `docker compose up` does a second time
    address = f"http://127.0.0.1:{stack.ports['8000']}"
    stack.wait_for(lambda: stack.is_healthy("controller"), 150)
    assert stack.is_healthy("worker")
    assert again.wait(60) == 0
    assert Path(told[1]).read_text() == secret, "the key was made anew"
    key = {"Authorization": f"Bearer {secret}"}
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 8}
    body["temperature"] = 0
    assert httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).status_code == 401
    answered = httpx.post(f"{address}/v1/chat/completions", json=body, headers=key, timeout=60)
    assert answered.status_code == 200, answered.text
    assert answered.json()["choices"][0]["message"]["content"].strip()

    def groups() -> set[str]:
        text = httpx.get(f"{address}/metrics", headers=key).text
        return set(re.findall(r'kilburn_blocks\{group="([^"]+)"', text))

    stack.wait_for(lambda: len(groups()) == 2, 100)

    def scraped() -> bool:
        query = {"query": 'kilburn_output_tokens_total{job="kilburn"}'}
        try:
            found = httpx.get(f"http://127.0.0.1:{stack.ports['9090']}/api/v1/query", params=query).json()
        except httpx.HTTPError:
            return False
        return [sample["value"][1] for sample in found["data"]["result"]] == [
            str(answered.json()["usage"]["completion_tokens"])
        ]

    stack.wait_for(scraped, 90)
    lines = [line for line in stack.log_file("controller").read_text().splitlines() if line.startswith("{")]
    assert any("lease began" in json.loads(line)["message"] for line in lines)
    assert not [
        name for name in services if stack.log_file(name).exists() and secret in stack.log_file(name).read_text()
    ]
    assert stack.stop() == {"prepare": 0, "redis": 0, "controller": 0, "worker": 0, "prometheus": 0}
