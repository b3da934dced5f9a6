#!/bin/bash
@about@
#
# Rehearsal, without GPUs and without LSF; then the job:
#
#   bash FILE rehearse [--group.key value ...]
#   bsub -P PROJECT < FILE
#
# Keys of the configuration go to the end of the line that trains.
# docs/how-to/batch-jobs.md has the variables TILEDSEG_*. With another -W give
# its minutes as TILEDSEG_MINUTES too.
@yours@
#
#BSUB -J tiledseg
@directives@
#BSUB -W @time@
#BSUB -wt 5
#BSUB -wa USR2
#BSUB -Q "75"
#BSUB -o tiledseg-%J-%I.log

set -euo pipefail

python="${TILEDSEG_PYTHON:-python}"
config="${TILEDSEG_CONFIG:-run.yaml}"
local="${TILEDSEG_LOCAL:-@local@}"
nodes="${TILEDSEG_NODES:-@nodes@}"
gpus="${TILEDSEG_GPUS_PER_NODE:-@per_node@}"
cores="${TILEDSEG_CORES_PER_GPU:-@cores@}"

@include planned@

@threads@
export OMP_NUM_THREADS="$cores"
@exports@

# The job's end: training stops in time by itself too, as a signal may be lost.
end=$(($(date +%s) + 60 * ${TILEDSEG_MINUTES:-@minutes@}))
export TILEDSEG_END_TIME="${TILEDSEG_END_TIME:-$end}"

@include lsf-@launcher@@

# Unpacks an archive on each node.
unpack() {
    on_nodes tar -xf "$1" -C "$2"
}
copies=0 # of the archive on the nodes

# LSF submits the job again at 75 (-Q), and does not count: a file does.
signal=USR2 job="${LSB_JOBID:-}" task="${LSB_JOBINDEX:-0}"
counter=".tiledseg-$job-$task.restarts"
restarts="$(cat "$counter" 2>/dev/null || echo 0)"
again() {
    echo "$((restarts + 1))" >"$counter"
}
trap '((code == 75)) || rm -f "$counter"' EXIT

@include run@
