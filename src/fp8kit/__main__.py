"""``python -m fp8kit`` is the command line."""

from fp8kit.cli.main import main

main(prog_name="fp8kit")
