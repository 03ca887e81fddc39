"""Reconciles every hour with Airflow: one task an hour of data, repeatable, retried only where a source was down.

Put it in the folder of DAGs. A run that is tried again judges only what is left to judge. Its exit status is 1 where
there are findings, 3 where a source was missing or down: both fail the task, and only the second gets better by itself.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

CONFIG = "/etc/outbox-mq/reconcile.toml"

with DAG(
    dag_id="outbox_reconcile",
    schedule="5 * * * *",
    start_date=datetime(2026, 11, 1, tzinfo=UTC),
    catchup=True,
    max_active_runs=1,  # one run at a time writes to an output folder
):
    BashOperator(
        task_id="reconcile",
        bash_command=(
            f"outbox reconcile run --config {CONFIG} "
            "--since {{ (data_interval_start - macros.timedelta(hours=48)).isoformat() }} "
            "--until {{ data_interval_end.isoformat() }}"
        ),
        retries=5,
        retry_delay=timedelta(minutes=5),
    )
