# Two commands do everything: `make demo` (watch it run) and `make test` (check everything).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
CONSTRAINTS ?= -c constraints.txt

.PHONY: demo test fuzz steady lint docs clean

demo: $(VENV)/.installed-demo
	$(BIN)/malletrain demo $(ARGS)

test: $(VENV)/.installed-test
	bash tests/slurm/install.sh
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal

# The random search, with a seed that it prints; FUZZ_SEED=7 does one pass again.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed "$(FUZZ_SEED)" $(ARGS)

# The tests with many processes, N times, the last four beside LOAD busy processes.
N ?= 10
LOAD ?= 4
steady: $(VENV)/.installed-test
	$(BIN)/python -m tests.steady --runs $(N) --load $(LOAD) $(ARGS)

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
