# GNU make. Each target sets up what it needs and is safe to run twice.
SHELL := /bin/bash
VENV := $(abspath $(or $(RAY_EXTRACT_VENV),.venv))
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo drafter test test-fast acceptance versions faults lint clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## The environment, in .venv (or $RAY_EXTRACT_VENV); nothing to do the second time
	@deploy/cpu/setup.sh

demo: ## The main job on the CPU: a real model, real prompts, two engines, verified shards in demo-output/
	@deploy/cpu/demo/demo.sh

drafter: setup ## Train drafters on captured states, on Transformers' and on wrong ones (10 minutes on 2 free cores)
	$(BIN)/python examples/drafter/train.py
	$(BIN)/python benchmarks/tables.py

test: setup lint ## Everything: lint, then all tests, on real SGLang on the CPU, and the trainers' own packages (about an hour on 2 cores)
	@deploy/trainers/setup.sh
	$(BIN)/python -m pytest

test-fast: setup ## The tests that start no engine and no cluster (10 minutes)
	$(BIN)/python -m pytest -m "not engine and not ray"

acceptance: setup ## What we export, read and trained on by SpecForge and speculators (8 minutes on 2 cores)
	@deploy/trainers/setup.sh
	$(BIN)/python -m pytest -m acceptance tests/acceptance

versions: setup ## The truth tests in every SGLang that is let in, each in an environment of its own; for every night (40 minutes on 2 cores)
	$(BIN)/python tests/version_suite.py
	$(BIN)/python benchmarks/tables.py

faults: setup ## Two hundred runs on a Ray cluster whose processes are killed, stopped and cut off; for every night (4 hours on 2 cores)
	$(BIN)/python tests/ray_faults.py --count 200

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## Remove caches, the demo's model and its output; keeps .venv
	rm -rf .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo-output
	find ray_extract tests deploy benchmarks -name __pycache__ -prune -exec rm -rf {} +
