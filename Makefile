# Bare `make`, or make help, prints these lines:
#
#   make demo     compare training with and without graphs, here and now
#   make check    lint, types and fast tests, in half a minute; for while one works
#   make test     what CI runs: unit tests, lint, types, pages, wheel, newest torch
#   make unit     the unit tests alone
#   make newest   the tape's alignment and the contract tests, with the newest torch that it has run
#   make main     contract tests, fast path and alignments with the Megatron-LM in $(MEGATRON), if it is there
#   make docs     the pages, as a site in build/site
#   make wheel    the wheel, in build/dist
#   make clean    remove what these made
#
# All make an environment in $(VENV) from what requirements/ says, and only when that has changed.

VENV ?= .venv
PYTHON := $(VENV)/bin/python
INSTALL := sh tools/install.sh $(PYTHON)
# How many test files run side by side: one for each core, and no more than 4, since each worker takes
# 2 GB and 15 s to start. The tests of a file stay together, since many share processes that are started
# once for each file.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 1); echo $$((cores < 4 ? cores : 4)))
# Tests that neither train a model nor start a process.
FAST := $(patsubst %,arguments/test_%.py,layers megatron_flags rules) \
	units/test_call.py \
	capture/test_observer.py test_restore.py \
	$(patsubst %,tools/align/test_%.py,command compare) \
	tools/bench/test_lines.py \
	fastpath/test_bucketing.py \
	tools/plan/test_launch_line.py
# Part of the stamp's name, so that changed requirements are installed and unchanged ones are not.
WANTED := $(shell cat requirements/*.txt pyproject.toml tools/find_python.sh | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(WANTED)
TESTED := $(STAMP)-tests
# Python sources of TE for the tests of its contract. Beside site-packages and not in it: without its
# compiled part TE raises when it is imported, and Megatron with it.
TE_SOURCE := $(VENV)/te-source
# transformers, for the test of its example. Beside site-packages too: where Megatron finds it, it is
# imported by every process of the tests.
TRANSFORMERS := $(VENV)/transformers
# The second environment: newest.txt's torch, and the rest as in the first.
NEWEST := $(VENV)/newest-$(WANTED)
# A clone or an export of Megatron-LM, such as its main branch.
MEGATRON ?= ../Megatron-LM
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
DEMO_NEEDS := $(STAMP) $(if $(HAS_GPU),$(STAMP)-gpu)

# The processes of a test run share what the first of them compiles, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo check fast test lint types unit newest main docs wheel clean

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: $(DEMO_NEEDS)
	$(PYTHON) -m megatron_cg.tools.cli.main align $(ALIGN)

# pytest's workers would start for as long as these tests take.
check: $(TESTED)
	$(MAKE) -j2 lint types fast

fast: $(TESTED)
	$(PYTHON) -m pytest -q $(addprefix tests/unit/,$(FAST))

# All but the unit tests leave a core free for part of their time, so they share two.
test: $(TESTED)
	$(MAKE) -j2 types lint docs wheel newest main
	$(MAKE) unit

unit: $(TESTED)
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile tests/unit

newest: $(TESTED)
	$(PYTHON) -m tools.try_versions $(NEWEST) $$(grep ^torch requirements/newest.txt)

main: $(TESTED)
ifneq ($(wildcard $(MEGATRON)/megatron/core),)
	$(PYTHON) -m tools.try_versions build/main --megatron $(MEGATRON)
else
	@echo "no Megatron-LM in $(MEGATRON): its main branch is not tried"
endif

lint: $(TESTED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

types: $(TESTED)
	$(PYTHON) -m mypy

docs: $(TESTED)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

wheel: $(TESTED)
	$(PYTHON) -m tools.check_wheel build/dist

$(STAMP):
	python=$$(sh tools/find_python.sh) && "$$python" -m venv $(VENV)
	$(INSTALL) -r requirements/runtime.txt
	$(INSTALL) --no-deps -r requirements/upstream.txt
	$(INSTALL) --no-deps --editable .
	rm -rf $(VENV)/.installed-* $(VENV)/newest-*
	touch $@

$(TESTED): $(STAMP)
	$(INSTALL) -r requirements/dev.txt -r requirements/docs.txt
	$(INSTALL) --no-deps --upgrade --target $(TE_SOURCE) -r requirements/contract.txt
	$(INSTALL) --no-deps --upgrade --target $(TRANSFORMERS) -r requirements/transformers.txt
	touch $@

# TE's extension is compiled here against the torch that was just installed, which takes nvcc and
# some minutes.
$(STAMP)-gpu: $(STAMP)
	$(PYTHON) -m pip install --quiet -r requirements/gpu-build.txt
	$(PYTHON) -m pip install --quiet --no-build-isolation -r requirements/gpu.txt
	touch $@

clean:
	rm -rf $(VENV) build
