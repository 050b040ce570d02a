# From a clean clone, `make demo` and `make test` set up everything they need: .venv, the CPU kernel, an editable
# install. `make help` lists the targets.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON   ?= python3
# Installed before anything else, so that no later requirement picks another build of it.
TORCH    ?= torch==2.13.0
NVCC     ?= nvcc

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
	@echo "make cuda    compile csrc/cuda for sm_90a (needs nvcc, no GPU)"
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

KERNEL_SOURCES := $(shell find csrc -type f -not -path 'csrc/build/*' -not -path 'csrc/cmake-build/*' \
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

# Objects only: no GPU and no CUDA torch is needed. ptxas C7508-C7510 say that setmaxnreg was ignored or wgmma was
# serialised: the kernel would still be right, at a fraction of its speed, so they fail the build.
CUDA_SOURCES := $(shell find csrc/cuda -name '*.cu' 2>/dev/null)
CUDA_HEADERS := $(shell find csrc/cuda csrc/common -name '*.cuh' -o -name '*.h' 2>/dev/null)
CUDA_OBJECTS := $(CUDA_SOURCES:csrc/cuda/%.cu=build/cuda/%.o)
NVCCFLAGS ?= -std=c++17 -O3 --expt-relaxed-constexpr -Icsrc -gencode arch=compute_90a,code=sm_90a -Xptxas -v

cuda: $(CUDA_OBJECTS)

build/cuda/%.o: csrc/cuda/%.cu $(CUDA_HEADERS)
	mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -c $< -o $@ 2>&1 | tee $@.log | grep -E 'error|warning' || test $${PIPESTATUS[0]} -eq 0
	! grep -E 'C75(08|09|10)' $@.log

clean:
	rm -rf build build-cuda dist csrc/build csrc/cmake-build demo-output finetune-output *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
