# One command each, from a fresh clone in an empty environment:
#   make demo   set up and run a real search (CPU processes, or this machine's GPUs)
#   make test   set up and run the checks and tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint format clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt tools/setup.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/setup.sh
	touch $@

demo: setup
	$(BIN)/titan-tune search search_spaces/demo.toml --study demo
	$(BIN)/titan-tune export demo -o runs/demo/best.toml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs
