# Each target sets up what it needs; a fresh machine has python3 (3.10 to 3.13), venv and make.
PYTHON ?= python3
BIN = .venv/bin
# A process for every few files, since TensorFlow gives no memory back, two at a time, with one thread for an operation;
# $$0 is a folder for what failed.
PYTEST_FILES = output=$$(TF_NUM_INTRAOP_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" "$$@" 2>&1) && echo "$$output" || \
  { code=$$?; { echo "$$output"; echo "Exit code $$code: $$*"; } > "$$0/$$$$"; exit $$code; }
.PHONY: setup demo test test-slow lint bench
.DELETE_ON_ERROR:

setup: .venv/installed

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Python 3.10 to 3.13 is needed, but $(PYTHON) is $$($(PYTHON) -V); set PYTHON=python3.12 or so." >&2; exit 2; }
	$(PYTHON) -m venv .venv
# The pip that comes with Python 3.10 tries versions for half an hour.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip==25.3
# Not compiled: that takes a minute, and most of it is never imported.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	@touch $@

demo: setup
	$(BIN)/python -m training.demo --workdir runs/demo

test: setup
	@failed=$$(mktemp -d); \
	{ ls tests/test_demo.py tests/test_documentation.py; \
	  find tests -name 'test_*.py' | grep -v 'test_demo\|test_documentation' | sort -r; } | \
	  xargs -P 2 -n 4 sh -c '$(PYTEST_FILES)' "$$failed"; code=$$?; \
	find "$$failed" -type f -exec cat {} +; rm -r "$$failed"; exit $$code

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv-bench/installed
	.venv-bench/bin/python -m benchmarks

.venv-bench/installed: requirements.txt export/requirements-onnx.txt benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	@touch $@
