"""A real Prometheus of the test's own: it scrapes a controller and a gateway every second, by our own settings."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx

from bench.ports import free_port

SETTINGS = Path(__file__).parents[2] / "prometheus"
RATE_INTERVAL = "5s"  # what stands for $__rate_interval at a scrape each second


def binary(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, f"these tests need {name}: apt install prometheus"
    return found


class PrometheusServer:
    """Started by `__enter__`, gone after `__exit__`."""

    def __init__(self, folder: Path, address: str, gateway: str) -> None:
        self._folder, self._client = folder, httpx.Client(timeout=30)
        settings = (SETTINGS / "prometheus.yml").read_text()
        assert "controller:8000" in settings
        settings = settings.replace("controller:8000", address.removeprefix("http://")).replace(": 5s", ": 1s")
        assert "targets: []" in settings
        settings = settings.replace("targets: []", f'targets: ["{gateway.removeprefix("http://")}"]')
        (folder / "prometheus.yml").write_text(settings)
        shutil.copy(SETTINGS / "alerts.yml", folder / "alerts.yml")
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> "PrometheusServer":
        listen = self.url.removeprefix("http://")
        words = [f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/data"]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [binary("prometheus"), *words, f"--web.listen-address={listen}"], stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{self.url}/-/ready", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, (self._folder / "prometheus.log").read_text()
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(20)

    def wait_for_scrapes(self, after: float) -> None:
        """Until every target was scraped once more, and the rules had a second to see it."""
        deadline = time.monotonic() + 60
        while not all(value > after for _, value in self.now("timestamp(up)")):
            assert time.monotonic() < deadline, "it scrapes no more"
            time.sleep(0.1)
        time.sleep(1.0)

    def ask(self, path: str, **parameters: Any) -> Any:
        answer = self._client.get(f"{self.url}/api/v1/{path}", params=parameters)
        whole = json.loads(answer.text)
        assert whole["status"] == "success", f"{parameters}: {whole}"
        return whole["data"]

    def over(self, promql: str, start: float, end: float) -> list[tuple[dict[str, str], dict[float, float]]]:
        """Each series of an expression: its labels, and its values by time."""
        result = self.ask("query_range", query=promql, start=start, end=end, step=1)["result"]
        return [(one["metric"], {at: float(value) for at, value in one["values"]}) for one in result]

    def now(self, promql: str) -> list[tuple[dict[str, str], float]]:
        return [(one["metric"], float(one["value"][1])) for one in self.ask("query", query=promql)["result"]]
