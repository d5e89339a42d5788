"""`python -m edm2`: tools around training and sampling."""

from edm2.cli.main import main

main(prog_name="python -m edm2")
