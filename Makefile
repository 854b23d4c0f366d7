# The two commands of the README are `make demo` and `make test`; each makes .venv if it is missing.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,12))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# test processes at a time; each may start a few engine ranks
TEST_JOBS ?= 2

.PHONY: demo test test-postgresql test-gpu install check bench-model kernels-compile clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "autotune needs Python 3.11 or 3.12 on the PATH (or make PYTHON=/path/to/python)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt 'torch==2.13.0'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,humaneval]'
	# else a shell with PYTHONDONTWRITEBYTECODE set compiles every module at every start
	$(BIN)/python -m compileall -q autotune engine kernels model
	@touch $@

demo: install
	$(BIN)/autotune study start studies/quickstart.yaml

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

# Needs a PostgreSQL server and a driver (pip install 'psycopg[binary]'):
# make test-postgresql POSTGRESQL=postgresql://USER@HOST:PORT/NAME
test-postgresql: install
	@test -n "$(POSTGRESQL)" || { echo "give POSTGRESQL=postgresql://USER@HOST:PORT/NAME; its role must be allowed to create databases"; exit 2; }
	AUTOTUNE_TEST_POSTGRESQL=$(POSTGRESQL) $(BIN)/python -m pytest tests/unit/test_store_postgresql.py

# Needs a CUDA device; minutes. Every test that a GPU is needed for, then doctor, probe and a whole study.
test-gpu: install
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m bench.gpu_check --out build/gpu-check --budget 600 --only study,doctor

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every accuracy bar of the performance model, measured; about a minute.
bench-model: install
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.model_accuracy

# Compiles every Triton configuration for sm_80, 89, 90, 100 and 120; no GPU needed.
# About 25 minutes on 2 cores the first time; what is in Triton's cache is not compiled again.
kernels-compile: install
	$(BIN)/python -m kernels.compile_all

clean:
	rm -rf $(VENV) build *.egg-info
