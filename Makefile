# `make demo` and `make test` do all set-up themselves; Python 3.11 or newer and pip are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.installed

.DELETE_ON_ERROR:
.PHONY: help install demo test check format clean

help:
	@echo "make demo    encode, decode and compare a real KV cache"
	@echo "make test    all tests, with the real model"
	@echo "make check   ruff and mypy"
	@echo "make format  let ruff format the code"

install: $(STAMP)

# Some systems split ensurepip off Python: then the system's pip lends a hand.
# torch first, by its exact pin: see constraints.txt.
$(STAMP): pyproject.toml constraints.txt
	$(RUN) pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && \
		  $(PYTHON) -m pip --python $(VENV)/bin/python install pip; }
	$(RUN) pip install --disable-pip-version-check --constraint constraints.txt torch
	$(RUN) pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(VENV)/bin/kdn demo

test: $(STAMP)
	$(RUN) pytest

check: $(STAMP)
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

format: $(STAMP)
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
