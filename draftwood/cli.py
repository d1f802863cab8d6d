"""The command line. Every command parses, calls one function and prints; what it needs is imported when it runs."""

import typer

from draftwood import cli_benchmark, cli_decode, cli_prove, cli_train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train draft models for hybrid LLMs and decode with them, losslessly.",
)
app.add_typer(cli_decode.app)
app.add_typer(cli_prove.app)
app.add_typer(cli_train.app)
app.add_typer(cli_benchmark.app, name="benchmark")


def main() -> None:
    """Runs the command line. A mistake of the caller is one line on the standard error and exit code 2."""
    try:
        app()
    except Exception as error:
        from draftwood.models.assets import AssetError

        if not isinstance(error, ValueError | OSError | ImportError | AssetError):
            raise
        typer.echo(f"draftwood: {error}", err=True)
        raise SystemExit(2) from None
