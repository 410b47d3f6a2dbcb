# Every target does its own set-up: a virtual environment in .venv, installed from setup.cfg with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 4
# One thread a process. Bytecode is kept, as hundreds of processes would compile the same modules again.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-fast test-slow test-gpu test-matrix check format lint types words docs bench clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: .venv/.installed-demo ## Train the main example on handwritten digits
	$(BIN)/lockstep fit examples/digits.yaml

test: .venv/.installed ## Run the tests of every day: all that start no process, and one case of each that does
	$(TEST_ENV) $(BIN)/pytest --daily -n $(JOBS) --dist worksteal

test-all: .venv/.installed ## Run every case of the tests but those of test-slow, in three to four times the time
	$(TEST_ENV) $(BIN)/pytest -n $(JOBS) --dist worksteal

test-fast: .venv/.installed ## Run the tests that start no process, in one to three minutes
	$(TEST_ENV) $(BIN)/pytest -n $(JOBS) --dist worksteal -m "unit and not slow"

test-slow: .venv/.installed ## Run the tests that take too long for every day
	$(TEST_ENV) $(BIN)/pytest -m slow

# On a machine with an environment of its own: make test-gpu PYTEST="python3 -m pytest"
test-gpu: $(if $(PYTEST),,.venv/.installed) ## Run the tests that need a GPU, and say what they covered
	$(TEST_ENV) $(or $(PYTEST),$(BIN)/pytest) -m "gpu and not slow"

test-matrix: ## Test wheel and sdist in clean environments, with several versions of Python and torch
	$(PYTHON) .ci/matrix.py

check: .venv/.installed ## Check format, lint, types, words and the picture of the architecture, changing nothing
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python .ci/words.py
	$(BIN)/python -m docs.make_architecture --check

format: .venv/.installed ## Format the code
	$(BIN)/ruff check --select I --fix --quiet
	$(BIN)/ruff format

lint: .venv/.installed ## Look for mistakes
	$(BIN)/ruff check

types: .venv/.installed ## Check types
	$(BIN)/mypy

words: .venv/.installed ## Find banned phrases and long lines
	$(BIN)/python .ci/words.py

docs: .venv/.installed ## Build the site into build/docs; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

bench: .venv/.installed ## Measure against a hand-written loop and against peers (one part: .venv/bin/python -m benchmarks.NAME)
	@set -e; mkdir -p build/bench; for file in benchmarks/[a-z]*.py; do name=$$(basename "$$file" .py); echo "---- $$name"; \
		case $$name in methods|slow_link|local_updates|federated) ;; pipeline_bubble|plan_published|plan_speed) $(BIN)/python -m benchmarks.$$name ;; *) $(BIN)/python -m benchmarks.$$name --json build/bench/$$name.json ;; esac; done

clean: ## Remove the environment, caches and build results; runs stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: setup.cfg pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[dev,docs,examples,bench,deepspeed,wandb,mlflow,onnx,transformers]'
	$(INSTALL) --no-deps timm  # without torchvision: one that was built for another torch breaks all that imports it
	@touch $@

.venv/.installed-demo: setup.cfg pyproject.toml constraints.txt | .venv/bin/python  # a third of the time of all
	$(INSTALL) --editable '.[examples]'
	@touch $@

