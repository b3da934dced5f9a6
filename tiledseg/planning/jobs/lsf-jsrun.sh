# Rendezvous: mpi4py (built with Spectrum MPI) makes it. Without mpi4py the
# ranks meet at the first compute node, after the launch node in LSF's file.
if [[ -n "${LSB_DJOB_HOSTFILE:-}" ]]; then
    MASTER_ADDR="${MASTER_ADDR:-$(uniq "$LSB_DJOB_HOSTFILE" | sed -n 2p)}"
    MASTER_PORT="${MASTER_PORT:-$((15000 + LSB_JOBID % 15000))}"
    export MASTER_ADDR MASTER_PORT
fi

# GPUs: one resource set a node, in which each rank takes GPU number (local
# rank) and its own cores next to it. Sets of one GPU work too, but hide the
# neighbours from NCCL, which then cannot use NVLink between them.
launch=(jsrun --nrs "$nodes" --rs_per_host 1 --tasks_per_rs "$gpus"
    --gpu_per_rs "$gpus" --cpu_per_rs "$((gpus * cores))"
    --launch_distribution packed --bind "packed:$cores" --exit_on_error 1)

# Runs a command once on each node.
on_nodes() {
    jsrun --nrs "$nodes" --rs_per_host 1 --tasks_per_rs 1 --cpu_per_rs 1 "$@"
}
