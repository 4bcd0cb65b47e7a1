# make demo: compare training with and without graphs, here and now.
# make test: unit tests, ruff and mypy.
# Both make an environment in $(VENV) from what requirements/ says, and only when that has changed.

VENV ?= .venv
PYTHON := $(VENV)/bin/python
# Part of the stamp's name, so that changed requirements are installed and unchanged ones are not.
WANTED := $(shell cat requirements/*.txt pyproject.toml tools/find_python.sh | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(WANTED)
# Python sources of TE for the tests of its contract. Beside site-packages and not in it: without its
# compiled part TE raises when it is imported, and Megatron with it.
TE_SOURCE := $(VENV)/te-source
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
DEMO_NEEDS := $(STAMP) $(if $(HAS_GPU),$(STAMP)-gpu)

.PHONY: demo test lint types unit clean

demo: $(DEMO_NEEDS)
	$(PYTHON) -m megatron_cg.cli.main align $(ALIGN)

test: unit lint types

unit: $(STAMP)
	$(PYTHON) -m pytest tests/unit

lint: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(STAMP)
	$(PYTHON) -m mypy

$(STAMP):
	python=$$(sh tools/find_python.sh) && "$$python" -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -r requirements/runtime.txt -r requirements/dev.txt
	$(PYTHON) -m pip install --quiet --no-deps -r requirements/upstream.txt
	$(PYTHON) -m pip install --quiet --no-deps --upgrade --target $(TE_SOURCE) -r requirements/contract.txt
	$(PYTHON) -m pip install --quiet --no-deps --editable .
	rm -f $(VENV)/.installed-*
	touch $@

# TE's extension is compiled here against the torch that was just installed, which takes nvcc and
# some minutes.
$(STAMP)-gpu: $(STAMP)
	$(PYTHON) -m pip install --quiet -r requirements/gpu-build.txt
	$(PYTHON) -m pip install --quiet --no-build-isolation -r requirements/gpu.txt
	touch $@

clean:
	rm -rf $(VENV)
