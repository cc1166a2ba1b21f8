"""Executed by Python at the start of each tutorial's kernel, by way of PYTHONSTARTUP.

A command of a cell that fails, `!kontrast ...`, ends the build: Jupyter would go on. Figures are SVG.
"""

from IPython import get_ipython
from matplotlib_inline.backend_inline import set_matplotlib_formats


def fail_with_the_command(shell) -> None:
    """Replace the function behind `!command` by one that raises if the exit code is not 0."""
    run = shell.system

    def system(command: str) -> None:
        run(command)
        if code := shell.user_ns["_exit_code"]:
            raise RuntimeError(f"exit code {code}: {command}")

    shell.system = system


fail_with_the_command(get_ipython())
set_matplotlib_formats("svg")
