"""The `burnish` command: unpacks what was asked, and tells what went wrong in a line instead of a traceback."""

import functools
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from training.errors import BurnishError

app = typer.Typer(
    help="Fine-tuning on your own GPUs, through the OpenAI API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys = typer.Typer(help="API keys. The database keeps digests only.", no_args_is_help=True)
app.add_typer(keys, name="keys")

errors = Console(stderr=True, highlight=False, soft_wrap=True)


def _tells_errors(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def told(*args: object, **options: object) -> None:
        try:
            command(*args, **options)
        except BurnishError as bad:
            _fail(bad.message)
        except ValidationError as bad:
            _fail("\n".join(f"BURNISH_{str(e['loc'][0]).upper()}: {e['msg']}" for e in bad.errors()))

    return told


def _fail(message: str) -> None:
    errors.print("Error:", style="bold red", end=" ")
    errors.print(message, markup=False)
    raise typer.Exit(1)


@app.command()
@_tells_errors
def up(
    host: Annotated[str, typer.Option(help="Address that the API listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API.", min=1, max=65535)] = 8000,
) -> None:
    """Start the whole service on this machine and keep it up until Ctrl-C.

    PostgreSQL and Valkey are embedded unless BURNISH_DATABASE_URL and BURNISH_BROKER_URL name others.
    """
    from cli.up import up as run_up

    run_up(host, port, _say)


@app.command()
@_tells_errors
def demo() -> None:
    """Fine-tune a small model on this machine, watch the loss, and compare the answers before and after."""
    from cli.demo import demo as run_demo

    run_demo(Console(highlight=False))


@app.command()
@_tells_errors
def worker() -> None:
    """Run this host's worker, against the servers that BURNISH_DATABASE_URL and BURNISH_BROKER_URL name."""
    from cli.roles import run_worker

    run_worker(_say)


@app.command()
@_tells_errors
def beat() -> None:
    """Run the reconciler's clock; one is enough for all hosts, and two do no harm."""
    from cli.roles import run_beat

    run_beat()


@app.command()
@_tells_errors
def migrate() -> None:
    """Bring the tables of BURNISH_DATABASE_URL up to date and, on the first start, make the first key."""
    from cli.roles import migrate as run_migrate

    run_migrate(_say)


@keys.command("create")
@_tells_errors
def create_key(name: Annotated[str, typer.Option(help="What the key is for.")] = "burnish keys create") -> None:
    """Make a key and print it: it cannot be read again."""
    from cli.keys import create_key as run_create_key

    print(run_create_key(name))


@keys.command("list")
@_tells_errors
def list_keys() -> None:
    """List the keys: id, state, name."""
    from cli.keys import describe_keys

    print(*describe_keys(), sep="\n")


@keys.command("revoke")
@_tells_errors
def revoke_key(key: Annotated[str, typer.Argument(help="The id, as `burnish keys list` shows it.")]) -> None:
    """Refuse a key from now on."""
    from cli.keys import revoke

    print(f"{revoke(key)} is revoked")


def _say(line: str) -> None:
    # Flushed: whoever waits for a line of a started service reads it from a pipe.
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(app())
