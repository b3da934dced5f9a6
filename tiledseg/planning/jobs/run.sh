# The signal before the job's end goes on to the ranks: they write a checkpoint
# and leave with 75, and the job is submitted again, at most TILEDSEG_RESTARTS
# times. After TERM (scancel, bkill) it is not. The ranks get the same signal
# then, since mpirun ends its ranks at once where it gets TERM itself.
code=0 signalled=0 stopped=0 cancelled=0 child=
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

# Ends the job where the disk of a node has no room for so many KiB.
# shellcheck disable=SC2016
has_room() {
    on_nodes bash -c 'mkdir -p "$2"
        free=$(df -Pk "$2" | awk "END { print \$4 }")
        free=$((free + $(du -sk "$2" | cut -f 1)))
        if ((free < $1)); then
            echo "error: $(hostname):$2 has room for $free KiB, but $1 come" \
                "there; set TILEDSEG_LOCAL to a larger disk" >&2
            exit 2
        fi' has_room "$1" "$2"
}

# Staging: an archive with an environment (conda-pack, venv-pack) and a folder
# of rasters onto the nodes' own disks.
if [[ -n "${TILEDSEG_ENVIRONMENT:-}" ]]; then
    kib="$(tar -tvf "$TILEDSEG_ENVIRONMENT" |
        awk '{ bytes += $3 } END { printf "%.0f", bytes / 1024 }')"
    has_room "$kib" "$local/environment"
    unpack "$TILEDSEG_ENVIRONMENT" "$local/environment"
    python="$local/environment/bin/python"
fi
if [[ -n "${TILEDSEG_DATA:-}" ]]; then
    has_room "$(du -skL "$TILEDSEG_DATA" | cut -f 1)" "$local/data"
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

if [[ "${TILEDSEG_DOCTOR:-1}" == 1 ]] && ((!restarts)); then
    run "$python" -m tiledseg.doctor || code=$?
fi
if ((code == 0)); then
    run "$python" -m tiledseg.train --config "$config" \
        "${planned[@]}" ${flags[@]+"${flags[@]}"} "$@" || code=$?
fi
if ((code == 75 && !cancelled && restarts < ${TILEDSEG_RESTARTS:-100})); then
    echo "the job goes on: requeued after $restarts restarts"
    again
elif ((code == 75)); then
    code=143
fi
exit "$code"
