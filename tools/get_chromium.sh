#!/bin/sh
# Print "required" where there is a Chromium for the tests that need a browser, after installing
# Debian's if this is root without one; else say on standard error what is skipped, and print nothing.

have() {
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        command -v "$name" >/dev/null && return 0
    done
    return 1
}

install() {
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 1
    export DEBIAN_FRONTEND=noninteractive
    # The lists of packages may be there, and old ones do mostly.
    apt-get install -y -qq --no-install-recommends chromium ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }
}

have || install >/dev/null 2>&1
if have; then
    echo required
else
    cat >&2 <<'MESSAGE'
No Chromium was found, and none could be installed: the tests that look at pages in a browser are
skipped. To have them run: apt-get install chromium, as root, or put a chromium on PATH.
MESSAGE
fi
