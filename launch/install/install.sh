#!/bin/sh
# Makes .venv in the current folder and installs the pinned packages into it, and Troupe itself where this is
# its repository, so that its modules and `troupe` are found in any folder; does nothing when that is so.
# Called by every make target; Troupe's wheel has it too, in launch/install/ beside the pins.
# DEVICE is cpu or cuda (default: that of the .venv that is there, else cpu).
# PYTHON chooses the interpreter (default: the first of python3.11, python3.12, python3 and python whose
# version fits).
set -eu

made_for=$(cat .venv/.device 2>/dev/null || echo cpu)
device=${DEVICE:-$made_for}
pins=$(dirname "$0")/pins-$device.txt
if [ ! -f "$pins" ]; then echo "DEVICE=$device is not known: set DEVICE=cpu or DEVICE=cuda." >&2; exit 1; fi
stamp=.venv/.installed
cpu_wheels=https://download.pytorch.org/whl/cpu

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if fits "$candidate"; then echo "$candidate"; return; fi
    done
    echo "Troupe needs Python 3.11 or 3.12, and found none as: ${PYTHON:-python3.11 python3.12 python3 python}." >&2
    echo "Install one, or say where it is: make PYTHON=/path/to/python3.11 ..." >&2
    return 1
}

# -qq hides warnings about package folders that some machines configure and do not have; errors stay.
pip_install() { .venv/bin/python -m pip install -qq --no-deps --disable-pip-version-check "$@"; }

# PyPI lacks the CPU build of torch: some machines are set up to find it, and PyTorch's own index has it.
install_torch() {
    first_error=$(pip_install "$1" 2>&1) && return
    pip_install --extra-index-url "$cpu_wheels" "$1" && return
    echo "pip found no $1, neither where it is set up to look:" >&2
    echo "$first_error" >&2
    echo "nor at $cpu_wheels (its error is above)." >&2
    echo "The pins are for Linux on x86-64. Another Python may find it: make PYTHON=python3.11 ..." >&2
    return 1
}

# A .venv for another device does not count, as the engine has one name for both; nor, with PYTHON set, one of
# another version.
venv_fits() {
    [ "$device" = "$made_for" ] || return 1
    fits .venv/bin/python || return 1
    [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" --version)" = "$(.venv/bin/python --version)" ]
}

# The content, not the file time: a checkout that changes nothing must not install anything.
wanted=$(cat "$pins" "$0" | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && venv_fits; then exit 0; fi

# A .venv that works is kept: pip then installs only what differs.
rm -f "$stamp"
if ! venv_fits || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "Making .venv with $("$python" --version)."
    "$python" -m venv --clear .venv
    echo "$device" > .venv/.device
fi
torch=$(grep '^torch==' "$pins")
echo "Installing $torch (1 of 2)."
install_torch "$torch"
echo "Installing $(grep -c '==' "$pins") packages, about 2 minutes on a fast network (2 of 2)."
pip_install -r "$pins"
if [ -d launch/install ]; then pip_install --no-build-isolation --config-settings editable_mode=compat --editable .; fi
echo "$wanted" > "$stamp.new"
mv "$stamp.new" "$stamp"
echo "Installed into .venv."
