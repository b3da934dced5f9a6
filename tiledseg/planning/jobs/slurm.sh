#!/bin/bash
@about@
#
# Rehearsal, without GPUs and without Slurm; then the job:
#
#   bash FILE rehearse [--group.key value ...]
#   sbatch FILE [--group.key value ...]
#
# Keys of the configuration may follow, the last one counts. The variables
# TILEDSEG_* stand in docs/how-to/batch-jobs.md.
@yours@
#
#SBATCH --job-name=tiledseg
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=@per_node@
#SBATCH --gpus-per-node=@per_node@
#SBATCH --cpus-per-task=@cores@
#SBATCH --time=@time@
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
@directives@

set -euo pipefail

python="${TILEDSEG_PYTHON:-python}"
config="${TILEDSEG_CONFIG:-run.yaml}"
local="${TILEDSEG_LOCAL:-@local@}"

@include planned@
tasks="${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))}"

@threads@
# srun takes cpus-per-task from its own variable, not from the batch script.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
@exports@

# The job's end: training stops in time by itself too, as a signal may be lost.
end="${SLURM_JOB_END_TIME:-}"
if [[ -z "$end" ]]; then
    end="$(squeue --noheader --job="$SLURM_JOB_ID" --format=%e || true)"
    [[ -z "$end" ]] || end="$(date --date="$end" +%s 2>/dev/null || true)"
fi
[[ -z "$end" ]] || export TILEDSEG_END_TIME="$end"

# GPUs: every rank sees those of its node and takes number (local rank). One GPU
# a task (--gpus-per-task) works too, but hides the neighbours from NCCL, which
# then cannot use the links between them.
# Rendezvous: rank 0's node and a port come from Slurm's variables; MASTER_ADDR
# and MASTER_PORT replace them where set.
if [[ "${TILEDSEG_LAUNCHER:-@launcher@}" == mpirun ]]; then
    launch=(mpirun -n "$tasks" --map-by "ppr:$SLURM_NTASKS_PER_NODE:node")
    launch+=(--bind-to none)
    @include variables@
else
    launch=(srun --kill-on-bad-exit=1 --cpu-bind=cores --gpu-bind=none)
fi

# Runs a command once on each node.
on_nodes() {
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
        --ntasks-per-node=1 "$@"
}

# Brings an archive to each node once, and unpacks it there.
unpack() {
    sbcast --force "$1" "$2.archive"
    on_nodes tar -xf "$2.archive" -C "$2"
    on_nodes rm -f "$2.archive"
}
copies=1 # of the archive on each node, beside what it holds

# Slurm submits a job again, and counts.
again() {
    scontrol requeue "$SLURM_JOB_ID"
}
signal=USR1 job="$SLURM_JOB_ID" task="${SLURM_ARRAY_TASK_ID:-0}"
restarts="${SLURM_RESTART_COUNT:-0}"

@include run@
