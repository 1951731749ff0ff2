# hsxfer: `make demo` and `make test` prepare .venv themselves. Variables:
#   PYTHON       a Python 3.11 (found by itself when it is python3.11 or python3)
#   TORCH_INDEX  where to find torch's CPU build, if pip does not (else PyPI's: on x86-64 CUDA, several GB)
#   DEMO_STEPS, DEMO_TP   length of the demo, tensor-parallel ranks of its server
#   ARGS         more arguments for pytest
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PINS := $(sort $(shell find examples/sglang_cpu -name '*.py' -o -name '*.sh' -o -name '*.txt')) requirements/dev.txt
# Each stamp is named after what it stands for: changed pins make a new one, a touched file does not.
SETUP := $(VENV)/.setup-$(shell cat $(PINS) | sha256sum | cut -c1-16)
LINT := $(VENV)-lint/.setup-$(shell sha256sum requirements/lint.txt | cut -c1-16)
CORE := $(shell find csrc -type f 2>/dev/null) $(wildcard setup.py pyproject.toml)
export TORCH_INDEX DEMO_STEPS DEMO_TP
# sglang on several ranks compiles a small function with g++ at its first request: 15 s, and without Python's headers
# (python3-dev) the server dies of it.
export TORCHDYNAMO_DISABLE := 1

# $(call need,COMMAND THAT WORKS WITH IT,DEBIAN PACKAGE)
define need
@$(1) >/dev/null 2>&1 || { [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2) >/dev/null; } || \
	{ echo "hsxfer needs $(2). On Debian: sudo apt-get install $(2)" >&2; exit 1; }
endef
define need_python
@[ -n "$(PYTHON)" ] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
	{ echo "hsxfer's tests run on Python 3.11, which is not here: give PYTHON=/path/to/python3.11" >&2; exit 1; }
$(call need,$(PYTHON) -m pip --version,python3-pip)
endef

.PHONY: help setup demo test bench lint wheel clean distclean
help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile; sed -n '2,5s/^#  //p' Makefile

setup: $(VENV)/.core ## prepare .venv: real sglang on the CPU, test tools, hsxfer itself

demo: setup ## real sglang, a draft model that trains from it, and the measured table
	$(BIN)/hsxfer demo

test: setup ## all tests (15 minutes on two cores); ARGS="-k name" picks
	$(BIN)/python -m pytest tests $(ARGS)

bench: setup ## benchmarks against memcpy, tolist and pickle
	$(BIN)/python -m pytest benchmarks -o addopts=-ra --benchmark-only $(ARGS)

lint: $(LINT) ## ruff, mypy --strict, clang-format
	$(VENV)-lint/bin/ruff check .
	$(VENV)-lint/bin/ruff format --check .
	$(VENV)-lint/bin/mypy --strict hsxfer
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs -r $(VENV)-lint/bin/clang-format --dry-run --Werror

wheel: ## one wheel for every Python from 3.10, into dist/
	$(need_python)
	$(call need,g++ --version,g++)
	$(PYTHON) -m pip wheel -q --no-deps -w dist .

clean: ## what builds and tests leave; distclean: the environments too
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks $(VENV)/.core
	find hsxfer csrc tests benchmarks examples \( -name '*.so' -o -name '*.o' -o -name '*.pyc' \) -delete

distclean: clean
	rm -rf $(VENV) $(VENV)-lint

$(SETUP):
	$(need_python)
	PYTHON=$(PYTHON) examples/sglang_cpu/install.sh $(VENV) requirements/dev.txt
	@rm -f $(VENV)/.setup-*; touch $@

$(VENV)/.core: $(SETUP) $(CORE)
	$(call need,g++ --version,g++)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

$(LINT):
	$(need_python)
	[ -x $(VENV)-lint/bin/python ] || $(PYTHON) -m venv --without-pip $(VENV)-lint
	$(PYTHON) -m pip --python $(VENV)-lint/bin/python install -q --no-compile -r requirements/lint.txt
	@rm -f $(VENV)-lint/.setup-*; touch $@

# On a machine with a GPU, from a plain checkout, with the Python that has torch there: no .venv, nothing installed.
GPU_PYTHON ?= python3
.PHONY: gpu-build gpu-test gpu-bench
gpu-build: ## the native library with its kernels, in place
	$(GPU_PYTHON) setup.py -q build_ext --inplace

gpu-test: gpu-build ## the tests that need a GPU; SANITIZE=1: kernels under compute-sanitizer
	PYTHONPATH=. $(GPU_PYTHON) -m pytest tests/gpu $(ARGS)
	$(if $(SANITIZE),PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \
		$(GPU_PYTHON) -m pytest tests/gpu/test_gpu_kernels.py -q --timeout 600 \
		-k "fp8_is or screens or (alignment and (0-16 or 1-17 or 2-100 or 8-24 or 4-4096 or 0-1])) or (round_trip and 33)")

gpu-bench: gpu-build ## the figures of the GPU path, beside the pinned copy; OUT=file.json
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu $(if $(OUT),--out $(OUT)) $(ARGS)
