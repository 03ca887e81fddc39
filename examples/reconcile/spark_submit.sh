#!/bin/sh
# Reconciles on a cluster: spark_submit.sh [CONFIG [SINCE [OPTION...]]]; options are those of `outbox reconcile run`.
# The driver reads the settings; the workers need the package, the database's address and the broker's folder under the
# same path. The exit status is the run's own.
set -eu
config=${1:-reconcile.toml}
since=${2:-48h}
[ $# -gt 2 ] && shift 2 || shift $#
exec spark-submit \
  --master "${SPARK_MASTER:-spark://master:7077}" \
  --conf spark.sql.shuffle.partitions="${SHUFFLE_PARTITIONS:-64}" \
  --conf spark.executor.memory="${EXECUTOR_MEMORY:-4g}" \
  "$(python -c 'import spark_reconcile.cli.spark_submit_entry; print(spark_reconcile.cli.spark_submit_entry.__file__)')" \
  run --config "$config" --since "$since" --master "${SPARK_MASTER:-spark://master:7077}" "$@"
