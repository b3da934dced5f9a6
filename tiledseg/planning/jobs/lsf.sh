#!/bin/bash
@about@
#
# Rehearsal without GPUs:
@rehearsal@
#
#   bsub -P PROJECT < FILE
#
# Keys of the configuration go to the end of the line that trains.
# jobs/README.md has the variables TILEDSEG_*. Yours to give: -q, the modules
# and the environment of the shell, and, where jobs share nodes, -x, or cores
# and memory: -R "affinity[core(@cores@)] rusage[mem=...]".
#
#BSUB -J tiledseg
@nodes_directive@
#BSUB -W @time@
#BSUB -wt 5
#BSUB -wa USR2
#BSUB -Q "75"
#BSUB -o tiledseg-%J.log
@directives@

set -euo pipefail

python="${TILEDSEG_PYTHON:-python}"
config="${TILEDSEG_CONFIG:-run.yaml}"
local="${TILEDSEG_LOCAL:-@local@}"
nodes="${TILEDSEG_NODES:-@nodes@}"
gpus="${TILEDSEG_GPUS_PER_NODE:-@per_node@}"
cores="${TILEDSEG_CORES_PER_GPU:-@cores@}"

# What the plan decided.
planned=(
@flags@
)

@threads@
export OMP_NUM_THREADS="$cores"
@exports@

# The job's end: training stops in time by itself too, as a signal may be lost.
end=$(($(date +%s) + 60 * ${TILEDSEG_MINUTES:-@minutes@}))
export TILEDSEG_END_TIME="${TILEDSEG_END_TIME:-$end}"

@launch@

# USR2 comes five minutes before the job's end, and goes on to the ranks: they
# write a checkpoint and leave with 75, at which LSF submits the job again
# (-Q 75). After TERM (bkill) it does not.
signal=USR2 job="${LSB_JOBID:-}" task="${LSB_JOBINDEX:-0}"

# Staging: an archive with an environment (conda-pack, venv-pack) and a folder
# of rasters onto the nodes' own disks.
if [[ -n "${TILEDSEG_ENVIRONMENT:-}" ]]; then
    on_nodes mkdir -p "$local/environment"
    on_nodes tar -xf "$TILEDSEG_ENVIRONMENT" -C "$local/environment"
    python="$local/environment/bin/python"
fi
@run@

code=0
if [[ "${TILEDSEG_DOCTOR:-1}" == 1 ]]; then
    run "$python" -m tiledseg.doctor || code=$?
fi
if ((code == 0)); then
    run "$python" -m tiledseg.train --config "$config" \
        "${planned[@]}" "${flags[@]}" "$@" || code=$?
fi
if ((code == 75 && cancelled)); then
    code=143
fi
exit "$code"
