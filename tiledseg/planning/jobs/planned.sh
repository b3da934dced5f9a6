# What the plan decided.
[[ "${1:-}" != rehearse ]] || local=/tmp # a login node has no other disk
planned=(
@flags@
)

if [[ ! -r "$config" ]]; then
    echo "error: cannot read the configuration $config; set TILEDSEG_CONFIG" >&2
    exit 2
fi
if [[ "${1:-}" == rehearse ]]; then
    exec "$python" -m tiledseg.doctor --rehearse @ranks@ \
        --planned "@network@" \
        --config "$config" "${planned[@]}" "${@:2}"
fi
