#!/bin/bash
# In the place of ssh, for hosts that are all this machine: AGENT [OPTIONS] HOST COMMAND...
# HOST "off" answers never, "unknown" has no address. A file down-HOST: the host is out of reach.
for file in /proc/$$/fd/*; do # as ssh does; else a proxy would hold the socket on which mpiexec listens
    number=${file##*/}
    ((number > 2 && number != 255)) && eval "exec $number>&-"
done
while [[ $1 == -* ]]; do shift; done
host=$1
shift
[[ $host == off ]] && exec sleep 1000
if [[ $host == unknown || -e down-$host ]]; then
    echo "ssh: Could not resolve hostname $host: Name or service not known" >&2
    sleep 1 # a busy mpiexec may see the end first, and then never reads the sentence
    exit 255
fi
exec bash -c "$*"
