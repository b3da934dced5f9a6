# Ranks: Open MPI's mpirun takes the hosts from LSF's file, and each rank takes
# GPU number (local rank) of its node.
hosts="${LSB_DJOB_HOSTFILE:-}"
launch=(mpirun ${hosts:+--hostfile "$hosts"} -n "$((nodes * gpus))")
launch+=(--map-by "ppr:$gpus:node" --bind-to none)
# mpirun hands variables to other nodes only if told
names='^(PATH|LD_LIBRARY_PATH)$|^PYTHON|^(OMP|TILEDSEG|MASTER|NCCL|UCX|FI)_'
names="$names|^(RCCL|GLOO|TORCH|MIOPEN|GDAL|CPL|AWS)_"
while read -r name; do
    launch+=(-x "$name")
done < <(compgen -e | grep -E "$names")

# Runs a command once on each node.
on_nodes() {
    mpirun ${hosts:+--hostfile "$hosts"} -n "$nodes" --map-by ppr:1:node \
        --bind-to none "$@"
}
