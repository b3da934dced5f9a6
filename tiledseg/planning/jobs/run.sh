if [[ -n "${TILEDSEG_DATA:-}" ]]; then
    on_nodes mkdir -p "$local/data"
    on_nodes cp -ru "$TILEDSEG_DATA/." "$local/data/"
    staged="tiledseg-$job.yaml"
    sed "s|${TILEDSEG_DATA%/}/|$local/data/|g" "$config" >"$staged"
    config="$staged"
fi

# A sweep: task number N of a job array takes line number N of this file, which
# has flags of its own, --run.output among them.
flags=()
if [[ -n "${TILEDSEG_SWEEP:-}" ]]; then
    read -ra flags <<<"$(sed -n "${task}p" "$TILEDSEG_SWEEP")"
    if ((!${#flags[@]})); then
        echo "error: $TILEDSEG_SWEEP has no flags in line $task;" \
            "give the array as many tasks as it has lines" >&2
        exit 2
    fi
fi

signalled=0 stopped=0 cancelled=0 child=
# After TERM the ranks get the same signal: mpirun passes it on, but ends its
# ranks at once where it gets TERM itself.
trap 'signalled=1 stopped=1
    [[ -z "$child" ]] || kill -s "$signal" "$child" || true' "$signal"
trap 'signalled=1 stopped=1 cancelled=1
    [[ -z "$child" ]] || kill -s "$signal" "$child" || true' TERM
run() {
    ((!stopped)) || return 75
    "${launch[@]}" "$@" &
    child=$!
    code=0
    while wait "$child" || code=$?; ((signalled)); do
        signalled=0 code=0
    done
    return "$code"
}
