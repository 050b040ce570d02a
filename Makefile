# From a clean clone, `make demo` and `make test` set up everything they need: .venv, the CPU kernel, an editable
# install. `make help` lists the targets.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON   ?= python3
# Installed before anything else, so that no later requirement picks another build of it.
TORCH    ?= torch==2.13.0

VENV     := .venv
BIN      := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# One thread a process: the tests and the demo run several ranks on the machine's cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup kernel cuda demo test lint format docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    fine-tune four small MoE checkpoints with the CPU kernel, compare with native Transformers"
	@echo "make test    all tests that need no GPU"
	@echo "make lint    ruff and mypy"
	@echo "make kernel  build the CPU kernel into csrc/build/"
	@echo "make cuda    build the kernel for torch with CUDA into csrc/build/ (needs nvcc, no GPU)"
	@echo "make docs    rewrite docs/support.md from the model table"
	@echo "make setup   .venv with mok_hf installed editable, and the CPU kernel"
	@echo "make clean   remove build outputs (.venv stays)"

setup: $(INSTALLED) kernel

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	touch $@

$(INSTALLED): pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet 'setuptools>=77'
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[build,demo,test]'
	touch $@

KERNEL_SOURCES := $(shell find csrc -type f -not -path 'csrc/build/*' -not -path 'csrc/cmake-build*' \
    -not -path 'csrc/cuda/*' -not -name '*.pyc')

kernel: csrc/cmake-build/.installed

csrc/cmake-build/.installed: $(KERNEL_SOURCES) $(INSTALLED)
	$(BIN)/mok-hf kernel build --source csrc
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -m 'not gpu' $(PYTEST_ARGS)

# mypy sees the packages as they are installed: model_patches/ inside mok_hf/.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck
	mkdir -p build/typecheck
	cp -rs '$(CURDIR)/mok_hf' build/typecheck/mok_hf
	cp -rs '$(CURDIR)/model_patches' build/typecheck/mok_hf/model_patches
	cd build/typecheck && '$(CURDIR)/$(BIN)/mypy' --config-file '$(CURDIR)/pyproject.toml' -p mok_hf

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	$(BIN)/python docs/support_table.py >docs/support.md
	$(BIN)/python docs/performance_page.py >docs/performance.md

# No GPU and no CUDA torch is needed, and the build loads on a CPU torch too. ptxas warnings that say that a kernel lost
# its speed fail it (csrc/nvcc.sh).
CUDA_ARCHS ?= 9.0a
CUDA_SOURCES := $(shell find csrc/cuda -type f)

cuda: csrc/cmake-build-cuda/.installed

csrc/cmake-build-cuda/.installed: $(KERNEL_SOURCES) $(CUDA_SOURCES) $(INSTALLED)
	$(BIN)/mok-hf kernel build --source csrc --cuda $(CUDA_ARCHS)
	touch $@

clean:
	rm -rf build build-cuda dist csrc/build csrc/cmake-build csrc/cmake-build-cuda demo-output finetune-output *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
