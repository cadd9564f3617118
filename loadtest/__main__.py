"""`python -m loadtest ...`, the same as `glm5 load ...`."""

import sys

import typer

from loadtest.cli import app
from service.errors import UserError
from service.terminal import lines


def main() -> None:
    try:
        app(prog_name="glm5 load")
    except UserError as error:
        typer.echo(f"error: {lines(str(error))}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
