#!/usr/bin/env bash
# Publishes the lines of standard input, one message each, with curl alone: for scripts and cron. Not a library.
#
#     publish.sh URL TOPIC [ID_PREFIX] < lines
#
# With a prefix the ids are PREFIX-1, PREFIX-2, ...: the same input sent again is then no second message.
# OUTBOX_TOKEN is the bearer token, if there is one. The exit status says whether every line is on the broker's disk.
set -euo pipefail

url=${1:?URL} topic=${2:?TOPIC} prefix=${3:-$(tr -d - </proc/sys/kernel/random/uuid)}
number=0

while IFS= read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    body=$(printf '%s' "$line" | base64 -w 0)
    # --retry repeats what may pass: no connection, a time-out, 408, 429, 5xx. A message with an id is stored once.
    answer=$(
        printf '{"messages": [{"id": "%s-%d", "topic": "%s", "body": "%s", "encoding": "base64"}]}' \
            "$prefix" "$number" "$topic" "$body" |
            curl -sS --fail-with-body --retry 4 --retry-connrefused --max-time 10 --data-binary @- \
                -H 'Content-Type: application/json' ${OUTBOX_TOKEN:+-H "Authorization: Bearer $OUTBOX_TOKEN"} \
                "$url/v1/publish"
    ) || { printf 'line %d: %s\n' "$number" "$answer" >&2; exit 1; }
    case $answer in
        *'"status":"rejected"'*) printf 'line %d: %s\n' "$number" "$answer" >&2; exit 1 ;;
    esac
done
printf 'published %d\n' "$number"
