#!/bin/sh
# Installs redis-server if it is missing, since the tests run against a real one. Idempotent.
set -eu

if command -v redis-server >/dev/null 2>&1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "ensure-redis: redis-server is not installed and there is no apt-get: install Redis 7 or later manually." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "ensure-redis: redis-server is not installed: run 'sudo apt-get install -y redis-server' and try again." >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends redis-server; } \
    >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "ensure-redis: apt-get could not install redis-server; its last output is above." >&2
    exit 1
fi
command -v redis-server >/dev/null 2>&1 || {
    echo "ensure-redis: apt-get succeeded, but redis-server is not on the PATH." >&2
    exit 1
}
