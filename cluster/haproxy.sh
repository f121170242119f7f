#!/bin/sh
# HAProxy as Ray Serve starts it. Ray binds its statistics and metrics to every interface, and has no setting for that:
# bind them to loopback before HAProxy reads the file. `exec` keeps the PID that Ray watches.
last=
for word; do
    [ "$last" = -f ] && sed -i -E 's/^([[:space:]]*bind[[:space:]]+)\*?:([0-9]+)/\1127.0.0.1:\2/' "$word"
    last=$word
done
exec "$RANKLINE_HAPROXY" "$@"
