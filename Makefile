# Two commands do all the set-up: `make demo` and `make test`. Each makes .venv when it is missing or out of date.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
SOURCES := $(shell find profiler predictor_training solver runtime -type f \
	\( -name '*.py' -o -name '*.toml' -o -name '*.cpp' -o -name '*.h' -o -name py.typed \))
MODEL ?= tests/models/relu-llama-5m

.PHONY: demo test lint types clean

demo: .venv/installed
	$(BIN)/python -m pi_toolkit.runtime.demo $(MODEL) --workspace demo/$(notdir $(MODEL))-pi

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Against the installed packages: mypy cannot see through the import hook of an editable install.
types: .venv/installed
	cd tests && ../$(BIN)/mypy --config-file ../pyproject.toml \
		-p pi_toolkit.profiler -p pi_toolkit.predictor_training -p pi_toolkit.solver -p pi_toolkit.runtime

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: $(BIN)/python pyproject.toml constraints.txt CMakeLists.txt README.md $(SOURCES)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check '.[demo,test]'
	touch $@

clean:
	rm -rf .venv build demo
