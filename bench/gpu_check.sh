#!/bin/sh
# What one GPU does with the trainer, in less than five minutes: a JSON line per figure. No network,
# no vLLM and no model are needed. `bench/gpu_check.sh --tiny` runs the same on a CPU.
# The python is $PYTHON, else that of .venv, else python3. What is measured: see bench/gpu_check.py.
set -eu
cd "$(dirname "$0")/.."
[ ! -x .venv/bin/python ] || : "${PYTHON:=.venv/bin/python}"
"${PYTHON:=python3}" - <<'EOF'
import importlib.util
import sys

needed = "torch transformers accelerate peft safetensors urllib3 flask".split()
if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
    sys.exit(f"gpu_check: {sys.executable} lacks {', '.join(missing)}; PYTHON=... names another one")
EOF
exec "$PYTHON" bench/gpu_check.py "$@"
