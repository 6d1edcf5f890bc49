# Sourced by every sbatch file: goes to the project's root, loads the site's modules, and starts one
# torchrun per node, which starts one rank per GPU of the node (or RANKS_PER_NODE ranks).

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -f sbatch/modules.sh ]; then # see README.md
    set +u # what sites source there reads variables that need not be set
    source sbatch/modules.sh
    set -u
fi
export SLURM_EXPORT_ENV=ALL # after `sbatch --export=…` srun would pass on no more than that
export RANKS_PER_NODE # read on the nodes, also where a job file sets it

OUTPUT_DIR=${OUTPUT_DIR:-outputs/assignment2/cluster}

# `#SBATCH --signal=USR1@…` and `scancel --signal=USR1` are for the ranks. Whoever does not expect
# USR1 dies of it, so the shells ignore it; srun, uv and torchrun inherit that, and so do the
# ranks until they install a handler.
trap '' USR1

# run_ranks SCRIPT [FLAG…], or run_ranks -m MODULE [FLAG…]: run it on all ranks of the job, with
# --device DEVICE where that is set, in front, so that FLAGS win. The nodes meet at the first one; a
# rank that fails ends the job. Status 2, after one line: the device cannot be had on this node.
run_ranks() {
    local endpoint program=("$1") asked=${SLURM_GPUS_PER_NODE:-1} granted=${SLURM_GPUS_ON_NODE:-}
    if [ "$1" = -m ]; then program+=("$2"); fi
    set -- "${program[@]}" ${DEVICE:+--device "$DEVICE"} "${@:1+${#program[@]}}"
    uv run --no-sync python -m common.runtime.job_device "${@:1+${#program[@]}}" || return
    asked=${asked##*:} # of a100:4 the number
    if [ "$asked" != 1 ] && [ "$asked" != "${granted:-$asked}" ] && [ -z "${RANKS_PER_NODE:-}" ]; then
        echo "asked for $asked GPUs per node, granted all $granted: a rank on each (RANKS_PER_NODE takes fewer)"
    fi
    endpoint=$(rendezvous_endpoint) || return
    # With --exclusive a job has all GPUs of its nodes, but its steps only as many as were asked for,
    # unless they ask themselves.
    # shellcheck disable=SC2016  # expanded on each node, where what the step has is known
    srun ${granted:+--gpus-per-node="$granted"} --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --kill-on-bad-exit=1 --cpu-bind=none \
        bash -c 'trap "" USR1
            exec uv run --no-sync torchrun --nproc-per-node="${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
                --rdzv-conf="is_host=$((SLURM_NODEID == 0)),join_timeout=${JOIN_TIMEOUT_S:-600}" "$@"' torchrun \
        --nnodes="$SLURM_JOB_NUM_NODES" ${NUMA_BINDING:+--numa-binding="$NUMA_BINDING"} \
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$endpoint" \
        "$@"
}

# Address of the job's first node, and a port of the job's own below those that Linux hands out.
rendezvous_endpoint() {
    local head address
    read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST") || return
    if ! getent hosts "$head" >/dev/null; then # a node's name need not be a host's; Slurm knows
        address=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    fi
    echo "${address:-$head}:$((20000 + SLURM_JOB_ID % 12000))"
}

# choose_model LIST: sets MODEL. Task i of a job array takes item i, and writes below
# OUTPUT_DIR/MODEL (and CHECKPOINT_DIR/MODEL); without an array it is the first item.
choose_model() {
    local models index=${SLURM_ARRAY_TASK_ID:-0}
    read -r -a models <<<"${1//,/ }"
    if [ "$index" -ge "${#models[@]}" ]; then
        echo "error: array index $index, but MODEL has ${#models[@]} items, from 0: ${models[*]}" >&2
        exit 2
    fi
    MODEL=${models[index]}
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
        OUTPUT_DIR=$OUTPUT_DIR/$MODEL
        CHECKPOINT_DIR=${CHECKPOINT_DIR:+$CHECKPOINT_DIR/$MODEL}
    elif [ "${#models[@]}" -gt 1 ]; then
        echo "MODEL has ${#models[@]} items; only $MODEL without sbatch --array=0-$((${#models[@]} - 1))"
    fi
}

# train_ranks NAME SCRIPT [FLAG…]: run_ranks, with a checkpoint every SAVE_EVERY steps in
# CHECKPOINT_DIR (by default NAME in a folder below OUTPUT_DIR), from whose newest the training goes
# on. Ranks that were told to stop (USR1) and have saved leave a file `stopped` there; then the job
# goes back into the queue. Not so after a failure, without a new checkpoint, or MAX_REQUEUES times.
train_ranks() {
    local name=$1 status=0 before
    CHECKPOINT_DIR=${CHECKPOINT_DIR:-$OUTPUT_DIR/checkpoints/$name}
    rm -f "$CHECKPOINT_DIR/stopped"
    before=$(newest_checkpoint)
    # In front, so that FLAGS win; the folder last, because it is looked into here.
    run_ranks "$2" --save_every "${SAVE_EVERY:-50}" "${@:3}" --checkpoint_dir "$CHECKPOINT_DIR" || status=$?
    if [ "$status" -eq 0 ] || [ ! -f "$CHECKPOINT_DIR/stopped" ]; then return "$status"; fi
    if [ "$(newest_checkpoint)" = "$before" ]; then
        echo "stopped without a new checkpoint in $CHECKPOINT_DIR: not requeued" >&2
        return 1
    fi
    requeue_job "step $(cat "$CHECKPOINT_DIR/stopped")"
}

# The newest checkpoint and when it was made.
newest_checkpoint() {
    if [ -d "$CHECKPOINT_DIR" ]; then
        find "$CHECKPOINT_DIR" -maxdepth 1 -name 'step-*' -printf '%T@ %f\n' | sort -n | tail -n 1
    fi
}

# requeue_job WHERE: put this job back into the queue, unless Slurm has done so or ends it anyway
# (`scontrol requeue`, preemption, `scancel`, the time limit: the state is then another).
requeue_job() {
    local state restarts=${SLURM_RESTART_COUNT:-0} job=$SLURM_JOB_ID
    # One task of an array has the array's id as its own, by which Slurm means all tasks.
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    state=$(squeue --noheader --jobs="$job" --format=%T) || state=RUNNING # slurmctld was too busy
    if [ "$state" != RUNNING ]; then return 75; fi
    if [ "$restarts" -ge "${MAX_REQUEUES:-20}" ]; then
        echo "stopped at $1 after $restarts requeues (MAX_REQUEUES): submit again to go on" >&2
        return 75
    fi
    trap '' TERM # Slurm ends a job that it requeues, at times before the last line below
    if ! scontrol requeue "$job"; then # --no-requeue, or a site that allows it to nobody
        trap - TERM
        echo "stopped at $1 and not requeued: submit again to go on" >&2
        return 75
    fi
    echo "stopped at $1: requeued"
}
