# Every task of the project; `make` alone lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
PYTEST_ARGS ?=
TURNS ?= 3
STEPS ?= 10

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help
help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 chooses the Python of a new environment; HOST and PORT are for make up."

.PHONY: setup
setup: $(READY) ## Make the virtual environment in .venv; skipped when nothing changed

# torch goes first: deepspeed looks at it while it is built, so it cannot be built in isolation.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; this is $$($(PYTHON) --version). Choose another: make setup PYTHON=python3.12"; exit 1; }
	@echo "Setting up .venv, which takes some minutes: first PyTorch, the largest part ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch numpy setuptools wheel ninja
	@echo "... then DeepSpeed, which is built here ..."
	@DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation deepspeed
	@echo "... then everything else ..."
	@$(PIP_INSTALL) --editable '.[train,local,dev]'
	@touch $(READY)

.PHONY: demo
demo: setup ## Fine-tune a small model on this machine and see the difference (some minutes)
	@$(BIN)/burnish demo

.PHONY: up
up: setup ## Start the service and keep it up (HOST, PORT)
	@$(BIN)/burnish up --host $(HOST) --port $(PORT)

.PHONY: test
test: check ## Run the checks and all tests (PYTEST_ARGS="-k upload" for some)
ifeq ($(strip $(PYTEST_ARGS)),)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --ignore tests/e2e --ignore tests/cli
# With nothing beside them: these start whole services, and kill parts of them.
	$(BIN)/python -m pytest tests/e2e tests/cli
else
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

.PHONY: test-all
test-all: export TEST_ALL = 1
test-all: test ## Run all tests, and every job with every strategy of several ranks (twice the time)

.PHONY: check
check: setup ## Check style, types and who imports whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: setup ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: bench-train
bench-train: setup ## Train beside TRL and a plain loop, in turn (a quarter of an hour; TURNS, STEPS)
	$(BIN)/python -m benchmarks.train --turns $(TURNS) --steps $(STEPS)

.PHONY: constraints
constraints: setup ## Pin in constraints.txt what is installed now
	@{ echo "# What is installed and tested, made by 'make constraints'."; \
	   $(BIN)/python -m pip freeze --all --exclude pip --exclude burnish | sed 's/+[[:alnum:].]*$$//'; } > constraints.new
	@mv constraints.new constraints.txt && touch $(READY)

.PHONY: clean
clean: ## Remove the virtual environment and the caches; data in .burnish stays
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
