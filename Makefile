# make demo: train and try a small editing model, 4 minutes on two CPU cores with AVX-512.
# make test: the tests.  make test-all: slow tests too, and those of the benchmarks.
# make lint: style.  Each makes .venv first, and only once.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

# A worker takes a file of tests at a time; one that dies ends the run, which would hang otherwise.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
	--max-worker-restart 0

.PHONY: demo test test-all aria2 lint
demo: .venv/installed
	$(BIN)/python demo/run_demo.py

test: .venv/installed .venv/tpu aria2
	$(BIN)/python -m pytest $(PARALLEL) --durations 10

test-all: .venv/installed .venv/tpu aria2
	$(BIN)/python -m pytest $(PARALLEL) --durations 10 -m ""

aria2:
	@{ command -v aria2c && command -v curl; } >/dev/null || bash setup-tpu-vm.sh aria2

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# torch comes first and pinned, so that requirements.txt accepts it. Without an NVIDIA driver it is
# PyTorch's CPU build, a tenth of the size of the CUDA build that the package index has. The CUDA
# build also works there, and is the fallback where PyTorch's own index cannot be reached.
.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, e.g.: make PYTHON=python3.12" >&2; exit 2; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-index $(TORCH) 2>/dev/null || \
		{ ! nvidia-smi >/dev/null 2>&1 && $(BIN)/python -m pip install --quiet \
			--retries 1 $(TORCH) --index-url https://download.pytorch.org/whl/cpu 2>/dev/null; } || \
		$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

# The TPU's compiler, for the tests of tpu_compile.py: beside what the scripts run with, as jax would
# look for a TPU wherever it is installed. There is none for some machines: then they are skipped.
.venv/tpu: .venv/installed
	-$(BIN)/python -m pip install --quiet --no-deps --target .venv/tpu-part "$$($(BIN)/python -c \
		'from importlib.metadata import requires; \
		print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))')" \
		&& rm -rf $@ && mv .venv/tpu-part $@
