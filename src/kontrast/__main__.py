"""`python -m kontrast` is `kontrast`."""

from kontrast.cli import main

main()
