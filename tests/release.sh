#!/usr/bin/env bash
# Makes a release: bash tests/release.sh VERSION. Builds and checks the five distributions, and tags; pushing and uploading are yours.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?"expected a version, such as 0.1.0"}
python=${PYTHON:-.venv/bin/python}

fail() { echo "release.sh: $1" >&2; exit 1; }
[ -z "$(git status --porcelain)" ] || fail "the working tree has changes; commit them first"
grep -q "^## $version (20[0-9-]*)$" CHANGELOG.md || fail "CHANGELOG.md has no heading '## $version (DATE)'; give this release its date"
grep -q "\"$version\"" hpctrain/version.py || fail "hpctrain/version.py has another version; set it, and commit"
if git rev-parse -q --verify "refs/tags/v$version" >/dev/null; then fail "the tag v$version exists"; fi

"$python" -m pip install -q build twine
rm -rf dist
for project in . plugins/hpctrain-*; do
  "$python" -m build -q --outdir dist "$project"
done
wheels=(dist/*-"$version"-*.whl)
[ "${#wheels[@]}" = 5 ] || fail "dist/ has ${#wheels[@]} wheels of $version, expected five"
"$python" -m twine check --strict dist/*
git tag -a "v$version" -m "hpctrain $version"
echo "dist/ has ${#wheels[@]} wheels and their sources, and HEAD is v$version: git push origin v$version && twine upload dist/*"
