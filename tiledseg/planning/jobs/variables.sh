# mpirun hands variables to other nodes only if told
names='^(PATH|LD_LIBRARY_PATH)$|^PYTHON|^(OMP|TILEDSEG|MASTER|NCCL|UCX|FI)_'
names="$names|^(RCCL|GLOO|TORCH|MIOPEN|GDAL|CPL|AWS)_"
while read -r name; do
    launch+=(-x "$name")
done < <(compgen -e | grep -E "$names")
