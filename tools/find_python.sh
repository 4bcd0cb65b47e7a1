#!/bin/sh
# Print the path of a Python 3.12 that can make environments: on PATH, pyenv's or uv's.

works() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

# A pyenv shim exists for versions that are not selected; each candidate is therefore tried.
candidates() {
    for name in python3.12 python3 python; do
        command -v "$name"
    done
    pyenv=$(command -v pyenv) && pyenv=$(dirname "$(dirname "$pyenv")")
    for root in "$PYENV_ROOT" "$pyenv" "$HOME/.pyenv"; do
        [ -n "$root" ] && ls -d "$root"/versions/3.12*/bin/python3.12
    done
    command -v uv >/dev/null && uv python find 3.12
}

for candidate in $(candidates 2>/dev/null); do
    if works "$candidate"; then
        # The real path: an environment made from a shim would lead back to the shim.
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

cat >&2 <<'MESSAGE'
No Python 3.12 with venv was found on PATH, with pyenv or with uv. megatron-core 0.19.2's wheels and
this package need that version. To get one, any of:
    uv python install 3.12                              (uv: https://docs.astral.sh/uv)
    pyenv install 3.12                                  (pyenv: https://github.com/pyenv/pyenv)
    apt-get install python3.12 python3.12-venv          (Debian, Ubuntu 24.04)
Then run make again.
MESSAGE
exit 1
