"""The bundled model, as a newcomer meets it: one command, one curl line."""

import json
import re
import subprocess
from pathlib import Path

from kilburn.shared.model_files import BUNDLED_NAME
from tests.system.serving import Service


def test_the_curl_line_that_it_prints_works(tmp_path: Path) -> None:
    # Its first use on a machine converts the model, into the cache of whoever runs the tests.
    with Service(BUNDLED_NAME, tmp_path, "--device=cpu", "--threads=1", "--kv-memory=256MiB", ready_s=120) as service:
        assert "device total" in service.log
        assert "planned as" not in service.log, "its memory is not what `kilburn plan` would have said"
        line = re.search(r"^\s+(curl .*)$", service.log, re.MULTILINE)
        assert line, service.log
        done = subprocess.run(line[1], shell=True, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["model"] == BUNDLED_NAME
        assert len(answer["choices"][0]["message"]["content"].split()) > 10
        capital = service.client().completions.create(
            model=BUNDLED_NAME, prompt="The capital of France is", max_tokens=4, temperature=0
        )
        assert "Paris" in capital.choices[0].text
