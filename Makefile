# The commands of this repository. Each sets up what it needs first; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
DEMO_EXIT ?=
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-containers lint lock clean

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

# The stamp holds a checksum and not only a date, because a fresh checkout gives all files the same new date.
setup:  ## make .venv with all that is needed (the other commands do it by themselves)
	@sum=$$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum); \
	if [ "$$(cat $(STAMP) 2>/dev/null || true)" != "$$sum" ]; then \
		rm -f $(STAMP); scripts/setup.sh "$(PYTHON)" "$(VENV)"; echo "$$sum" > $(STAMP); \
	fi

demo: setup  ## start 1 prefill node, 1 decode node and a router, and answer a chat (PORT=8000, DEMO_EXIT=1 stops after it)
	@exec $(BIN)/kvrelay up --prefill 1 --decode 1 --port $(PORT) --demo $(if $(DEMO_EXIT),--demo-exit)

test: setup  ## run the whole test suite (PYTEST_ARGS='-k name' for a part)
	@exec scripts/test.sh $(BIN)/python $(PYTEST_ARGS)

test-containers: setup  ## build the images and run clusters of containers with podman (needs root; a quarter of an hour)
	@exec tests/containers/run.sh $(BIN)/python

lint: setup  ## check style and types
	@$(BIN)/ruff check . || { echo "make: ruff found the errors above; '$(BIN)/ruff check --fix .' mends some" >&2; exit 1; }
	@$(BIN)/ruff format --check . || { echo "make: these files are not formatted; run '$(BIN)/ruff format .'" >&2; exit 1; }
	@echo "==> checking types (half a minute the first time)"
	@$(BIN)/mypy || { echo "make: mypy found the type errors above" >&2; exit 1; }

lock:  ## write the lock files of the images again, after a change of pyproject.toml or constraints.txt (needs uv)
	@exec scripts/lock.sh

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
