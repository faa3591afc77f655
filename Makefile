# The everyday commands of stallfree. `make demo` and `make test` work from nothing: python3 >= 3.11 and make are enough.
#
#   make demo | test | test-slow | test-browser | bench | check | docs | clean
#   ARGS="..."   passes arguments on:        make demo ARGS="--epochs 2"    make test ARGS="tests/cache -x"
#   PYTHON=...   takes this interpreter:     make test PYTHON=/opt/python3.12/bin/python3
#   VENV=...     puts the environment there: make test VENV=/tmp/venv

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo native server test test-slow test-browser bench check docs clean

VENV ?= .venv
ARGS ?=
PYTHON ?=
CANDIDATES := python3.13 python3.12 python3.11 python3
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --no-input --disable-pip-version-check -c constraints.txt
DECLARED := pyproject.toml constraints.txt hatch_build.py src/stallfree/vision/_native.c

help:
	@sed -n '1,6s/^# \{0,1\}//p' Makefile

# An interpreter is taken only if it runs, is new enough and can make environments: a name on the PATH may be a shim that
# leads nowhere, and some systems ship python3 without venv.
$(VENV)/.made:
	@probe='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	for python in $(or $(PYTHON),$(CANDIDATES)); do \
	  if "$$python" -c "$$probe" </dev/null >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv "$(VENV)"; \
	    touch "$@"; \
	    exit 0; \
	  fi; \
	done; \
	echo "no usable Python: need 3.11 or newer with venv (tried: $(or $(PYTHON),$(CANDIDATES)))." >&2; \
	echo "On Debian and Ubuntu: apt install python3-venv. Or name one: make PYTHON=/path/to/python3" >&2; \
	exit 1

# One stamp per set of extras, so that an install is done once and again only when what is declared changes. Each is
# resolved in one go, under the constraints.
$(VENV)/.all: $(VENV)/.made $(DECLARED) | native
	$(INSTALL) -e '.[all]'
	@touch $@

$(VENV)/.test: $(VENV)/.made $(DECLARED) | native
	$(INSTALL) -e '.[all,test]'
	@touch $@

$(VENV)/.check: $(VENV)/.made $(DECLARED) | native
	$(INSTALL) -e '.[all,test,check]'
	@touch $@

$(VENV)/.browser: $(VENV)/.made $(DECLARED) | native
	$(INSTALL) -e '.[all,test,browser]'
	@touch $@

$(VENV)/.docs: $(VENV)/.made $(DECLARED) | native
	$(INSTALL) -e '.[all,docs]'
	@touch $@

demo: $(VENV)/.all
	$(BIN)/python examples/demo.py $(ARGS)

# In parallel, with compiled modules kept: many tests start interpreters. Memory in large pages: many tests fork.
# ARGS="-n 0" runs all in one process.
test: $(VENV)/.test server
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

test-slow: $(VENV)/.test server
	$(BIN)/python -m pytest -m slow $(ARGS)

# Without it the part in C is left out (stallfree.vision then decodes whole pictures), and its tests are skipped.
native:
	@printf '#include <stdio.h>\n#include <jpeglib.h>\n' | $${CC:-cc} -E - >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends gcc libc6-dev libjpeg-dev >/dev/null; } || \
	  echo "no C compiler or jpeglib.h: the compiled part is left out, its tests are skipped" >&2

# Tests of stores across hosts need a server. Without it they are skipped, and say so.
server:
	@command -v valkey-server redis-server >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends redis-server >/dev/null; } || \
	  echo "neither valkey-server nor redis-server: tests of stores across hosts will be skipped" >&2

# The browser is Debian's: playwright is given its path and downloads none.
test-browser: $(VENV)/.browser
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update && apt-get install -y --no-install-recommends chromium; } || \
	  { echo "no Chromium: apt install chromium" >&2; exit 1; }
	$(BIN)/python -m pytest tests/browser $(ARGS)

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.run $(ARGS)

check: $(VENV)/.check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# A warning is an error. What mkdocs-material says of its own future is left out. Tried with Python 3.11.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

clean:
	rm -rf "$(VENV)" build dist site .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
