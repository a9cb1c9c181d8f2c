# Two commands do all the set-up: `make demo` and `make test`. Each makes .venv when it is missing or out of date.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
SOURCES := $(shell find profiler predictor_training solver runtime -type f \
	\( -name '*.py' -o -name '*.toml' -o -name '*.cpp' -o -name '*.h' -o -name py.typed \))
TEST_PROCESSES ?= auto
MODEL ?= tests/models/relu-llama-5m

.PHONY: demo test lint types gpu-wheels gpu-check clean

demo: .venv/installed
	$(BIN)/python -m pi_toolkit.runtime.demo $(MODEL) --workspace demo/$(notdir $(MODEL))-pi

# A process per core, each with one thread: torch's threads spin, and would keep one another from the cores.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --maxprocesses 8

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

# A check on a GPU, without a network, in less than ten minutes. What takes too long is stopped so that it says what failed so
# far, or where it hangs. The toolkit, and what a machine with PyTorch is likely to lack, are
# installed into a folder of their own, from the wheels that `make gpu-wheels` fetched on another machine.
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS := gpu-wheels
GPU_SITE := $(CURDIR)/build/gpu-site
GPU_OUT ?= build/gpu-check
WHEELS := gguf 'pulp>=3.3.1,<4' nanobind scikit-build-core pathspec

gpu-wheels:
	rm -rf $(GPU_WHEELS)
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
		--python-version $(GPU_PYTHON_VERSION) --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 --dest $(GPU_WHEELS) $(WHEELS)

$(GPU_SITE)/installed: pyproject.toml CMakeLists.txt $(SOURCES) $(wildcard $(GPU_WHEELS)/*.whl)
	@test -n "$(wildcard $(GPU_WHEELS)/*.whl)" || \
		{ echo "no wheels: run make gpu-wheels where there is a network, and bring the folder $(GPU_WHEELS)" >&2; exit 1; }
	rm -rf $(GPU_SITE)
	$(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target $(GPU_SITE) \
		$(wildcard $(GPU_WHEELS)/*.whl)
	PYTHONPATH=$(GPU_SITE) $(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
		--no-build-isolation --no-compile --target $(GPU_SITE) .
	touch $@

gpu-check: $(GPU_SITE)/installed
	mkdir -p $(GPU_OUT)
	export PYTHONPATH=$(GPU_SITE) PYTHONUNBUFFERED=1; \
	workers=$$($(GPU_PYTHON) -c 'import xdist' 2>/dev/null && echo '-n 8'); \
	cd tests && OMP_NUM_THREADS=2 timeout -s INT -k 20 160 $(GPU_PYTHON) -m pytest -vv --maxfail 10 -p no:cacheprovider \
		$$workers test_gpu_*.py; tests=$$?; cd ..; \
	timeout -s ABRT -k 10 290 $(GPU_PYTHON) -X faulthandler -m pi_toolkit.runtime.gpu_check --seconds 240 \
		--trace $(GPU_OUT)/trace.json -o $(GPU_OUT)/gpu-check.json $(GPU_OPTIONS) && exit $$tests

clean:
	rm -rf .venv build demo
