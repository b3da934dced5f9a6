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

# Writes the configuration with $local/data in place of the folder $1, where a
# path begins with it (as typed, from here, or absolute), but for run.output.
# Fails where no path does.
# shellcheck disable=SC2016
point_to_copy() {
    local whole real
    whole="$(cd "$1" && pwd)" real="$(cd "$1" && pwd -P)"
    printf -v whole '%s\n' "${1%/}" "$whole" "$real" "${whole#"$PWD/"}" \
        "./${whole#"$PWD/"}"
    FROM="$whole" TO="$local/data" awk '
        BEGIN { count = split(ENVIRON["FROM"], from, "\n") - 1 }
        function found(text, k, after) { # length of the folder before text
            for (k = 1; k <= count; k++) {
                after = substr(text, length(from[k]) + 1, 1)
                if (index(text, from[k]) == 1 && (after == "/" ||
                    from[k] ~ /\// && after !~ /[A-Za-z0-9_.~:-]/))
                    return length(from[k])
            }
            return 0
        }
        /^[ \t]*#/ { print; next }
        {
            for (at = 1; at <= length($0); at += long) {
                before = substr($0, 1, at - 1)
                long = found(substr($0, at))
                if (before ~ /([A-Za-z0-9_.\/~-]|output["\047]?:[^,]*)$/)
                    long = 0
                printf "%s", long ? ENVIRON["TO"] : substr($0, at, 1)
                hits += long > 0
                long = long ? long : 1
            }
            print ""
        }
        END { exit !hits }' "$config"
}

for input in "${TILEDSEG_ENVIRONMENT:-}" "${TILEDSEG_SWEEP:-}"; do
    if [[ -n "$input" && ! -r "$input" ]]; then
        echo "error: cannot read $input (TILEDSEG_ENVIRONMENT, _SWEEP)" >&2
        exit 2
    fi
done
if [[ -n "${TILEDSEG_DATA:-}" && ! -d "$TILEDSEG_DATA" ]]; then
    echo "error: TILEDSEG_DATA is $TILEDSEG_DATA, which is no folder" >&2
    exit 2
fi

# Staging: an archive with an environment (conda-pack, venv-pack) and a folder
# of rasters onto the nodes' own disks.
if [[ -n "${TILEDSEG_ENVIRONMENT:-}" ]]; then
    kib="$(tar -tvf "$TILEDSEG_ENVIRONMENT" |
        awk '{ bytes += $3 } END { printf "%.0f", bytes / 1024 }')"
    packed="$(du -skL "$TILEDSEG_ENVIRONMENT" | cut -f 1)"
    has_room "$((kib + copies * packed))" "$local/environment"
    unpack "$TILEDSEG_ENVIRONMENT" "$local/environment"
    python="$local/environment/bin/python"
fi
if [[ -n "${TILEDSEG_DATA:-}" ]]; then
    staged="tiledseg-$job-$task.yaml"
    if ! point_to_copy "$TILEDSEG_DATA" >"$staged"; then
        rm -f "$staged"
        echo "error: no path of $config begins with $TILEDSEG_DATA; give" \
            "TILEDSEG_DATA as the paths have it, scenes for scenes/*.tif" >&2
        exit 2
    fi
    kib="$(du -skL "$TILEDSEG_DATA" | cut -f 1)"
    has_room "$kib" "$local/data"
    on_nodes cp -ruL "$TILEDSEG_DATA/." "$local/data/"
    echo "staged: $staged has these paths on each node's disk:"
    diff "$config" "$staged" | grep '^>' || true
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

# The newest checkpoint of the run, or its folder where it has none yet. The
# folder is the last --run.output, else that of the configuration.
newest() {
    local word before='' folder
    folder="$(grep -v '^ *#' "$config" | grep -oE '(^|[ {])output: *[^],}# ]+' |
        tail -n 1 || true)"
    folder="${folder#*output:}" folder="${folder//[ \"\']/}"
    for word in ${flags[@]+"${flags[@]}"} "$@"; do
        [[ "$before" != --run.output ]] || folder="$word"
        [[ "$word" != --run.output=* ]] || folder="${word#*=}"
        before="$word"
    done
    folder="${folder:-runs/run}"
    [[ ! -d "$folder" ]] || find "$folder" -maxdepth 2 \( -path "$folder" \
        -o -path '*/checkpoints/step-*' \) | sort -V | tail -n 1
}

if [[ "${TILEDSEG_DOCTOR:-1}" == 1 ]] && ((!restarts)); then
    run "$python" -m tiledseg.doctor || code=$?
fi
most="${TILEDSEG_RESTARTS:-5}" gained=1
if ((code == 0)); then
    had="$(newest "$@")"
    run "$python" -m tiledseg.train --config "$config" \
        "${planned[@]}" ${flags[@]+"${flags[@]}"} "$@" || code=$?
    has="$(newest "$@")"
    [[ -z "$has" || "$has" != "$had" ]] || gained=0
fi
if ((code == 75 && cancelled)); then
    code=143
elif ((code == 75 && !gained)); then
    echo "error: this start has done no step, $has is the newest; the job is" \
        "not submitted again: give it more time" >&2
    code=143
elif ((code == 75 && restarts >= most)); then
    echo "error: no restart is left of $most, but steps are: submit the job" \
        "again, with a larger TILEDSEG_RESTARTS if need be" >&2
    code=143
elif ((code == 75)); then
    echo "the job goes on: requeued after $restarts restarts"
    again
fi
exit "$code"
