#!/usr/bin/env bash
# Checks and measures the GPUs of this host, and writes what it saw as one JSON object:
#
#   scripts/gpu_check.sh [OUT.json] [options of check_gpu.py]
#
# OUT.json is gpu-check.json in the current folder where none is named. Without a GPU it rehearses on the CPU.
# PYTHON=... chooses another Python than that of .venv.
# Ends with 0 where all is well, 1 where a check failed, 77 where all is well and no GPU was checked.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=gpu-check.json
if [[ $# -gt 0 && $1 != -* ]]; then
    out=$1
    shift
fi
python=${PYTHON:-$here/../.venv/bin/python}
[[ -n $(type -P "$python") ]] || python=python3

echo "Trains small models on the devices of this host, compares them with each other and with the CPU, and measures"
echo "how fast a model of a billion parameters is trained. What it sees goes to $out."
exec "$python" "$here/check_gpu.py" --json "$out" "$@"
