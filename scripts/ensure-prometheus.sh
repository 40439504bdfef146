#!/bin/sh
# Installs Prometheus if it is missing, for the tests of the alert rules and the Grafana dashboards. Idempotent.
set -eu

if command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "ensure-prometheus: prometheus is not installed and there is no apt-get: install Prometheus 2.42 or later manually." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "ensure-prometheus: prometheus is not installed: run 'sudo apt-get install -y prometheus' and try again." >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus; } \
    >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "ensure-prometheus: apt-get could not install prometheus; its last output is above." >&2
    exit 1
fi
command -v promtool >/dev/null 2>&1 || {
    echo "ensure-prometheus: apt-get succeeded, but promtool is not on the PATH." >&2
    exit 1
}
