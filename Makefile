# `make quickstart` and `make test` work from a fresh clone: each sets up .venv first.
#
# PYTHON=python3.12 picks another interpreter. pip's own settings hold, such as PIP_EXTRA_INDEX_URL for an
# index with a torch without CUDA.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Named by content, so a checkout that only touches the files installs nothing again.
INSTALLED := .venv/.installed-$(shell cat constraints.txt pyproject.toml | sha256sum | cut -c1-16)

# `make gpu-test PY=python3` takes that interpreter as it is and installs nothing; so does gpu-bench.
GPU_PY := $(or $(PY),$(BIN)/python)
GPU_BENCHMARKS := trainer megatron megatron_experts rollout sync race two_gpus
OUT ?= benchmarks/results
PYTEST_PLAIN := -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider

.PHONY: install quickstart test lint ui screenshots slow chaos bench gpu-test gpu-bench clean

install: $(INSTALLED)

$(INSTALLED):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing the versions of constraints.txt into .venv: some minutes and 2 GB."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,tracking,megatron]'
	rm -f .venv/.installed-*
	touch $@

quickstart: install
	$(BIN)/sluice train examples/quickstart/run.toml

# Tests of parts, then those that start whole runs: two side by side, for each waits a lot. Their files
# begin in this order, long ones first.
test: lint
	@failed=0; \
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/contract || failed=1; \
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  tests/chaos tests/flows tests/security || failed=1; \
	exit $$failed

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Debian's chromium does; without one the tests say so and are skipped.
ui: install
	$(BIN)/python -m pytest -m ui tests/ui

# The pictures of Prefect's pages in the docs, taken while the same tests run.
screenshots: install
	SLUICE_SCREENSHOTS=docs/images $(BIN)/python -m pytest -m ui tests/ui --basetemp=/tmp/sluice-pages

slow: install
	$(BIN)/python -m pytest -m slow

chaos: install
	$(BIN)/python -m benchmarks.chaos

bench: install
	@missed=0; for file in $(filter-out benchmarks/chaos.py $(GPU_BENCHMARKS:%=benchmarks/%.py),$(wildcard benchmarks/[a-z]*.py)); do \
	  $(BIN)/python -m benchmarks.$$(basename $$file .py) || missed=1; \
	done; exit $$missed

# What needs a GPU; elsewhere each test says why it is skipped. Plain pytest: a GPU
# machine may lack the plugins that pyproject.toml names.
gpu-test: $(if $(PY),,install)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/support:$$PYTHONPATH \
	  $(GPU_PY) -m pytest $(PYTEST_PLAIN) -rsP -W ignore::pytest.PytestUnknownMarkWarning tests/gpu

gpu-bench: $(if $(PY),,install)
	@nvidia-smi -L >/dev/null 2>&1 || { echo "skipped: nvidia-smi finds no GPU here"; exit 0; }; \
	missed=0; for name in $(GPU_BENCHMARKS); do \
	  PYTHONPATH=$(CURDIR):$$PYTHONPATH $(GPU_PY) -m benchmarks.$$name --result $(OUT)/$$name.json || missed=1; \
	done; exit $$missed

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
