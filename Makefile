# `make demo` and `make test` need nothing but Python and make: they create .venv themselves.
#
# torch is installed first and pinned, because the default index gives Linux a build with several gigabytes of
# CUDA packages. Override with TORCH=2.x.y, or UV_TORCH_BACKEND=auto for a GPU build; a torch that is already in .venv stays.
TORCH ?= 2.13.0
PYTHON ?= python3

ifeq ($(OS),Windows_NT)
BIN := .venv/Scripts
else
BIN := .venv/bin
endif
PY := $(BIN)/python
CSRC := src/mambakit/ops/kernels/cpu/csrc
KERNELS := src/mambakit/ops/kernels/cpu/_native.abi3.so
PIP := $(PY) -m pip --disable-pip-version-check

.PHONY: demo test check lint format bench kernels clean

test: .venv/.ok kernels
	$(PY) -m pytest -n auto --maxprocesses 8

demo: .venv/.ok
	$(PY) -m mambakit.cli.main demo --out build/demo

check: lint test

lint: .venv/.ok-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright

format: .venv/.ok-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# After a change to the kernels: an editable install builds them once.
kernels: .venv/.ok $(KERNELS)

$(KERNELS): setup.py $(wildcard $(CSRC)/*)
	$(PY) setup.py -q build_ext --inplace

bench: .venv/.ok
	$(PY) -m benchmarks.ssd

# The order of attempts: a torch already there, a wheel pip is configured to find on disk, uv's CPU build, whatever the index has.
.venv/.ok: pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	@if $(PY) -c 'import torch' 2>/dev/null; then echo "torch: already in .venv"; \
	elif $(PIP) install -q --no-index --no-deps torch==$(TORCH) 2>/dev/null; then echo "torch: local wheel"; \
	elif $(PIP) install -q uv && VIRTUAL_ENV=.venv $(BIN)/uv pip install -q --torch-backend=$${UV_TORCH_BACKEND:-cpu} torch==$(TORCH); then echo "torch: $${UV_TORCH_BACKEND:-cpu} build"; \
	else $(PIP) install torch==$(TORCH); fi
	$(PIP) install -q torch==$(TORCH) -e '.[test]'
	@touch $@

.venv/.ok-dev: .venv/.ok
	$(PIP) install -q torch==$(TORCH) -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build src/*.egg-info $(KERNELS) .pytest_cache .ruff_cache .hypothesis
