# Each target installs what it needs. Only python3 (3.10 to 3.13), venv and make must be there.
PYTHON ?= python3
BIN = .venv/bin
# Tests run in three processes, which wait now and then, with one thread per operation. They take the files in the order
# of size, in turns there and back, so that all take equally long. The two tests of the demo share its run. JAX compiles
# in less time what runs only once. $$0 is a directory for the output of failed processes.
MARK = not slow
PYTEST_FILES = output=$$(TF_NUM_INTRAOP_THREADS=1 JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -q -m "$(MARK)" "$$@" 2>&1) && echo "$$output" || \
  { code=$$?; { echo "$$output"; echo "Exit code $$code: $$*"; } > "$$0/$$$$"; exit $$code; }
# Without byte code, each of the many processes would compile TensorFlow and Keras again, for eight seconds.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: setup demo test test-slow test-tpu-env test-beam lint docs bench
.DELETE_ON_ERROR:

setup: .venv/installed

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Python 3.10 to 3.13 is needed, but $(PYTHON) is $$($(PYTHON) -V); set PYTHON=python3.12 or so." >&2; exit 2; }
	$(PYTHON) -m venv .venv
# The pip that comes with Python 3.10 needs half an hour to choose versions.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip==25.3
# --no-compile saves a minute; most modules are never imported.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	@touch $@

demo: setup
	$(BIN)/python -m training.demo --workdir runs/demo

test: setup
	@failed=$$(mktemp -d); \
	{ echo tests/test_demo.py tests/test_documentation.py; \
	  ls -S $$(find tests -name 'test_*.py') | grep -v 'test_demo\|test_documentation'; } | \
	  awk '{ turn = (NR - 1) % 6; group = turn < 3 ? turn : 5 - turn; files[group] = files[group] " " $$0 } \
	    END { for (group in files) print files[group] }' | \
	  xargs -P 3 -L 1 sh -c '$(PYTEST_FILES)' "$$failed"; code=$$?; \
	find "$$failed" -type f -exec cat {} +; rm -r "$$failed"; exit $$code

test-slow: MARK = slow
test-slow: setup
	@failed=$$(mktemp -d); \
	ls -S $$(grep -l 'mark\.slow' $$(find tests -name 'test_*.py')) | xargs -P 2 -n 3 sh -c '$(PYTEST_FILES)' "$$failed"; code=$$?; \
	find "$$failed" -type f -exec cat {} +; rm -r "$$failed"; exit $$code

# The core of the suite with the versions of a Cloud TPU VM, but tensorflow-cpu instead of tensorflow-tpu, and without
# JAX.
TPU_TESTS = tests/checkpoints/test_layouts.py tests/checkpoints/test_load.py tests/loop/devices \
  tests/export/test_saved_model.py tests/data tests/loop tests/models tests/recipes
test-tpu-env .venv-tpu/installed: BIN = .venv-tpu/bin
test-tpu-env: .venv-tpu/installed
	@failed=$$(mktemp -d); \
	find $(TPU_TESTS) -name 'test_*.py' | grep -v test_jax | sort -r | xargs -P 2 -n 8 sh -c '$(PYTEST_FILES)' "$$failed"; code=$$?; \
	find "$$failed" -type f -exec cat {} +; rm -r "$$failed"; exit $$code

.venv-tpu/installed: requirements-tpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "Python 3.10 to 3.12 is needed, but $(PYTHON) is $$($(PYTHON) -V); set PYTHON=python3.12 or so." >&2; exit 2; }
	$(PYTHON) -m venv .venv-tpu
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip==25.3
	sed 's/^tensorflow-tpu==/tensorflow-cpu==/; /^libtpu==/d' requirements-tpu.txt > .venv-tpu/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r .venv-tpu/requirements.txt
	@touch $@

# The pipelines of Apache Beam, on this machine in several processes.
test-beam: .venv-beam/installed
	.venv-beam/bin/python -m pytest -q tests/beam

.venv-beam/installed: requirements-beam.txt
	$(PYTHON) -m venv .venv-beam
	.venv-beam/bin/python -m pip install --quiet --disable-pip-version-check pip==25.3
	.venv-beam/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-beam.txt
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/proselint --config .proselintrc.json check README.md CONTRIBUTING.md SECURITY.md docs
	$(BIN)/python docs/prose.py README.md CONTRIBUTING.md SECURITY.md docs

# The documentation site, in the folder site.
docs: .venv-docs/installed
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

.venv-docs/installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

bench: .venv-bench/installed
	.venv-bench/bin/python -m benchmarks

.venv-bench/installed: requirements.txt export/requirements-onnx.txt benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	@touch $@
