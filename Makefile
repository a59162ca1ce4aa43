# make train: install, write the sample data set, train on it.   make test: install, lint, test.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# The first of these that is Python 3.10, 3.11 or 3.12; name another with `make PYTHON=... venv`.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
REQUIREMENTS := $(if $(HAS_GPU),requirements.txt,requirements-cpu.txt)
BIN := .venv/bin
# Processes that share the tests: for two cores, since the tests of jobs wait a lot. 6 on a GPU.
TEST_PROCESSES ?= 3
INSTALLED := .venv/installed-$(REQUIREMENTS)

.PHONY: help venv data train test clean
help:
	@echo "make train   install, write the sample data set and train on it"
	@echo "make test    install, lint and test"
	@echo "make venv    install only"
	@echo "make clean   remove .venv, data/digits and output/digits"

venv: $(INSTALLED)

# The stamp is made last, so that an interrupted installation starts again.
$(INSTALLED): $(REQUIREMENTS) requirements-base.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10, 3.11 or 3.12 found: install one, or make PYTHON=/path/to/it" >&2; exit 2; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	touch $@

data: $(INSTALLED)
	$(BIN)/python -m paddle_resnet.dataset sample --output data/digits

train: data
	rm -rf output/digits
	$(BIN)/python train.py --config configs/digits_cpu.yaml

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

clean:
	rm -rf .venv data/digits output/digits
