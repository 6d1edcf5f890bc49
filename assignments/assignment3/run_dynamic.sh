#!/usr/bin/env bash
# Train with dynamic micro-batches on NPROC ranks (2 by default). Flags are passed on; paths among
# them start from the project's root.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv run torchrun --nproc_per_node="${NPROC:-2}" assignments/assignment3/train_ddp.py --mode dynamic "$@"
