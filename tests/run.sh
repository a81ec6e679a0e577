#!/usr/bin/env bash
# Checks everything, on a fresh machine too: style, types, tests. Makes its own environment in .venv-tests and finds or installs a Chromium.
#
#   tests/run.sh             all of it
#   tests/run.sh quick       without the tests that are slow or need a browser
#   tests/run.sh -k word     other arguments go to pytest
#
# Everything runs even if something fails; the exit status is that of the first failure. PYTHON and CHROMIUM choose the programs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

VENV=.venv-tests
status=0

say() { printf '%s\n' "$*" >&2; }

give_up() {
    say "$*"
    exit 1
}

step() {
    local name=$1 code=0
    shift
    say "== $name"
    "$@" || code=$?
    if [ "$code" -ne 0 ]; then
        say "== $name failed ($code)"
        if [ "$status" -eq 0 ]; then status=$code; fi
    fi
    return "$code"
}

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$name"
            return
        fi
    done
    return 1
}

make_environment() {
    local python stamp
    stamp=$(cat requirements.txt tests/requirements.txt | cksum)
    if [ "$(cat "$VENV/stamp" 2>/dev/null)" = "$stamp" ] && "$VENV/bin/python" --version >/dev/null 2>&1; then return; fi
    python=$(find_python) || give_up "Python 3.11 or newer with its venv module is needed; on Debian or Ubuntu: apt-get install python3 python3-venv"
    say "== making $VENV with $("$python" --version); this is done once"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || give_up "the environment $VENV could not be made"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt ||
        give_up "the packages of tests/requirements.txt could not be installed"
    printf '%s\n' "$stamp" >"$VENV/stamp"
}

works() { command -v "$1" >/dev/null 2>&1 && "$1" --version >/dev/null 2>&1; }

find_chromium() {
    local name
    for name in ${CHROMIUM:+"$CHROMIUM"} chromium chromium-browser google-chrome google-chrome-stable \
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome" "/Applications/Chromium.app/Contents/MacOS/Chromium"; do
        if works "$name"; then # the snap package's stand-in of the same name does not
            command -v "$name"
            return
        fi
    done
    return 1
}

install_chromium() {
    local sudo=""
    if [ "$(id -u)" -ne 0 ]; then sudo=$(command -v sudo || true); fi
    say "== installing a Chromium for the browser tests"
    if command -v apt-get >/dev/null 2>&1; then
        $sudo apt-get update -qq >&2
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation >&2
    elif command -v dnf >/dev/null 2>&1; then
        $sudo dnf install -y -q chromium >&2
    elif command -v brew >/dev/null 2>&1; then
        brew install --quiet --cask google-chrome >&2
    fi
}

selection=""
if [ "${1:-}" = quick ]; then
    shift
    selection="not slow and not browser"
fi

make_environment
if [ -z "$selection" ]; then
    if CHROMIUM=$(find_chromium) || { install_chromium && CHROMIUM=$(find_chromium); }; then
        export CHROMIUM
    else
        say "no Chromium was found or could be installed, so the browser tests are left out and this counts as a failure:"
        say "install Chromium or Google Chrome, or set CHROMIUM to its program"
        unset CHROMIUM
        selection="not browser"
        status=1
    fi
fi

export MINIGPT_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE
step "ruff check" "$VENV/bin/ruff" check
step "ruff format" "$VENV/bin/ruff" format --check
step "mypy" "$VENV/bin/mypy" & # beside the tests, which leave a core free now and then
mypy=$!
"$VENV/bin/python" tests/sizes.py
say "== pytest"
"$VENV/bin/python" -m pytest --rootdir=. -q -n 2 --dist worksteal tests ${selection:+-m "$selection"} "$@"
code=$?
wait "$mypy" || [ "$status" -ne 0 ] || status=1
if [ "$status" -eq 0 ]; then status=$code; fi
exit "$status"
