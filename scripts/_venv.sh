# Sourced by the scripts of this folder: `prepare EXTRAS` makes .venv if there is none and installs the package into it.
#
# What was installed is remembered in .venv/sac-EXTRAS.stamp, so a second run installs nothing until pyproject.toml,
# constraints.txt or tests/stacks/no_deps.txt change. The extras contain each other: dev holds test, and test holds tools,hf.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${SAC_PYTHON:-$root/.venv/bin/python} # an interpreter of your own is used as it is: nothing is installed

make_venv() {
    [ -x "$python" ] && return
    command -v python3 >/dev/null || { echo "python3 is not on PATH; install Python 3.10 or newer" >&2; return 1; }
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        { echo "python3 is $(python3 -V); sac needs Python 3.10 or newer" >&2; return 1; }
    # Some systems ship venv without ensurepip; the outer pip then installs one.
    python3 -m venv .venv >/dev/null 2>&1 && return
    python3 -m venv --clear --without-pip .venv && python3 -m pip --python "$python" install --quiet pip
}

install_with_note() {
    local log=.venv/install.log
    echo "Installing sac[$1] into .venv (some minutes the first time; log in $log)" >&2
    if ! "$python" -m pip install -c constraints.txt -e ".[$1]" >"$log" 2>&1 ||
        ! install_without_dependencies "$1" >>"$log" 2>&1; then
        echo "The install failed; the end of $log:" >&2
        tail -n 20 "$log" >&2
        return 1
    fi
}

install_without_dependencies() {
    case $1 in test | dev) "$python" -m pip install --no-deps -r tests/stacks/no_deps.txt ;; esac
}

prepare() {
    [ -n "${SAC_PYTHON:-}" ] && return
    local extras=$1 wanted covering
    wanted=$(cat pyproject.toml constraints.txt tests/stacks/no_deps.txt | cksum)
    case $extras in
        dev) covering="dev" ;;
        test) covering="test dev" ;;
        *) covering="$extras test dev" ;;
    esac
    make_venv || return 1
    for set in $covering; do
        [ "$(cat ".venv/sac-$set.stamp" 2>/dev/null)" = "$wanted" ] && return
    done
    install_with_note "$extras" || return 1
    echo "$wanted" >".venv/sac-$extras.stamp"
}
