# Sourced by every sbatch file, from the project's root: one torchrun per node, which starts one
# rank per GPU (or RANKS_PER_NODE ranks). The first node of the job is where they meet.

# A site's own modules and settings; see README.md.
if [ -f "$PROJECT_ROOT/sbatch/modules.sh" ]; then source "$PROJECT_ROOT/sbatch/modules.sh"; fi

HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RENDEZVOUS_PORT=$((20000 + SLURM_JOB_ID % 20000)) # its own for every job
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
OUTPUT_DIR=${OUTPUT_DIR:-outputs/assignment2/cluster}

# run_ranks SCRIPT [FLAG…]: run the script on all ranks of the job; a rank that fails ends the job.
run_ranks() {
    srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \
        uv run --no-sync torchrun \
        --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$RANKS_PER_NODE" \
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
        --rdzv-endpoint="$HEAD_NODE:$RENDEZVOUS_PORT" \
        "$@"
}
