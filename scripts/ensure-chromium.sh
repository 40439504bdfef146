#!/bin/sh
# Installs Chromium if it is missing, for the tests of the dashboard. Idempotent.
set -eu

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if ! command -v apt-get >/dev/null 2>&1; then
    echo "ensure-chromium: chromium is not installed and there is no apt-get: install Chromium or Chrome manually." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "ensure-chromium: chromium is not installed: run 'sudo apt-get install -y chromium' and try again." >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } \
    >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "ensure-chromium: apt-get could not install chromium; its last output is above." >&2
    exit 1
fi
command -v chromium >/dev/null 2>&1 || {
    echo "ensure-chromium: apt-get succeeded, but chromium is not on the PATH." >&2
    exit 1
}
