#!/usr/bin/env bash
# Borders between packages, style and types: bash tests/lint.sh [DIRECTORY_OF_THE_PROGRAMS]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:+$1/}
"${bin}ruff" check .
"${bin}ruff" format --check .
"${bin}lint-imports"
"${bin}mypy"
