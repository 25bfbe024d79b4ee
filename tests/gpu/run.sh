#!/bin/bash
# The checks that need a GPU, on one of them, in under 8 minutes: bash tests/gpu/run.sh
#
# Run it in an environment with this package and its `dev` extra, and with flash-attn, vllm and bitsandbytes as far as
# they are to be checked: what is missing is named at the end as skipped. PYTHON=... takes another interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}

"$python" - <<'CHECK'
import sys
import torch

if not torch.cuda.is_available():
    sys.exit("no GPU here: torch.cuda.is_available() is False")
print(torch.cuda.get_device_name(0), "| torch", torch.__version__, "| CUDA", torch.version.cuda)
CHECK
HF_HUB_OFFLINE=1 timeout 480 "$python" -m pytest -m gpu -ra --durations=0 tests/gpu "$@"
