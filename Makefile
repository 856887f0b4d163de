# Troupe's commands. Each installs what it needs into .venv first, once.
# ARGS goes to the command behind: make train ARGS="seed=1 learner.optimizer.lr=1e-4", make test ARGS="-k parsers".
# PYTHON chooses the interpreter, if the one that is found is not the one you want: make test PYTHON=python3.12.

RECIPE ?= calculator
ARGS ?=
# DEVICE=cuda makes .venv for GPUs, which nobody has run: make install DEVICE=cuda.
export PYTHON DEVICE
# pytest keeps the tests that it has compiled: without them it takes ten seconds longer to start.
unexport PYTHONDONTWRITEBYTECODE
run := .venv/bin/python -m

.DEFAULT_GOAL := help
.PHONY: help install train serve test test-outside test-fast bench check docs format pins clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install:  ## Install all into .venv, which the others do too: make install DEVICE=cuda for GPUs
	@sh launch/install/install.sh

train: install  ## Train a small model from scratch: make train RECIPE=calculator ARGS="seed=1"
	@$(run) launch.train recipe=$(RECIPE) $(ARGS)

serve: install  ## Serve a policy to OpenAI clients
	@$(run) launch.serve $(ARGS)

test: install  ## Run all tests, those with Ray and engines last: make test ARGS="-k parsers" chooses some
	@.venv/bin/python tests/suite.py plain engine $(ARGS)

test-outside: install  ## Run the tests that install packages: other people's, and Troupe itself
	@.venv/bin/python tests/suite.py outside $(ARGS)

test-fast: install  ## Run the tests that start no engine and are quick, at every save, in three processes
	@.venv/bin/python tests/suite.py fast $(ARGS)

bench: install  ## Measure speed, start, publishing and recovery: figures and a plot in runs/bench
	@.venv/bin/python tests/benchmarks/bench.py $(ARGS)

check: install  ## Lint, formatting, types and layers, in under a minute
	@$(run) ruff check
	@$(run) ruff format --check
	@$(run) mypy
	@$(run) pytest -q tests/test_architecture.py

docs: install  ## Build the pages into build/site; a broken link is an error
	@$(run) pip install -qq --no-deps --disable-pip-version-check -r .docs/pins.txt
	@NO_MKDOCS_2_WARNING=1 $(run) mkdocs build -q -f .docs/mkdocs.yml

format: install  ## Format the code and apply the linter's safe fixes
	@$(run) ruff check --fix
	@$(run) ruff format

pins: install  ## Resolve pyproject.toml anew into launch/install/pins-cpu.txt and pins-cuda.txt
	.venv/bin/python launch/install/pins.py

clean:  ## Remove .venv and all caches; what runs wrote is kept
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
