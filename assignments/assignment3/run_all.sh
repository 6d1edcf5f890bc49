#!/usr/bin/env bash
# Train with static, then with dynamic micro-batches on NPROC ranks (2 by default), and compare.
# Flags are passed on to both; paths among them start from the project's root.
set -euo pipefail
cd "$(dirname "$0")/../.."
outputs=outputs before=
for flag in "$@"; do
    if [[ $before == --output[_-]dir ]]; then outputs=$flag; fi
    if [[ $flag == --output[_-]dir=* ]]; then outputs=${flag#*=}; fi
    if [[ $flag == --run[_-]id* ]]; then
        echo "error: --run_id is for one run, and these are two; use run_static.sh and run_dynamic.sh" >&2
        exit 2
    fi
    before=$flag
done
rm -f "$outputs"/last_run_{static,dynamic}.txt
assignments/assignment3/run_static.sh "$@"
assignments/assignment3/run_dynamic.sh "$@"
uv run python assignments/assignment3/analyze_metrics.py \
    --run_dir "$(<"$outputs/last_run_static.txt")" \
    --compare_dir "$(<"$outputs/last_run_dynamic.txt")"
