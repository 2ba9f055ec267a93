# Every target works in a fresh clone: it makes its own virtual environment first. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FUZZ_SECONDS ?= 60
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

NATIVE_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml

.PHONY: help demo test test-rust msrv oldest packages test-python bench lint fuzz coverage docs lock ci kernels test-sglang nvrtc12 gpu clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-12s %s\n", $$1, $$2}'

# Pinned packages, once.
$(VENV)/.packages: requirements-dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v[0]}.{v[1]}: set PYTHON=")'
	@command -v cargo >/dev/null || { echo "cargo is needed to build the core: install Rust 1.89 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# The native module, whenever a Rust source changed.
$(VENV)/.native: $(VENV)/.packages $(NATIVE_SOURCES)
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --quiet --locked
	touch $@

demo: $(VENV)/.native ## the reuse experiment on a real model: tables, out/demo/reuse.json, out/demo/reuse.png
	$(BIN)/python -m benchmarks.reuse $(ARGS)

test: test-rust test-python ## Rust and Python tests

test-rust: ## Rust tests alone: needs neither Python nor torch
	cargo test --locked

msrv: $(VENV)/.packages ## build and test the Rust crates with the oldest Rust that Cargo.toml promises
	PYO3_PYTHON=$(abspath $(BIN)/python) tools/msrv.sh

oldest: $(VENV)/.native ## test the front with the oldest Python, torch and NumPy that pyproject.toml promises
	PYTHON=$(PYTHON) tools/oldest.sh

test-sglang: $(VENV)/.native ## test the backend inside sglang, in a virtual environment of its own
	tools/sglang.sh $(BIN)/python $(ARGS)

packages: $(VENV)/.packages ## build wheel, source distribution and crates in out/packages, and try each outside the repository
	$(BIN)/python tools/packages.py

test-python: $(VENV)/.native
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.native ## speed beside peers and the machine's limits: table, out/bench/bench.json, plots; fails if a bound is missed
	$(BIN)/python -m benchmarks.speed $(ARGS)

lint: $(VENV)/.native ## formatting, clippy, ruff, types, stub against binary
	cargo fmt --all --check
	PYO3_PYTHON=$(abspath $(BIN)/python) cargo clippy --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy python/radixstate examples
	MYPYPATH=python $(BIN)/python -m mypy.stubtest radixstate._native

fuzz: $(VENV)/.native ## random operations for FUZZ_SECONDS (default 60) on each side of the binding, and a full load
	RADIXSTATE_MODEL_SECONDS=$(FUZZ_SECONDS) cargo test --locked --release -p radixstate --test model -- --nocapture --test-threads=1 soak proptests
	RADIXSTATE_LOAD=full cargo test --locked --release -p radixstate --test load -- --nocapture --test-threads=1
	timeout --preserve-status --signal=INT $$(( $(FUZZ_SECONDS) + 30 )) \
		env RADIXSTATE_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests/test_stateful.py --hypothesis-profile=deep

coverage: ## lines of the core that its tests reach; CONTRIBUTING.md says what it needs
	cargo llvm-cov --locked -p radixstate --summary-only

docs: $(VENV)/.native ## API documentation: target/doc and out/docs
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps -p radixstate -p radixstate-codec
	$(BIN)/pdoc -o out/docs radixstate

lock: $(VENV)/.packages ## write requirements-dev.txt anew from what is installed
	tools/lock.sh $(BIN)/pip > requirements-dev.txt.new
	mv requirements-dev.txt.new requirements-dev.txt
	touch $(VENV)/.packages

ci: lint msrv oldest packages test-sglang test ## what CI runs

kernels: $(VENV)/.native ## registers, spills, shared bytes and access widths of the CUDA kernels, compiled without a GPU
	$(BIN)/python -m benchmarks.kernels $(ARGS)

# Those of `CUDA_12` in benchmarks/nvrtc.py: 280 MB on disk.
nvrtc12: $(VENV)/.packages ## fetch the compilers of CUDA 12.1 and 12.9, with which `make test` then compiles the kernels too
	for version in 12.1.105 12.9.86; do \
		test -d out/nvrtc/$$version || $(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
			--target out/nvrtc/$$version nvidia-cuda-nvrtc-cu12==$$version; \
	done

# With GPU_PYTHON, an interpreter that has a built wheel, this needs no Rust.
gpu: $(if $(GPU_PYTHON),,$(VENV)/.native) ## GPU tests and the kernel benchmark; says so where there is no GPU
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu

clean: ## remove everything that was built
	rm -rf target out $(VENV) .venv-oldest .venv-sglang .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python -name '*.so' -delete
