"""The console script `omniattn`.

This is a separate package because `import omniattn` imports torch, which takes seconds. Once this
package is loaded, it does not: the commands of omniattn.cli parse their arguments first and import
torch when they run.
"""

from __future__ import annotations


def main() -> int:
    """Runs the command line and returns its exit code."""
    from omniattn.cli import main as run

    return run()
