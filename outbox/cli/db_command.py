"""Commands `outbox db upgrade | grants | current`: create, upgrade and check the outbox tables, and grant their use."""

from __future__ import annotations

from typing import Annotated

import typer

from outbox.admin.grants import DatabaseRole
from outbox.admin.grants import grants as grants_of
from outbox.cli.database_options import PasswordFile, Schema, Url
from outbox.migrate import schema_upgrade
from outbox.store.database import background_engine, database_errors, open_engine
from outbox.store.database_url import database_url
from outbox.store.databases.supported import database_of
from outbox.store.schema import TABLES_MAX

app: typer.Typer = typer.Typer(help="Make and upgrade the outbox tables.", no_args_is_help=True)

Schemas = Annotated[
    list[str] | None,
    typer.Option("--schema", help="A schema for the outbox tables alone (MySQL); repeat it to split."),
]
Tables = Annotated[
    int,
    typer.Option("--tables", min=1, max=TABLES_MAX, help="Message tables over all schemas, split by CRC32 of the key."),
]


@app.command()
def upgrade(
    url: Url,
    schema: Schemas = None,
    password_file: PasswordFile = None,
    tables: Tables = 1,
    owner: Annotated[
        str | None, typer.Option("--owner", help="The database of the service whose schema it is; default: the URL's.")
    ] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Services of several databases share the schema.")] = False,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL for a database without the tables; connect to nothing.")
    ] = False,
) -> None:
    """Make the tables, or bring them up to date. Safe to run again.

    --sql prints what a database administrator is to run instead, where the tables are not there yet.

    Examples:

      outbox db upgrade --url mysql+pymysql://root@127.0.0.1/shop

      outbox db upgrade --url mysql+pymysql://root@db/shop --schema outbox_0 --schema outbox_1 --tables 256

      outbox db upgrade --url mysql+pymysql://db/shop --sql > outbox.sql
    """
    if sql:
        statements = schema_upgrade.upgrade_statements(
            database_url(url, password_file=password_file), schema=schema or None, tables=tables, owner=owner,
            is_shared=shared,
        )  # fmt: skip
        typer.echo(statements, nl=False)
        return
    named = database_url(url, password_file=password_file)
    reached = schema_upgrade.upgrade(named, schema=schema or None, tables=tables, owner=owner, is_shared=shared)
    typer.echo(f"the outbox tables are at revision {reached}")


@app.command()
def grants(
    url: Url,
    role: Annotated[DatabaseRole, typer.Option("--role", help="Whose grants.")],
    schema: Schema = None,
    user: Annotated[str | None, typer.Option("--user", help="Name of the user; default: the role's.")] = None,
    host: Annotated[str, typer.Option("--host", help="Where the user connects from.")] = "%",
    password_file: PasswordFile = None,
) -> None:
    """Print what to grant a role, table by table.

    Runs none of the statements.

    Only `app` sees business tables; a reconciliation also needs SELECT on those that its rules name.

    Example: outbox db grants --url mysql+pymysql://root@db/shop --role app --user shop_app
    """
    engine = open_engine(database_url(url, password_file=password_file))
    background = background_engine(engine)
    try:
        account = database_of(engine.dialect).account(user or role, host=host)
        with database_errors(engine.url), background.connect() as connection:
            for statement in grants_of(connection, role, schema=schema, account=account):
                typer.echo(statement)
    finally:
        background.dispose()
        engine.dispose()


@app.command()
def current(url: Url, schema: Schema = None, password_file: PasswordFile = None) -> None:
    """Print the tables' revision. Exit status 1 where it is not the newest.

    Example: outbox db current --url mysql+pymysql://root@127.0.0.1/shop
    """
    engine = open_engine(database_url(url, password_file=password_file))
    background = background_engine(engine)
    try:
        with database_errors(engine.url), background.connect() as connection:
            revision = schema_upgrade.current(connection, schema=schema)
    finally:
        background.dispose()
        engine.dispose()
    typer.echo(revision or "none")
    raise typer.Exit(0 if revision == schema_upgrade.head() else 1)
