# Two commands do everything: `make demo` (watch it run) and `make test` (check everything).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
CONSTRAINTS ?= -c constraints.txt

.PHONY: demo test lint docs clean

demo: $(VENV)/.installed-demo
	$(BIN)/malletrain demo $(ARGS)

test: $(VENV)/.installed-test
	bash tests/slurm/install.sh
	$(BIN)/ruff check .
	$(BIN)/mypy
	# Real processes on busy cores: what fails beside others is tried once more alone, and counts if it fails again.
	$(BIN)/python -m pytest -n auto || $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-test
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: setup.cfg constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(TORCH) $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info demo-output
