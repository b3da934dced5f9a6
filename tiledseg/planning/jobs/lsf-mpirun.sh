# Ranks: Open MPI's mpirun takes the hosts from LSF's file, and each rank takes
# GPU number (local rank) of its node.
hosts="${LSB_DJOB_HOSTFILE:-}"
launch=(mpirun ${hosts:+--hostfile "$hosts"} -n "$((nodes * gpus))")
launch+=(--map-by "ppr:$gpus:node" --bind-to none)
@include variables@

# Runs a command once on each node.
on_nodes() {
    mpirun ${hosts:+--hostfile "$hosts"} -n "$nodes" --map-by ppr:1:node \
        --bind-to none "$@"
}
