# `make help` lists the verbs. Each sets up .venv by itself when the lock or a pyproject has changed.
# PYTHON=/path/to/python3 chooses the interpreter (3.11 or newer) that the environment is made from.
# ARGS="..." is passed on: make test ARGS="tests/unit -k hash", make dev ARGS="--grpc-port 7700".

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test faults dev ci gen fmt lint type bench bench-peers
export PYTHON

BIN := .venv/bin
SET_UP := .venv/set-up
ARGS ?=

$(SET_UP): requirements.lock server/pyproject.toml worker_sdk/python/pyproject.toml scripts/setup
	@scripts/setup

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(SET_UP) ## 830 real orders through a durable workflow, while a worker is killed
	@$(BIN)/python -m examples.northwind $(ARGS)

test: $(SET_UP) ## all tests, against a real PostgreSQL
	@$(BIN)/pytest -n 4 --dist worksteal $(if $(ARGS),$(ARGS),tests)

faults: $(SET_UP) ## everything fails in turn under load, for minutes; then a checker looks for what was lost
	@$(BIN)/python -m tests.faults.soak $(ARGS)

dev: $(SET_UP) ## a server with a PostgreSQL of its own, for development
	@$(BIN)/fencepost dev $(ARGS)

ci: $(SET_UP) ## everything that must pass before a change lands
	@scripts/ci lint type test versions

gen: $(SET_UP) ## Python code from proto/
	@$(BIN)/python scripts/gen.py $(ARGS)

fmt: $(SET_UP) ## format the code and the contract
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/buf format --write

lint: $(SET_UP) ## ruff, import layers, buf, generated code
	@scripts/ci lint

type: $(SET_UP) ## mypy, strict
	@scripts/ci type

bench: $(SET_UP) ## throughput on this machine; ARGS names another benchmark, or all
	@$(BIN)/python -m benchmarks $(if $(ARGS),$(ARGS),throughput)

bench-peers: $(SET_UP) ## the same job on other systems, which are fetched for it
	@$(BIN)/python -m benchmarks peers $(ARGS)
