#!/bin/sh
# install.sh PYTHON ARGUMENT...: what "PYTHON -m pip install ARGUMENT..." does, by uv where that works.
# Torch brings some 4 GB of libraries; uv fetches and unpacks side by side what pip does in turn. It
# does not read pip's configuration, so where packages come from a place of one's own pip takes over.
# Compiled as pip does it, since each of the many processes that the tests start would do so anew.
python=$1
shift

find_uv() {
    command -v uv && return
    "$python" -m pip install --quiet uv >/dev/null 2>&1 && echo "$(dirname "$python")/uv"
}

uv=$(find_uv)
if [ -n "$uv" ]; then
    "$uv" pip install --quiet --compile-bytecode --python "$python" "$@" && exit 0
    echo "uv could not install this; pip is asked." >&2
fi
exec "$python" -m pip install --quiet "$@"
