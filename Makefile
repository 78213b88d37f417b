# make demo | test | test-gpu | lint | install | clean
#
# Each target works from a clean clone with nothing but Python >= 3.10: the environment in .venv is made on the first call
# and again only when pyproject.toml changes. PYTHON=... chooses the interpreter that it is made with.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.tlxgen-installed
# One more than the cores of the smallest machine this is for: some tests wait for processes that hang.
PYTEST_WORKERS ?= 3

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The first interpreter on PATH that is in range; empty if there is none.
IN_RANGE := import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))
PYTHON   ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
              "$$p" -c '$(IN_RANGE)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

.PHONY: help demo test test-gpu lint format install clean

help:
	@sed -n '1s/^# //p' Makefile

demo: install
	$(BIN)/tlxgen tune gemm 4096 4096 4096
	$(BIN)/python examples/01_gemm.py

test: install
	$(BIN)/pytest -m 'not gpu' -n $(PYTEST_WORKERS)

test-gpu: install
	$(BIN)/pytest tests/gpu -m gpu

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(STAMP)

# The last step leaves exactly one `triton`, fbtriton's, whatever torch pulled in.
$(STAMP): pyproject.toml
	@'$(or $(PYTHON),false)' -c '$(IN_RANGE)' >/dev/null 2>&1 || { \
	  echo 'tlxgen needs Python 3.10 to 3.13 with venv: found $(or $(PYTHON),none on PATH); set PYTHON=/path/to/python3' >&2; \
	  exit 1; }
	[ -x $(BIN)/python ] || '$(PYTHON)' -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,plot,torch]'
	$(BIN)/python -m tlxgen.install
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
