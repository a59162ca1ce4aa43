# make train: install, write the sample data set, train on it.   make test: install, lint, test.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# The default is the first of these commands that runs Python 3.10, 3.11 or 3.12. To choose a different command, set
# PYTHON: make PYTHON=... venv
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
REQUIREMENTS := $(if $(HAS_GPU),requirements.txt,requirements-cpu.txt)
# To keep a second version of Paddle in its own folder, set VENV: make test VENV=.venv/paddle3 PADDLE=3.3.1
VENV = .venv
BIN := $(VENV)/bin
# Number of pytest processes. The default suits two cores, because job tests mostly wait. Use 8 on 16 cores with a GPU.
TEST_PROCESSES ?= 3
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# Paddle to install: a version number (make venv PADDLE=2.6.2), which means a GPU build if there is a GPU, or a
# requirement (PADDLE=paddlepaddle==3.3.1). pip options may follow both (PADDLE="3.3.1 -i URL").
PADDLE ?= $(shell cat $(VENV)/paddle 2>/dev/null)
IS_VERSION := $(filter 0% 1% 2% 3% 4% 5% 6% 7% 8% 9%,$(firstword $(PADDLE)))
PADDLE_WORDS := $(if $(IS_VERSION),paddlepaddle$(if $(HAS_GPU),-gpu)==$(PADDLE),$(PADDLE))
# The default package index has GPU builds only of Paddle 2.
NEEDS_INDEX := $(if $(and $(HAS_GPU),$(IS_VERSION)),$(if $(filter 2.%,$(IS_VERSION))$(filter -%,$(PADDLE)),,yes))
export PADDLE_WORDS
# requirements-base.txt and requirements-dev.txt apply to every version of Paddle. $(REQUIREMENTS) applies only to
# Paddle 2.6.
LISTS := requirements-base.txt requirements-dev.txt $(if $(and $(PADDLE_WORDS),$(if $(findstring 2.6,$(PADDLE_WORDS)),,yes)),,$(REQUIREMENTS))
PIN := $(shell grep '^paddlepaddle' $(REQUIREMENTS))
# The name of this stamp file contains a checksum of the requirement files and of the chosen Paddle.
INSTALLED := $(VENV)/installed-$(firstword $(shell { cat $(REQUIREMENTS) requirements-base.txt requirements-dev.txt; echo '$(PADDLE_WORDS)'; } | cksum))

.PHONY: help venv data train test clean
help:
	@echo "make train   install, write the sample data set and train on it"
	@echo "make test    install, lint and test"
	@echo "make venv    install only; PADDLE=... chooses a different Paddle build"
	@echo "make clean   remove .venv, data/digits and output/digits"

venv: $(INSTALLED)

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10, 3.11 or 3.12 found; install one, or set PYTHON: make PYTHON=/path/to/python" >&2; exit 2; }
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

# Update .venv in place. Keep the installed version of Paddle unless PADDLE specifies a different one.
# The stamp file is written last, so that `make` repeats an interrupted installation.
$(INSTALLED): | $(BIN)/pip
	@test -z "$(NEEDS_INDEX)" || { echo 'error: PADDLE=$(PADDLE): GPU builds of this version are only on the index of Paddle; use PADDLE="$(PADDLE) -i URL" (docs/install.md explains how to find URL), or PADDLE=paddlepaddle==$(PADDLE) for the CPU build' >&2; exit 2; }
	@if ls $(VENV)/installed-* >/dev/null 2>&1; then echo "updating $(VENV) in place, because the requirements have changed"; \
	else echo "installing into $(VENV); this takes some minutes and about 2 GB (more with a GPU)"; fi
	@rm -f $(VENV)/installed-*
	@sed '/^-r/d; /^paddlepaddle/d' $(LISTS) > $(VENV)/requirements.txt
	@$(PIP) install -r $(VENV)/requirements.txt
	@set -f; want="$${PADDLE_WORDS:-$(PIN)}"; \
	here=$$($(BIN)/python -m pip list --format=freeze 2>/dev/null | grep '^paddlepaddle' || true); \
	if [ -n "$$here" ] && [ "$$here" != "$$want" ] && [ "$$PADDLE_WORDS" != "$$(cat $(VENV)/paddle 2>/dev/null)" ]; then \
		echo "replacing $$here with $$want"; \
		$(PIP) uninstall -y paddlepaddle paddlepaddle-gpu; \
		here=; fi; \
	if [ -z "$$here" ]; then $(PIP) install $$want; \
	elif [ "$$here" != "$$want" ]; then echo "keeping $${here/==/ }; to replace it, run make venv PADDLE=$(PIN)"; fi; \
	echo "$$PADDLE_WORDS" > $(VENV)/paddle
	@touch $@

data: $(INSTALLED)
	$(BIN)/python -m paddle_resnet.dataset sample --output data/digits

train: data
	rm -rf output/digits
	$(BIN)/python train.py --config configs/digits_cpu.yaml

# The tests start many processes, which load the modules faster from files with bytecode.
# Types are checked only with Paddle 2.6: the annotations in Paddle 3 describe the tensors of dynamic graphs.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(findstring ==3,$(PADDLE_WORDS)),,$(BIN)/basedpyright --pythonpath $(BIN)/python)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not slow"

clean:
	rm -rf .venv data/digits output/digits
