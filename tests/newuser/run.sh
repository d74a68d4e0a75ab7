#!/bin/bash
# The first week of a new user: each function task_* of tasks.sh in a directory of its own, with job.toml and my.py.
#   bash tests/newuser/run.sh [TASK ...]     with the hpctrain of PATH; exit code 1 if a task failed
here=$(cd "$(dirname "$0")" && pwd)
source "$here/tasks.sh"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 XDG_CACHE_HOME
week=$(mktemp -d) && XDG_CACHE_HOME=$week/cache
trap 'rm -rf "$week"' EXIT

mkdir "$week/trained" && cp "$here/job.toml" "$here/my.py" "$week/trained"
(cd "$week/trained" && hpctrain run job.toml -n 2 >out 2>&1) || { cat "$week/trained/out"; exit 1; }

failed=0
for name in ${*:-$(declare -F | sed -n 's/^declare -f task_//p')}; do
    cp -r "$week/trained" "$week/$name"
    started=$SECONDS
    (cd "$week/$name" && set -eux -o pipefail && "task_$name") >"$week/$name.log" 2>&1 </dev/null
    code=$?
    if [ $code = 0 ]; then
        echo "ok      $name ($((SECONDS - started)) s)"
    else
        echo "FAILED  $name, exit code $code:"
        sed 's/^/    /' "$week/$name.log"
        failed=1
    fi
done
exit $failed
