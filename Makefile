# `make quickstart` and `make test` set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install quickstart test slow mutants lint clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/dpopt run suite=quickstart
	$(BIN)/dpopt table suite=quickstart
	$(BIN)/dpopt plot suite=quickstart

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

slow: install
	$(BIN)/python -m pytest -m slow

mutants: install
	$(BIN)/python tests/mutation

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build *.egg-info
