# On a machine with only Python (>= 3.11) and make:
#   make run    sets up and runs the main job
#   make test   sets up and passes the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
UV     := uv==0.13.9
TORCH  := torch==2.13.0
ARGS   ?=

export PATH := $(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup run parity check test soak lock clean help

help:
	@sed -n '1,3s/^# *//p' Makefile
	@echo "  make parity the nightly gate: both trainers on the same rollouts, one verdict"
	@echo "  make soak   SOAK_KILLS (200) random kills of a small run, each followed by a resume"
	@echo "  make check  ruff, format, pyright and the layer tests"
	@echo "  make lock   resolve requirements/cpu.in into requirements/cpu.lock"
	@echo "  make clean  remove the environment and everything runs wrote"

setup: $(VENV)/.package

# torch comes first and alone: pip takes a CPU build where it finds one and the CUDA build with its libraries where not.
# The lock holds everything else, so it installs without a resolver on both. Bytecode is compiled once, here: where Python
# may not write it, every rank, engine and Ray daemon would compile vLLM's and Ray's sources again at each start.
$(VENV)/.dependencies: requirements/cpu.lock
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python >= 3.11 is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	@echo "==> setup 1/4: virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> setup 2/4: $(TORCH)"
	@$(BIN)/pip install -q --disable-pip-version-check $(UV) $(TORCH)
	@echo "==> setup 3/4: $$(grep -c '==' requirements/cpu.lock) locked packages"
	@DS_BUILD_OPS=0 $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation-package deepspeed --compile-bytecode -r requirements/cpu.lock
	@touch $@

$(VENV)/.package: $(VENV)/.dependencies pyproject.toml
	@echo "==> setup 4/4: grpo_lib, editable, with the grpo command"
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

run: setup
	$(BIN)/python flows/grpo_flow.py run --trainer olmo_core $(ARGS)

parity: setup
	$(BIN)/python flows/parity_flow.py run $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/unit/test_layers.py

test: setup
	$(BIN)/python -m pytest $(ARGS)

# Each kill costs the start of ranks and an engine, some 20 seconds.
soak: setup
	SOAK_KILLS=$${SOAK_KILLS:-200} $(BIN)/python -m pytest -x -o log_cli=true -o log_cli_level=INFO tests/flow/test_soak.py $(ARGS)

lock: setup
	$(BIN)/uv pip compile -q --python-version 3.11 --no-header --no-annotate --overrides requirements/overrides.txt requirements/cpu.in -o requirements/cpu.lock
	sed -i -E '/^(torch==|nvidia-|cuda-)/d' requirements/cpu.lock

clean:
	rm -rf $(VENV) .metaflow runs wandb build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
