# make demo: train and use a small editing model, 4 minutes on two CPU cores with AVX-512.
# make test: one test of everything that matters, 5 minutes on two cores.  make test-all: all tests,
# with programs compiled as users' are.  make test-lowest: make test with the oldest packages that the
# requirements allow.  make test-export, make test-app: all tests of export_model.py or edit_app.py.
# make gpu-compiler: what compile_for.py --gpu and its slow tests need on a machine without a GPU.
# make app: the page of edit_app.py with the demo's model, which it makes if there is none.
# make lint: formatting and lint checks.  Every target creates .venv if it does not exist.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

# Each worker runs a share of the files and takes tests from a slower one when it has none left.
# --max-worker-restart 0: pytest would hang after a worker crash.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal --max-worker-restart 0

.PHONY: demo app test test-all test-lowest test-export test-app aria2 browser chromium gpu-compiler \
	lint
demo: .venv/installed
	$(BIN)/python demo/run_demo.py

app: .venv/app demo/output/model/model_index.json
	$(BIN)/python edit_app.py --model demo/output/model --examples demo/output/held_out/edits.jsonl

demo/output/model/model_index.json:
	$(MAKE) demo

.venv/app: .venv/installed pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[app]"
	touch $@

test: .venv/installed .venv/metrics .venv/tpu browser aria2
	$(BIN)/python -m pytest $(PARALLEL) --durations 10

test-all: .venv/installed .venv/metrics .venv/tpu browser aria2
	$(BIN)/python -m pytest $(PARALLEL) --durations 10 -m "" --optimized

# The tests of `make test`, in an environment of its own.
test-lowest: .venv-lowest/installed .venv-lowest/tpu aria2
	.venv-lowest/bin/python -m pytest $(PARALLEL) --durations 10

# Without its packages the tests of export_model.py are skipped.
test-export: .venv/export
	$(BIN)/python -m pytest $(PARALLEL) --durations 10 -m "" tests/test_export_model.py tests/diffusers_flax/exporting

.venv/export: .venv/installed pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[export]"
	touch $@

# If this fails, the tests of LPIPS are skipped. Its own requirements are not used.
.venv/metrics: .venv/installed requirements-metrics.txt
	-$(BIN)/python -m pip install --quiet --no-deps -r requirements-metrics.txt && touch $@

# Stops without gradio, Playwright or Chromium; make test skips the tests that need them.
test-app: .venv/playwright chromium
	$(BIN)/python -m pytest $(PARALLEL) --durations 10 -m "" tests/test_edit_app.py tests/diffusers_flax/app

.venv/playwright: .venv/app
	$(BIN)/python -m pip install --quiet playwright
	touch $@

# If this fails, the tests that need gradio, Playwright or Chromium are skipped.
browser: .venv/installed
	-@$(MAKE) --no-print-directory .venv/playwright chromium

chromium:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || \
		bash setup-tpu-vm.sh chromium

aria2:
	@{ command -v aria2c && command -v curl; } >/dev/null || bash setup-tpu-vm.sh aria2

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# $(call make_venv,FOLDER): a virtual environment with the pinned torch, which requirements.txt
# accepts. Without an NVIDIA driver it is the CPU build of PyTorch's index, a tenth of the size of the
# CUDA build on PyPI. The CUDA build works without a driver too and is the fallback if that index
# cannot be reached.
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "no Python 3.11 or newer; name one, e.g. make PYTHON=python3.12" >&2; exit 2; }
	$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip install --quiet --upgrade pip
	$(1)/bin/python -m pip install --quiet --no-index $(TORCH) 2>/dev/null || \
		{ ! nvidia-smi >/dev/null 2>&1 && $(1)/bin/python -m pip install --quiet \
			--retries 1 $(TORCH) --index-url https://download.pytorch.org/whl/cpu 2>/dev/null; } || \
		$(1)/bin/python -m pip install --quiet $(TORCH)
endef

.venv/installed: requirements.txt pyproject.toml
	$(call make_venv,.venv)
	$(BIN)/python -m pip install --quiet -r requirements.txt --editable .
	touch $@

# The oldest version that every line of the requirements allows. What these packages need
# themselves is the newest version that fits.
.venv-lowest/installed: requirements.txt requirements-app.txt
	rm -rf .venv-lowest
	$(call make_venv,.venv-lowest)
	# uv keeps installed versions, so what torch brought along goes first.
	.venv-lowest/bin/python -m pip list --format=freeze | grep -vE '^(torch|triton|nvidia|cuda|pip)' | \
		xargs .venv-lowest/bin/python -m pip uninstall --quiet --yes
	.venv-lowest/bin/python -m pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python \
		--resolution lowest-direct $(patsubst %,--requirements %,$^) --editable ".[export]"
	touch $@

# libtpu, the TPU compiler, for the tests of compile_for.py. It is not installed into .venv, because
# jax would then look for a TPU in every program. Tests are skipped where libtpu is unavailable.
%/tpu: %/installed
	-$*/bin/python -m pip install --quiet --no-deps --target $@-part "$$($*/bin/python -c \
		'from importlib.metadata import requires; \
		print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))')" \
		&& rm -rf $@ && mv $@-part $@

# The compiler for NVIDIA GPUs, 140 MB, of the same version as jax; also in a folder of its own. Tests
# that need it are skipped without it.
gpu-compiler: .venv/gpu
%/gpu: %/installed requirements-gpu-compiler.txt
	version=$$($*/bin/python -c 'import jaxlib; print(jaxlib.__version__)') && \
		sed -n "s/>=.*/==$$version/p" requirements-gpu-compiler.txt | \
		$*/bin/python -m pip install --quiet --target $@-part -r /dev/stdin
	rm -rf $@ && mv $@-part $@
